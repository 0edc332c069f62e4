"""Simulate a slower disk with a token bucket for reads and writes together, and count their bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from radixlm.runtime.store.files import Buffer, Files


class ThrottledFiles:
    """Does what `files` does, and returns when a disk of the declared speed would have.

    Every method may be called by any thread; they share the disk.

    Args:
        bytes_per_s: the disk's bandwidth; None: as fast as `files`.
        burst_bytes: the bytes that it transfers at once after a rest.
        clock, sleep: seconds.

    Attributes:
        read_bytes: requested and returned so far.
        written_bytes: written so far.
    """

    def __init__(
        self,
        files: Files,
        bytes_per_s: float | None,
        *,
        burst_bytes: int = 1 << 18,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._files = files
        self._bytes_per_s = bytes_per_s
        self._burst_s = 0.0 if bytes_per_s is None else burst_bytes / bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._done_at = clock()  # when the disk has transferred all bytes so far
        self.read_bytes = 0
        self.written_bytes = 0

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Read like the files within; count the bytes, and wait as a slower disk would take."""
        num_bytes = self._files.preadv(fd, buffers, offset)
        with self._lock:
            self.read_bytes += num_bytes
        self._wait(num_bytes)
        return num_bytes

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write like the files within; count the bytes, and wait as a slower disk would take."""
        num_bytes = self._files.pwritev(fd, buffers, offset)
        with self._lock:
            self.written_bytes += num_bytes
        self._wait(num_bytes)
        return num_bytes

    def open(self, path: Path, *, create: bool = False, is_scattered: bool = False) -> int:
        return self._files.open(path, create=create, is_scattered=is_scattered)

    def close(self, fd: int) -> None:
        self._files.close(fd)

    def size(self, fd: int) -> int:
        return self._files.size(fd)

    def fdatasync(self, fd: int) -> None:
        self._files.fdatasync(fd)

    def truncate(self, fd: int, num_bytes: int) -> None:
        self._files.truncate(fd, num_bytes)

    def will_need(self, fd: int, offset: int, num_bytes: int) -> None:
        self._files.will_need(fd, offset, num_bytes)

    def drop_cache(self, fd: int, offset: int, num_bytes: int) -> None:
        self._files.drop_cache(fd, offset, num_bytes)

    def unlink(self, path: Path) -> None:
        self._files.unlink(path)

    def disk_bytes(self, directory: Path) -> tuple[int, int]:
        return self._files.disk_bytes(directory)

    def fsync_dir(self, path: Path) -> None:
        self._files.fsync_dir(path)

    def _wait(self, num_bytes: int) -> None:
        """Wait until the slower disk would have moved `num_bytes` more bytes, after a free burst."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now = self._clock()
            self._done_at = max(self._done_at, now - self._burst_s) + num_bytes / self._bytes_per_s
            seconds = self._done_at - now
        if seconds > 0:
            self._sleep(seconds)
