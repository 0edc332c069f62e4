"""A text file of lines that makes room when it is full: it is renamed, and begins again.

`FILE` becomes `FILE.1`, what was that becomes `FILE.2`, and so on. Knows names and sizes, not what lines say.
"""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

NUM_OLDER = 4  # files that are kept beside the one that is written


class RotatingFile:
    """Each line is in the file as soon as it is written. The caller calls `turn`, between two lines.

    Args:
        max_bytes: the file is full with so many; None: it never is. A pipe or a device is never full: its name is not
            ours to change.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path, max_bytes: int | None) -> None:
        self._path = Path(path)
        is_ours = self._path.is_file() or not self._path.exists()
        self._max_bytes = max_bytes if is_ours else None
        self._num_bytes = self._path.stat().st_size if self._path.exists() else 0
        is_cut = _is_cut(self._path)
        self._file = self._open("a")
        if is_cut:  # the process before this one ended in the middle of a line
            self.write("\n")

    @property
    def is_full(self) -> bool:
        """Whether it is time to `turn`."""
        return self._max_bytes is not None and self._num_bytes >= self._max_bytes

    def write(self, text: str) -> None:
        """Add whole lines.

        Raises:
            OSError: they cannot be written.
        """
        self._num_bytes += len(text.encode())
        self._file.write(text)

    def turn(self) -> None:
        """Rename the file and the older ones, of which the oldest goes, and begin an empty one.

        Raises:
            OSError: one cannot be renamed.
        """
        self._file.close()
        for number in reversed(range(NUM_OLDER)):
            if (file := _numbered(self._path, number)).exists():
                file.replace(_numbered(self._path, number + 1))
        self._num_bytes = 0
        self._file = self._open("w")

    def close(self) -> None:
        """End it."""
        self._file.close()

    def _open(self, mode: str) -> TextIO:
        return open(self._path, mode, encoding="utf-8", buffering=1)  # type: ignore[return-value]


def files_of(path: Path) -> list[Path]:
    """A rotating file and what it was before, the oldest first; `path` is the last, whether it exists or not."""
    older = [_numbered(path, number) for number in reversed(range(1, NUM_OLDER + 1))]
    return [*(file for file in older if file.is_file()), path]


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def _is_cut(path: Path) -> bool:
    """Whether a file ends within a line."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"
