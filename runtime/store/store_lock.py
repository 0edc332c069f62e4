"""Keep a directory to one process: the second one is refused, with the number of the first."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import StoreBusy

NAME: Final = "LOCK"


@dataclass
class StoreLock:
    """Held until `release`, or until the process ends, however it does."""

    _fd: int

    @classmethod
    def take(cls, directory: Path) -> StoreLock:
        """Take the lock of a directory.

        Raises:
            StoreBusy: somebody has it.
            OSError: there can be no file.
        """
        fd = os.open(directory / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
