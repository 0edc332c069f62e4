"""The files of a store: every file operation of segments, as one small protocol; the lock and the secret.

Knows descriptors, offsets and buffers, not records. Tests inject faults through the protocol, and benchmarks a slower
disk. The lock limits a directory to one process. The directory's secret makes namespaces that outlive the process and
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
from typing import Final, Protocol

from ..errors import StoreBusy
from ..system import Buffer as Buffer
from ..system import drop_cached, expect_reads, expect_scattered_reads, read_at, sync_data, sync_file, write_at

_MAX_BUFFERS = 512  # in one call; Linux and macOS accept 1024
INDEX: Final = "index.sqlite"
_LOCK: Final = "LOCK"
_SECRET: Final = "SECRET"
_SECRET_BYTES: Final = 32


class Files(Protocol):
    """The file system operations of a store. Every method can raise OSError."""

    def open(self, path: Path, *, create: bool = False, is_scattered: bool = False) -> int:
        """Open `path` for reading and writing, and return a descriptor.

        With `create` the file must not exist, and is created. With `is_scattered` the system does not read ahead.
        """

    def close(self, fd: int) -> None:
        """Close a descriptor."""

    def size(self, fd: int) -> int:
        """Return the size of the file in bytes."""

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Fill writable buffers in order; return the number of bytes read, fewer at the end of the file."""

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write buffers in order; return the number of bytes written, perhaps not all."""

    def fdatasync(self, fd: int) -> None:
        """Wait until everything written survives a power loss."""

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Truncate the file to `num_bytes` bytes."""

    def will_need(self, fd: int, offset: int, num_bytes: int) -> None:
        """Start reading these bytes in the background, because they will be read soon."""

    def drop_cache(self, fd: int, offset: int, num_bytes: int) -> None:
        """Let the system reuse the cache memory of these bytes, which will not be read again soon."""

    def unlink(self, path: Path) -> None:
        """Remove a file."""

    def disk_bytes(self, directory: Path) -> tuple[int, int]:
        """Return the size of the directory's disk, and its free bytes for this user."""

    def fsync_dir(self, path: Path) -> None:
        """Wait until names created or removed in a directory survive a power loss."""


class OSFiles:
    """The operating system's files.

    Only their owner can read the files it creates, because KV contains conversations.
    """

    def open(self, path: Path, *, create: bool = False, is_scattered: bool = False) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        if is_scattered:
            expect_scattered_reads(fd)
        return fd

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return read_at(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return write_at(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        sync_data(fd)

    def truncate(self, fd: int, num_bytes: int) -> None:
        os.ftruncate(fd, num_bytes)

    def will_need(self, fd: int, offset: int, num_bytes: int) -> None:
        expect_reads(fd, offset, num_bytes)

    def drop_cache(self, fd: int, offset: int, num_bytes: int) -> None:
        drop_cached(fd, offset, num_bytes)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def disk_bytes(self, directory: Path) -> tuple[int, int]:
        found = os.statvfs(directory)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def fsync_dir(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            sync_file(fd)
        finally:
            os.close(fd)


def write_all(files: Files, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Write all of `buffers` from `offset` on, in as many calls as needed; return the number of bytes written."""
    return _repeat_until_done(files.pwritev, fd, buffers, offset)


def read_all(files: Files, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Fill all of `buffers` from `offset` on; return the number of bytes read before the file ended."""
    return _repeat_until_done(files.preadv, fd, buffers, offset)


class _TransferCall(Protocol):
    """`Files.preadv` or `Files.pwritev`, which can transfer fewer bytes than requested."""

    def __call__(self, fd: int, buffers: Sequence[Buffer], offset: int, /) -> int: ...


def _repeat_until_done(move: _TransferCall, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Call `move` until all bytes of `buffers` are read or written, or it moves none; return their number."""
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
    """The lock of a directory, held until `release` or until the process ends."""

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
        with contextlib.suppress(OSError):  # the process id is for people only, and the disk can be full
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        return cls(fd)

    def release(self) -> None:
        """Release the lock."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # closing is not enough: a forked child has the descriptor, too
            os.close(self._fd)
            self._fd = -1


def read_secret(directory: Path) -> bytes:
    """Return the directory's secret, 32 bytes.

    Creates a missing one; pages of a lost secret's namespaces are never found.

    Raises:
        OSError: the file can be neither read nor created.
    """
    path = directory / _SECRET
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        secret = b""
    return secret if len(secret) == _SECRET_BYTES else _create_secret(path)


def _create_secret(path: Path) -> bytes:
    """Write a new secret to `path`, so that it survives a power loss; return it."""
    secret = secrets.token_bytes(_SECRET_BYTES)
    unnamed = path.with_suffix(".new")
    fd = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, secret)
        sync_file(fd)
    finally:
        os.close(fd)
    os.replace(unnamed, path)
    OSFiles().fsync_dir(path.parent)
    return secret
