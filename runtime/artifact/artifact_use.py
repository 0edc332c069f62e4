"""Track which artifacts are open, and when each was last opened, so that old ones can be removed while a server runs.

Each process that has an artifact open holds a shared lock on its directory. Removing takes the lock exclusively. The
directory's modification time is that of the last use: nothing else changes a published directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from ..errors import ArtifactBusy, ArtifactNotFound

_REMOVED = ".removed-"  # prefix of a directory that is being removed


@dataclass
class ArtifactUse:
    """One opening of an artifact; has no effect if the file system has no locks."""

    _fd: int | None

    @classmethod
    def begin(cls, path: Path) -> ArtifactUse:
        """Lock the artifact at `path` as open.

        Raises:
            ArtifactBusy: it is being removed.
        """
        fd = None
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            assert fd is not None
            os.close(fd)
            raise ArtifactBusy(f"{path} is being removed by another process; compile it again") from None
        except OSError:  # for instance on a network file system
            return cls(fd)
        with contextlib.suppress(OSError):  # another user owns the artifact
            os.utime(path)
        return cls(fd)

    def end(self) -> None:
        """Release the lock. Can be called twice."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)  # closing is not enough: a forked child has the descriptor, too
            os.close(self._fd)
            self._fd = None


def is_open(path: Path) -> bool:
    """Return whether any process has the artifact at `path` open."""
    try:
        fd = _lock(path)
    except ArtifactBusy:
        return True
    except OSError:
        return False
    os.close(fd)
    return False


def remove_artifact(path: Path) -> None:
    """Remove an artifact that no process has open. Other processes see all of it, or nothing.

    Raises:
        ArtifactBusy: a process has it open.
        ArtifactNotFound: it is gone.
    """
    try:
        fd = _lock(path)
    except FileNotFoundError:
        raise ArtifactNotFound(f"{path} is gone already") from None
    try:
        removed = path.with_name(f"{_REMOVED}{os.getpid()}-{path.name}")
        path.rename(removed)
        shutil.rmtree(removed)
    finally:
        os.close(fd)


def last_used(path: Path) -> float:
    """Return when the artifact at `path` was last opened or published, in seconds since 1970."""
    return path.stat().st_mtime


def _lock(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ArtifactBusy(f"{path} is open in another process; end that one first") from None
    except OSError:
        os.close(fd)
        raise
    return fd
