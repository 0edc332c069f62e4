"""The secret of a directory: namespaces are made with it, so that they outlive the process and nobody can guess one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

from .files import OSFiles

NAME: Final = "SECRET"
NUM_BYTES: Final = 32


def read_secret(directory: Path) -> bytes:
    """The secret of a directory, made when there is none; what another one named is never found again.

    Raises:
        OSError: it can neither be read nor made.
    """
    path = directory / NAME
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        secret = b""
    return secret if len(secret) == NUM_BYTES else _make(path)


def _make(path: Path) -> bytes:
    secret = secrets.token_bytes(NUM_BYTES)
    unnamed = path.with_suffix(".new")
    fd = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, secret)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(unnamed, path)
    OSFiles().fsync_dir(path.parent)
    return secret
