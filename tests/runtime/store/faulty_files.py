"""Files that fail when told to, and that know what of them a loss of power would leave; nothing waits for a disk.

Until `fdatasync` each sector that was written may be the old or the new one, and a file may be as short as it was or
as long as it is; until `fsync_dir` a new name may be missing, and one that was removed may be there again.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from radixlm.runtime.store.files import Buffer, OSFiles

SECTOR = 512
OPERATIONS = ("open", "preadv", "pwritev", "fdatasync", "truncate", "drop_cache", "unlink", "fsync_dir")


class PowerLost(BaseException):
    """The machine stops here. No `except` of the store's may hold it."""


@dataclass
class _File:
    path: Path
    synced: bytearray  # what is on disk in any case


@dataclass
class FaultyFiles(OSFiles):
    """Does what `before` says to each operation: raise, or nothing. Writes take at most `max_write` bytes a call."""

    before: Callable[[str], None] = lambda operation: None
    max_write: int | None = None
    num_operations: int = 0
    _files: dict[Path, _File] = field(default_factory=dict)
    _paths: dict[int, Path] = field(default_factory=dict)
    _new: set[Path] = field(default_factory=set)
    _removed: dict[Path, bytes] = field(default_factory=dict)

    def open(self, path: Path, *, create: bool = False, is_scattered: bool = False) -> int:
        self._begin("open")
        fd = super().open(path, create=create, is_scattered=is_scattered)
        self._paths[fd] = path
        if path not in self._files:
            self._files[path] = _File(path, bytearray(path.read_bytes()))
        if create:
            self._new.add(path)
        return fd

    def close(self, fd: int) -> None:
        self._paths.pop(fd, None)
        super().close(fd)

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._begin("preadv")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        data = b"".join(buffers)
        if self.max_write is not None:
            data = data[: self.max_write]
        try:
            self._begin("pwritev")
        except PowerLost:
            super().pwritev(fd, [data], offset)  # whichever sectors were written by then
            raise
        except OSError:
            super().pwritev(fd, [data[: len(data) // 2]], offset)
            raise
        return super().pwritev(fd, [data], offset)

    def fdatasync(self, fd: int) -> None:
        self._begin("fdatasync")
        path = self._paths[fd]
        self._files[path].synced = bytearray(path.read_bytes())

    def truncate(self, fd: int, num_bytes: int) -> None:
        self._begin("truncate")
        super().truncate(fd, num_bytes)

    def will_need(self, fd: int, offset: int, num_bytes: int) -> None:
        self._begin("will_need")
        super().will_need(fd, offset, num_bytes)

    def drop_cache(self, fd: int, offset: int, num_bytes: int) -> None:
        self._begin("drop_cache")
        super().drop_cache(fd, offset, num_bytes)

    def unlink(self, path: Path) -> None:
        self._begin("unlink")
        self._removed[path] = path.read_bytes()
        super().unlink(path)
        self._files.pop(path, None)
        self._new.discard(path)

    def fsync_dir(self, path: Path) -> None:
        self._begin("fsync_dir")
        self._new.clear()
        self._removed.clear()

    def lose_power(self, directory: Path, left: Path, chance: random.Random) -> None:
        """Write to the new directory `left` what the disk of `directory` may hold after this moment."""
        left.mkdir()
        for path in directory.iterdir():
            if path in self._new and chance.random() < 0.5:
                continue
            data = bytearray(path.read_bytes())
            if path in self._files:
                data = _torn(self._files[path].synced, data, chance)
            elif path.suffix == ".sqlite-wal":
                data = data[: chance.randint(0, len(data))]
            elif path.suffix == ".sqlite-shm":
                continue
            (left / path.name).write_bytes(data)
        for path, removed in self._removed.items():
            if chance.random() < 0.5:
                (left / path.name).write_bytes(removed)

    def _begin(self, operation: str) -> None:
        self.num_operations += 1
        self.before(operation)


@dataclass
class FailAt:
    """Fails operation number `at`, counted from 0, among those named; and all after it, if it `lasts`."""

    at: int
    error: BaseException | int = errno.EIO
    operations: Sequence[str] = OPERATIONS
    lasts: bool = False
    has_failed: bool = False

    def __call__(self, operation: str) -> None:
        if operation not in self.operations:
            return
        self.at -= 1
        if self.at == -1 or (self.at < 0 and self.lasts):
            self.has_failed = True
            raise self.error if isinstance(self.error, BaseException) else OSError(self.error, "on purpose")


def _torn(synced: bytearray, now: bytearray, chance: random.Random) -> bytearray:
    """Old or new sectors, as chance has it."""
    num_bytes = chance.randint(min(len(synced), len(now)), max(len(synced), len(now)))
    old, new = synced.ljust(num_bytes, b"\0"), now.ljust(num_bytes, b"\0")
    torn = old[:num_bytes]
    for first in range(0, num_bytes, SECTOR):
        if chance.random() < 0.5:
            torn[first : first + SECTOR] = new[first : min(first + SECTOR, num_bytes)]
    return torn
