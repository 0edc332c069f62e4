"""What a store's directory has besides segments: the name of its index, its lock and its secret.

The lock keeps the directory to one process. Namespaces are made with the secret, so that they outlive the process and
cannot be guessed.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import StoreBusy
from .files import OSFiles

INDEX: Final = "index.sqlite"
_LOCK: Final = "LOCK"
_SECRET: Final = "SECRET"
_SECRET_BYTES: Final = 32


@dataclass
class StoreLock:
    """Held until `release`, or until the process ends."""

    _fd: int

    @classmethod
    def take(cls, directory: Path) -> StoreLock:
        """Take the lock of a directory.

        Raises:
            StoreBusy: another process has it; the error names that process.
            OSError: the file cannot be made.
        """
        fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise StoreBusy(
                f"{directory} is open in process {holder}, this is {os.getpid()}; end that one or use another"
            ) from None
        except OSError:
            os.close(fd)
            raise
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        return cls(fd)

    def release(self) -> None:
        """Give the lock back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_secret(directory: Path) -> bytes:
    """The 32 bytes of a directory's secret. A missing one is made; pages of namespaces of a lost one are never found.

    Raises:
        OSError: the file can neither be read nor made.
    """
    path = directory / _SECRET
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        secret = b""
    return secret if len(secret) == _SECRET_BYTES else _make_secret(path)


def _make_secret(path: Path) -> bytes:
    secret = secrets.token_bytes(_SECRET_BYTES)
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
