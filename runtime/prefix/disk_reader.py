"""Read from the store in a separate thread, one read at a time, and report each result in the engine's thread.

Knows reads and a few buffers, not where pages go or which request needs them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..model.batch import UInt8Array

if TYPE_CHECKING:
    from ..store import PageKey, PageStore

_LOGGER = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20  # of a buffer: enough for the disk's full speed, and inserting it does not delay a step
HANG_S = 10.0  # when closing, longer reads and writes are not waited for
NUM_BUFFERS = 3  # one is being read into, one is copied to the pool, one waits


class EngineThread(Protocol):
    """Runs closures in the engine's thread, between two steps."""

    def post(self, work: Callable[[], None]) -> None:
        """Run a closure before the next step. For any thread."""
        ...

    def at(self, time_s: float, work: Callable[[], None]) -> None:
        """Run a closure once the engine's clock reaches `time_s`. For the engine's thread."""
        ...


@dataclass(eq=False)
class Read:
    """A read that is queued, running or finished. The engine's thread owns it, and gets the result by `done`.

    Attributes:
        num_bytes: approximate bytes to read.
        pages: the pages read, uint8 `[N, page_bytes]`, until `done` returns; None if it reads something else.
        num_right: number of valid first pages; for other reads 1 if the data is valid.
        seconds: duration of the read.
    """

    work: Callable[[UInt8Array], int]
    done: Callable[[Read], None]
    num_bytes: int
    num_pages: int
    pages: UInt8Array | None = None
    num_right: int = 0
    seconds: float = 0.0
    is_cancelled: bool = False
    is_done: bool = False
    buffer: UInt8Array | None = None  # the reader's own

    @property
    def is_right(self) -> bool:
        """Return whether all data is valid."""
        return self.num_right == max(self.num_pages, 1)


class DiskReader:
    """Reads from the store in order. A read of pages without memory of its own waits for one of a few buffers.

    Args:
        queue: calls `Read.done`; the buffer is free again when that returns.

    Attributes:
        piece_pages: pages that fit into a buffer.
    """

    def __init__(self, store: PageStore, page_bytes: int, queue: EngineThread) -> None:
        self._store, self.page_bytes, self._queue = store, page_bytes, queue
        self.piece_pages = max(1, PIECE_BYTES // page_bytes)
        self._wake = threading.Condition()  # guards everything below
        self._reads: deque[Read] = deque()
        self._num_buffers = 0  # buffers allocated so far, when first needed
        self._free: list[UInt8Array] = []
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="radixlm-store-reader", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Bytes that are read before anything requested now."""
        with self._wake:
            return sum(read.num_bytes for read in self._reads)

    def read_pages(
        self, page_keys: tuple[PageKey, ...], done: Callable[[Read], None], *, into: UInt8Array | None = None
    ) -> Read:
        """Queue a read of pages; `done` is called with it when it ends. Returns the read, which can be cancelled.

        At most `piece_pages` pages, or more `into` memory for them: uint8 `[len(page_keys), page_bytes]`.
        """
        read = Read(
            lambda out: self._store.read(page_keys, out), done, len(page_keys) * self.page_bytes, len(page_keys), into
        )
        return self._add(read)

    def read_state(self, page: PageKey, out: UInt8Array, done: Callable[[Read], None]) -> Read:
        """Read the state after a page into `out`, uint8 `[state_bytes]`."""
        return self.run(lambda: self._store.states.read(page, out), done, num_bytes=out.nbytes)

    def run(self, work: Callable[[], bool], done: Callable[[Read], None], *, num_bytes: int = 0) -> Read:
        """Read something else: `work` runs in the reader's thread, and returns whether the data is valid.

        An exception is logged, and counts as False.
        """
        return self._add(Read(lambda _: work(), done, num_bytes, 0))

    def cancel(self, reads: Iterable[Read]) -> None:
        """Remove reads from the queue, which are then done. A running read continues, and `done` is called after it."""
        for read in reads:
            read.is_cancelled = True
        with self._wake:
            for read in self._reads:
                read.is_done = read.is_cancelled
            self._reads = deque(read for read in self._reads if not read.is_cancelled)

    def close(self) -> bool:
        """Stop after the running read; return False if the disk hangs and the read continues. Can be called twice."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(HANG_S)
        return not self._thread.is_alive()

    def _add(self, read: Read) -> Read:
        """Queue a read, and return it."""
        with self._wake:
            self._reads.append(read)
            self._wake.notify()
        return read

    def _run(self) -> None:
        """Do the queued reads in order, and post each result to the engine's thread, until the reader closes."""
        while (read := self._wait_for_read()) is not None:
            begun = time.perf_counter()
            try:
                read.num_right = int(read.work(_NO_PAGES if read.pages is None else read.pages))
            except Exception:  # the store handles errors of disks; this is a bug
                _LOGGER.exception("reading from the store failed")
            read.seconds, read.is_done = time.perf_counter() - begun, True
            self._queue.post(partial(self._finish, read))
            del read  # otherwise its pages stay allocated until the next read

    def _wait_for_read(self) -> Read | None:
        """Wait for a queued read that has room in memory, and take it off the queue; None when the reader closes."""
        with self._wake:
            while not self._is_closing:
                if self._reads and self._has_room(self._reads[0]):
                    return self._reads.popleft()
                self._wake.wait()
            return None

    def _has_room(self, read: Read) -> bool:
        """Return whether a read has memory to read into; give it a buffer if one is free."""
        if read.pages is not None or not read.num_pages:
            return True
        if not self._free and self._num_buffers < NUM_BUFFERS:
            self._num_buffers += 1
            self._free.append(np.empty((self.piece_pages, self.page_bytes), np.uint8))
        if self._free:
            read.buffer = self._free.pop()
            read.pages = read.buffer[: read.num_pages]
        return read.pages is not None

    def _finish(self, read: Read) -> None:
        """Call `done` and free the buffer. Runs in the engine's thread."""
        try:
            read.done(read)
        finally:
            buffer, read.buffer, read.pages = read.buffer, None, None
            if buffer is not None:
                with self._wake:
                    self._free.append(buffer)
                    self._wake.notify()


_NO_PAGES: UInt8Array = np.empty((0, 0), np.uint8)
