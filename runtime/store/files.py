"""The files of a store: every operation that segments go through, behind one small protocol; the lock and the secret.

Knows descriptors, offsets and buffers, not records. Tests put faults behind the protocol, and benchmarks a slower disk.
The lock keeps a directory to one process. Namespaces are made with its secret, so that they outlive the process and
cannot be guessed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from ..errors import StoreBusy

Buffer: TypeAlias = "bytes | bytearray | memoryview"
_MAX_BUFFERS = 512  # in one call; Linux takes 1024
INDEX: Final = "index.sqlite"
_LOCK: Final = "LOCK"
_SECRET: Final = "SECRET"
_SECRET_BYTES: Final = 32


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

    def will_need(self, fd: int, offset: int, num_bytes: int) -> None:
        """Have the disk begin to read these bytes, which will be asked for soon."""

    def drop_cache(self, fd: int, offset: int, num_bytes: int) -> None:
        """Say that these bytes will not be read again soon: other files may have their memory."""

    def unlink(self, path: Path) -> None:
        """Remove a file."""

    def disk_bytes(self, directory: Path) -> tuple[int, int]:
        """How large the disk of a directory is, and what it has left for this user."""

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

    def will_need(self, fd: int, offset: int, num_bytes: int) -> None:
        os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def drop_cache(self, fd: int, offset: int, num_bytes: int) -> None:
        os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def disk_bytes(self, directory: Path) -> tuple[int, int]:
        found = os.statvfs(directory)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

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
        with contextlib.suppress(OSError):  # it is for people, and the disk may be full
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        return cls(fd)

    def release(self) -> None:
        """Give the lock back."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # closing is not enough: a forked child has the descriptor, too
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
