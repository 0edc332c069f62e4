"""Write pages to the store behind the engine's back: one thread, and a queue that holds so many bytes and no more.

Knows heads and bytes. What does not fit the queue is not taken, and nobody waits for room.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..model.batch import UInt8Array
from ..store.store_state import PutResult

if TYPE_CHECKING:
    from ..store import PageKey, PageStore

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Written:
    """A finished job of the writer: the pages that it was to write, and what became of them; None: it failed."""

    heads: tuple[PageKey, ...]
    result: PutResult | None


@dataclass(frozen=True)
class _Job:
    work: Callable[[PageStore], PutResult]
    num_bytes: int = 0
    heads: tuple[PageKey, ...] = ()
    done: Future[None] = field(default_factory=Future)


class DiskWriter:
    """Does what it is told in order, in a thread of its own that is the only one to change the store.

    Args:
        max_bytes: of pages that wait, the ones being written included.
        notify: called in the writer's thread when `results` has something new.

    Attributes:
        results: what was done, for the engine's thread to take out.
    """

    def __init__(self, store: PageStore, *, max_bytes: int, notify: Callable[[], None]) -> None:
        self._store, self._notify = store, notify
        self.max_bytes = max_bytes
        self.results: deque[Written] = deque()
        self._wake = threading.Condition()  # guards all below
        self._jobs: deque[_Job] = deque()
        self._num_bytes = 0
        self._is_working = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="radixlm-store-writer", daemon=True)
        self._thread.start()

    @property
    def room_bytes(self) -> int:
        """How many bytes of pages the queue takes now."""
        return max(0, self.max_bytes - self._num_bytes)

    @property
    def queued_bytes(self) -> int:
        """Bytes of pages that are not written yet."""
        return self._num_bytes

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or being written, and all that was done has been taken out of `results`."""
        return not self._is_working and not self._jobs and not self.results

    def write(self, heads: Sequence[PageKey], pages: UInt8Array) -> bool:
        """Take pages, uint8 `[len(heads), page_bytes]`, which nobody may change any more; False: there is no room."""
        taken = tuple(heads)

        with self._wake:
            if self._is_closing or pages.nbytes > self.room_bytes:
                return False
            self._post(_Job(lambda store: store.put(taken, pages), pages.nbytes, taken))
        return True

    def submit(self, work: Callable[[PageStore], PutResult]) -> Future[None]:
        """Change the store in another way, after what is queued; the future's result comes when that is done."""
        job = _Job(work)
        with self._wake:
            if self._is_closing:
                job.done.set_result(None)
            else:
                self._post(job)
        return job.done

    def discard(self, namespace: bytes) -> Future[None]:
        """Take a namespace off the disk, after what is queued; the future's result comes when that is done."""
        return self.submit(lambda store: PutResult((), tuple(store.discard(namespace))))

    def drop(self, keys: Sequence[bytes]) -> Future[None]:
        """Take pages off the disk with all that goes on from them, after what is queued."""
        taken = tuple(keys)

        def drop(store: PageStore) -> PutResult:
            store.drop(taken)
            nothing = store.put((), np.empty((0, store.identity.page_bytes), np.uint8))  # which notes what is dropped
            return PutResult((), (*taken, *nothing.evicted))

        return self.submit(drop)

    def close(self, timeout_s: float) -> None:
        """Write what is queued, for so long, then drop the rest. May be called twice."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        with self._wake:
            jobs = list(self._jobs)
            self._jobs.clear()
        for job in jobs:
            job.done.set_result(None)
        self._thread.join()  # what is being written is written whole

    def _post(self, job: _Job) -> None:
        """The lock is held."""
        self._num_bytes += job.num_bytes
        self._jobs.append(job)
        self._wake.notify()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                written = Written(job.heads, job.work(self._store))
            except Exception:  # the store handles what disks do; this is a mistake of ours
                _LOGGER.exception("writing to the store failed")
                written = Written(job.heads, None)
            self.results.append(written)
            with self._wake:
                self._num_bytes -= job.num_bytes
                self._is_working = False
            job.done.set_result(None)
            del job, written  # or the pages would stay until the next job
            self._notify()

    def _next(self) -> _Job | None:
        with self._wake:
            while not self._jobs and not self._is_closing:
                self._wake.wait()
            self._is_working = bool(self._jobs)
            return self._jobs.popleft() if self._jobs else None


def remaining_s(deadline: float) -> float:
    """Seconds to a time of `time.monotonic`, 0.0 if it has passed."""
    return max(0.0, deadline - time.monotonic())
