"""What the loops of Python packages let a model do in the folder that they run in, and who they ask."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

URL, MODEL, TASK = (os.environ[f"RADIXLM_{name}"] for name in ("URL", "MODEL", "TASK"))


def run(command: str) -> str:
    """Run a command.

    Args:
        command: what a shell is told.
    """
    done = subprocess.run(command, shell=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.stdout


def read(path: str) -> str:
    """Read a file.

    Args:
        path: the file.
    """
    return Path(path).read_text()


def write(path: str, text: str) -> str:
    """Write a file.

    Args:
        path: the file.
        text: all that it is to hold.
    """
    Path(path).write_text(text)
    return "written"


def edit(path: str, old: str, text: str) -> str:
    """Replace a line of a file.

    Args:
        path: the file.
        old: the line.
        text: what takes its place.
    """
    Path(path).write_text(Path(path).read_text().replace(old, text))
    return "replaced"


TOOLS = (run, read, write, edit)
