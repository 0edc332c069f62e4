"""Read from the store in a thread of its own, one read after the other, and say in the engine's thread when it is done.

Knows reads and a few buffers, not where pages go or which request wants them.
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

PIECE_BYTES = 8 << 20  # of a buffer: disks reach their speed, and inserting what comes back does not hold up a step
HANG_S = 10.0  # a read or a write that takes longer, when all is closed, is not waited for
NUM_BUFFERS = 3  # one is read into, one is copied to the pool, one waits


class EngineThread(Protocol):
    """Has closures run in the engine's thread, between two steps."""

    def post(self, work: Callable[[], None]) -> None:
        """Run a closure before the next step. Any thread may call it."""
        ...

    def at(self, time_s: float, work: Callable[[], None]) -> None:
        """Run a closure once the engine's clock has come to `time_s`. The engine's thread calls it."""
        ...


@dataclass(eq=False)
class Read:
    """A read that is queued, runs or is done; the engine's thread looks at it, and learns by `done` what came of it.

    Attributes:
        num_bytes: that it reads, about.
        pages: that it read, uint8 `[N, page_bytes]`, until `done` returns; None: it reads something else.
        num_right: of the pages, so many first ones are right; of something else 1 if it is right.
        seconds: that it took.
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
        """Whether all of it is right."""
        return self.num_right == max(self.num_pages, 1)


class DiskReader:
    """Does reads in order. A read of pages without room of its own waits for one of a few buffers.

    Args:
        queue: has `Read.done` called; the buffer goes back when that returns.

    Attributes:
        piece_pages: that fit into a buffer.
    """

    def __init__(self, store: PageStore, page_bytes: int, queue: EngineThread) -> None:
        self._store, self.page_bytes, self._queue = store, page_bytes, queue
        self.piece_pages = max(1, PIECE_BYTES // page_bytes)
        self._wake = threading.Condition()  # guards all below
        self._reads: deque[Read] = deque()
        self._num_buffers = 0  # that exist; they are made when they are needed
        self._free: list[UInt8Array] = []
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="radixlm-store-reader", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Bytes to be read before anything that is asked for now."""
        with self._wake:
            return sum(read.num_bytes for read in self._reads)

    def read_pages(
        self, heads: tuple[PageKey, ...], done: Callable[[Read], None], *, into: UInt8Array | None = None
    ) -> Read:
        """Read pages, at most `piece_pages`, or any number into room for them: uint8 `[len(heads), page_bytes]`."""
        read = Read(lambda out: self._store.read(heads, out), done, len(heads) * self.page_bytes, len(heads), into)
        return self._add(read)

    def read_state(self, page: PageKey, out: UInt8Array, done: Callable[[Read], None]) -> Read:
        """Read the state after a page into `out`, uint8 `[state_bytes]`."""
        return self.run(lambda: self._store.states.read(page, out), done, num_bytes=out.nbytes)

    def run(self, work: Callable[[], bool], done: Callable[[Read], None], *, num_bytes: int = 0) -> Read:
        """Read something else: `work` does it in the reader's thread, and returns whether it is right. An exception is
        logged, and counts as False.
        """
        return self._add(Read(lambda _: work(), done, num_bytes, 0))

    def cancel(self, reads: Iterable[Read]) -> None:
        """Take reads out of the queue, which are done then. One that runs goes on, and is told done after that."""
        for read in reads:
            read.is_cancelled = True
        with self._wake:
            for read in self._reads:
                read.is_done = read.is_cancelled
            self._reads = deque(read for read in self._reads if not read.is_cancelled)

    def close(self) -> bool:
        """End after the read that runs. False if the disk hangs: the read goes on. May be called twice."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(HANG_S)
        return not self._thread.is_alive()

    def _add(self, read: Read) -> Read:
        with self._wake:
            self._reads.append(read)
            self._wake.notify()
        return read

    def _run(self) -> None:
        while (read := self._next()) is not None:
            begun = time.perf_counter()
            try:
                read.num_right = int(read.work(_NO_PAGES if read.pages is None else read.pages))
            except Exception:  # the store handles what disks do; this is a mistake of ours
                _LOGGER.exception("reading from the store failed")
            read.seconds, read.is_done = time.perf_counter() - begun, True
            self._queue.post(partial(self._finish, read))
            del read  # or its pages would stay until the next one

    def _next(self) -> Read | None:
        with self._wake:
            while not self._is_closing:
                if self._reads and self._has_room(self._reads[0]):
                    return self._reads.popleft()
                self._wake.wait()
            return None

    def _has_room(self, read: Read) -> bool:
        """Whether a read has somewhere to read to; it gets a buffer if one is free."""
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
        """In the engine's thread."""
        try:
            read.done(read)
        finally:
            buffer, read.buffer, read.pages = read.buffer, None, None
            if buffer is not None:
                with self._wake:
                    self._free.append(buffer)
                    self._wake.notify()


_NO_PAGES: UInt8Array = np.empty((0, 0), np.uint8)
