"""How much of a disk a store leaves free: its index needs some to change anything, and so do others.

Knows directories and bytes, no records.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .files import Files
from .segment import segment_paths

_LOGGER = logging.getLogger(__name__)

NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)  # of an OSError: the disk is full, and otherwise well
# SQLite calls the second a "disk I/O error": the memory that it shares with its readers, a file, could not grow.
_INDEX_IS_FULL: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
FULL_S: Final = 60.0  # until something is tried again on a disk that was full
_LEAST, _MOST = 16 << 20, 1 << 30  # bytes of the reserve
_SHARE, _MOST_SHARE = 20, 4  # parts of the disk: one is the reserve; one is the most that it may be


def is_full(error: Exception) -> bool:
    """Return whether an error says that the disk is full, and nothing worse."""
    if isinstance(error, OSError):
        return error.errno in NO_SPACE
    return getattr(error, "sqlite_errorcode", None) in _INDEX_IS_FULL


@dataclass(frozen=True)
class DiskRoom:
    """The free bytes of a directory's disk, and how many of them the store does not take.

    Attributes:
        reserve_bytes: what records leave free. A quarter of it is for the index, which makes room by changing.
    """

    directory: Path
    files: Files
    reserve_bytes: int

    @classmethod
    def of(cls, directory: Path, files: Files) -> DiskRoom:
        """Return the room of a directory: a twentieth of its disk is the reserve, from 16 MiB to 1 GiB."""
        total, _ = files.disk_bytes(directory)
        return cls(directory, files, min(max(total // _SHARE, _LEAST), _MOST, total // _MOST_SHARE))

    @property
    def free_bytes(self) -> int:
        """What the disk has left for this user."""
        return self.files.disk_bytes(self.directory)[1]

    @property
    def missing_bytes(self) -> int:
        """What has to become free before the index can be changed; 0: nothing."""
        return max(0, self.reserve_bytes // 4 - self.free_bytes)

    def has_room_for(self, num_bytes: int) -> bool:
        """Return whether so many more bytes leave the reserve free."""
        return self.free_bytes - num_bytes >= self.reserve_bytes

    def make_room_to_open(self) -> None:
        """Remove the oldest segments until the index can be opened; recovery takes their records out of it."""
        for path in segment_paths(self.directory).values():
            if not self.missing_bytes:
                return
            _LOGGER.warning("the disk of %s is full: %s makes room", self.directory, path.name)
            self.files.unlink(path)
