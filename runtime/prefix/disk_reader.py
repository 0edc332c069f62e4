"""Read pages from the store behind the engine's back: one thread, and a few buffers that go round.

Knows heads and bytes; not where pages go. It never reads ahead of the buffers that come back, unless a job brings room
of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..model.batch import UInt8Array

if TYPE_CHECKING:
    from ..store import PageKey, PageStore

_LOGGER = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20  # read at once: disks reach their speed, and others' steps are not held up by what comes back
NUM_BUFFERS = 3  # one is read into, one is copied to the pool, one waits


@dataclass(eq=False)
class ReadJob:
    """A chain of pages to read, in pieces from its beginning; `is_cancelled` may be set by anybody at any time.

    With `into`, uint8 `[len(heads), page_bytes]`, it is read there, each page at its place, in pieces from its end; the
    pieces of `piece_pages` pages, if that is fewer than the reader's.
    """

    heads: tuple[PageKey, ...]
    num_read: int = 0  # pages asked for so far; the reader's own
    is_cancelled: bool = False
    into: UInt8Array | None = None
    piece_pages: int | None = None


@dataclass(frozen=True)
class ReadPiece:
    """Pages `[start, start + len(pages))` of a job, uint8 `[N, page_bytes]`: of them the first `num_right` are right.

    `pages` is the reader's, or the job's; give it back.
    """

    job: ReadJob
    start: int
    pages: UInt8Array
    num_right: int
    seconds: float  # that the disk took


@dataclass(eq=False)
class ReadWork:
    """Anything else that reads, done in the reader's thread when its turn comes; `is_cancelled` may be set by anybody.

    Once `is_done` it runs no more, nor will it; only then may others use what it uses.
    """

    run: Callable[[], bool]
    num_bytes: int = 0  # that it reads, about
    is_cancelled: bool = False
    is_right: bool = False  # what `run` returned; False if it raised or was cancelled
    seconds: float = 0.0  # that it took
    is_done: bool = False


class DiskReader:
    """Reads jobs one after the other, in a thread of its own.

    Args:
        notify: called in the reader's thread when `results` has something new.

    Attributes:
        results: what was read, for the engine's thread to take out.
        piece_pages: pages read at once.
    """

    def __init__(self, store: PageStore, page_bytes: int, *, notify: Callable[[], None]) -> None:
        self._store, self._page_bytes, self._notify = store, page_bytes, notify
        self.piece_pages = max(1, PIECE_BYTES // page_bytes)
        self.results: deque[ReadPiece] = deque()
        self._wake = threading.Condition()  # guards all below
        self._jobs: deque[ReadJob | ReadWork] = deque()
        self._num_buffers = 0  # that exist; they are made when they are needed
        self._free: list[UInt8Array] = []
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="radixlm-store-reader", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Bytes that are to be read before anything that is submitted now."""
        with self._wake:
            jobs = [job for job in self._jobs if not job.is_cancelled]
            num_pages = sum(len(job.heads) - job.num_read for job in jobs if isinstance(job, ReadJob))
            return num_pages * self._page_bytes + sum(job.num_bytes for job in jobs if isinstance(job, ReadWork))

    def submit(self, job: ReadJob) -> None:
        """Read a chain; its pieces come in order, and no more of them after one that is not right to its end."""
        with self._wake:
            # behind a disk that hangs, those that ended would keep their room for ever
            self._jobs = deque(other for other in self._jobs if not _is_over(other))
            self._jobs.append(job)
            self._wake.notify()

    def submit_work(self, run: Callable[[], bool], *, num_bytes: int = 0) -> ReadWork:
        """Do something else in the reader's thread, in its turn; `notify` is called when it is done.

        Args:
            run: reads, and returns whether that was right; what it raises is logged, and is not.
            num_bytes: that it reads, about, for `queued_bytes`.
        """
        work = ReadWork(run, num_bytes)
        with self._wake:
            self._jobs.append(work)
            self._wake.notify()
        return work

    def give_back(self, piece: ReadPiece) -> None:
        """Let the buffer of a piece be read into again."""
        if piece.job.into is not None:
            return
        base = piece.pages.base
        assert isinstance(base, np.ndarray)
        with self._wake:
            self._free.append(base)
            self._wake.notify()

    def close(self) -> None:
        """End after the read that runs. May be called twice."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            if isinstance(work, ReadWork):
                self._do(work)
                del work
                self._notify()
                continue
            job, start, pages = work
            stop = start + len(pages)
            begun = time.perf_counter()
            try:
                num_right = self._store.read(job.heads[start:stop], pages)
            except Exception:  # the store handles what disks do; this is a mistake of ours
                _LOGGER.exception("reading from the store failed")
                num_right = 0
            if num_right < stop - start:
                job.is_cancelled = True
            self.results.append(ReadPiece(job, start, pages, num_right, time.perf_counter() - begun))
            del job, pages, work
            self._notify()

    def _do(self, work: ReadWork) -> None:
        begun = time.perf_counter()
        try:
            work.is_right = not work.is_cancelled and work.run()
        except Exception:  # as above
            _LOGGER.exception("reading a part of a prefix failed")
        work.seconds = time.perf_counter() - begun
        work.is_done = True

    def _next(self) -> tuple[ReadJob, int, UInt8Array] | ReadWork | None:
        """A job, the page to read from, and where to, as many pages as are to be read; or something else to do."""
        with self._wake:
            while not self._is_closing:
                while self._jobs and _is_over(job := self._jobs[0]):
                    self._jobs.popleft()
                if self._jobs:
                    if isinstance(job, ReadWork):
                        self._jobs.popleft()
                        return job
                    if (piece := self._piece_of(job)) is not None:
                        return job, *piece
                self._wake.wait()
            return None

    def _piece_of(self, job: ReadJob) -> tuple[int, UInt8Array] | None:
        """A job's next piece; None: there is no buffer for it."""
        num_left = len(job.heads) - job.num_read
        num_pages = min(self.piece_pages, num_left)
        if job.into is not None:
            num_pages = min(num_pages, job.piece_pages or num_pages)
            job.num_read += num_pages
            start = num_left - num_pages
            return start, job.into[start : start + num_pages]
        buffer = self._take_buffer()
        if buffer is None:
            return None
        start = job.num_read
        job.num_read += num_pages
        return start, buffer[:num_pages]

    def _take_buffer(self) -> UInt8Array | None:
        if self._free:
            return self._free.pop()
        if self._num_buffers == NUM_BUFFERS:
            return None
        self._num_buffers += 1
        return np.empty((self.piece_pages, self._page_bytes), np.uint8)


def _is_over(job: ReadJob | ReadWork) -> bool:
    """Whether there is nothing left of it; work that is cancelled still has to be told done."""
    return isinstance(job, ReadJob) and (job.is_cancelled or job.num_read == len(job.heads))
