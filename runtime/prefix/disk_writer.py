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

from ..model.batch import Float32Array, UInt8Array
from ..pruning.row_selection import scores_to_store
from ..store.rewriting import rewrite

if TYPE_CHECKING:
    from ..store import PageKey, PageStore

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Written:
    """What a job of the writer did: the pages it was to write, those of them on disk now, and pages that are gone."""

    heads: tuple[PageKey, ...] = ()
    stored_keys: frozenset[bytes] = frozenset()
    gone_keys: tuple[bytes, ...] = ()
    num_rewritten: int = 0  # runs that are in the order of importance, too


@dataclass(frozen=True)
class _Job:
    work: Callable[[PageStore], Written]
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

        def put(store: PageStore) -> Written:
            result = store.put(taken, pages)
            return Written(taken, frozenset(result.stored), tuple(result.evicted))

        with self._wake:
            if self._is_closing or pages.nbytes > self.room_bytes:
                return False
            self._post(_Job(put, pages.nbytes, taken))
        return True

    def rewrite(
        self, heads: Sequence[PageKey], scores: Float32Array, *, is_start: bool, probe_head: int
    ) -> Future[None]:
        """Store a run of pages that are on disk in the order of importance, too, after what is queued: by `scores`,
        `[layers, kv_heads, tokens]`, as far as a part of it is read by them; whether it begins a prompt.
        """
        taken = tuple(heads)

        def rewrite_run(store: PageStore) -> Written:
            result = rewrite(store, taken, scores_to_store(scores, is_start=is_start), probe_head=probe_head)
            return Written(gone_keys=result.evicted, num_rewritten=int(bool(result.stored)))

        return self._enqueue(rewrite_run)

    def discard(self, namespace: bytes) -> Future[None]:
        """Take a namespace off the disk, after what is queued; the result comes when that is done."""
        return self._enqueue(lambda store: Written(gone_keys=tuple(store.discard(namespace))))

    def drop(self, keys: Sequence[bytes]) -> Future[None]:
        """Take pages off the disk with all that goes on from them, after what is queued."""
        taken = tuple(keys)

        def drop(store: PageStore) -> Written:
            store.drop(taken)
            nothing = store.put((), np.empty((0, store.identity.page_bytes), np.uint8))  # which notes what is dropped
            return Written(gone_keys=(*taken, *nothing.evicted))

        return self._enqueue(drop)

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

    def _enqueue(self, work: Callable[[PageStore], Written]) -> Future[None]:
        job = _Job(work)
        with self._wake:
            if self._is_closing:
                job.done.set_result(None)
            else:
                self._post(job)
        return job.done

    def _post(self, job: _Job) -> None:
        """The lock is held."""
        self._num_bytes += job.num_bytes
        self._jobs.append(job)
        self._wake.notify()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                written = job.work(self._store)
            except Exception:  # the store handles what disks do; this is a mistake of ours
                _LOGGER.exception("writing to the store failed")
                written = Written(job.heads)
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
