"""Every file operation that pages go through, behind one small protocol.

Knows descriptors, offsets and buffers, not records. Tests put faults here, and benchmarks a slower disk.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

Buffer: TypeAlias = "bytes | bytearray | memoryview"
_MAX_BUFFERS = 512  # in one call; Linux takes 1024


class Files(Protocol):
    """What the store asks of a file system. Every method may raise OSError."""

    def open(self, path: Path, *, create: bool = False, is_scattered: bool = False) -> int:
        """A descriptor to read and write `path`; with `create` of a new file, which must not be there. If reads are to
        be scattered, nothing is read ahead of them."""

    def close(self, fd: int) -> None:
        """End a descriptor."""

    def size(self, fd: int) -> int:
        """Bytes of the file."""

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Fill writable buffers one after the other; how many bytes there were, fewer at the end of the file."""

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write buffers one after the other; how many bytes were taken, perhaps not all."""

    def fdatasync(self, fd: int) -> None:
        """Return when what was written outlives a loss of power."""

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Cut the file."""

    def drop_cache(self, fd: int, offset: int, num_bytes: int) -> None:
        """Say that these bytes will not be read again soon: other files may have their memory."""

    def unlink(self, path: Path) -> None:
        """Remove a file."""

    def fsync_dir(self, path: Path) -> None:
        """Return when names that were made in a directory, or removed, outlive a loss of power."""


class OSFiles:
    """The operating system's own. Files that are made are their owner's alone: keys and values are conversations."""

    def open(self, path: Path, *, create: bool = False, is_scattered: bool = False) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        if is_scattered:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return fd

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def truncate(self, fd: int, num_bytes: int) -> None:
        os.ftruncate(fd, num_bytes)

    def drop_cache(self, fd: int, offset: int, num_bytes: int) -> None:
        os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def fsync_dir(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_all(files: Files, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Write all of `buffers` from `offset` on, in as many calls as it takes; how many bytes that were."""
    return _move_all(files.pwritev, fd, buffers, offset)


def read_all(files: Files, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Fill all of `buffers` from `offset` on; how many bytes there were before the file ended."""
    return _move_all(files.preadv, fd, buffers, offset)


class _Move(Protocol):
    def __call__(self, fd: int, buffers: Sequence[Buffer], offset: int, /) -> int: ...


def _move_all(move: _Move, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    waiting = [memoryview(buffer) for buffer in buffers if len(buffer)]
    first, done = 0, 0
    while first < len(waiting):
        moved = move(fd, waiting[first : first + _MAX_BUFFERS], offset + done)
        if moved == 0:
            break
        done += moved
        while first < len(waiting) and moved >= waiting[first].nbytes:
            moved -= waiting[first].nbytes
            first += 1
        if moved:
            waiting[first] = waiting[first][moved:]
    return done
