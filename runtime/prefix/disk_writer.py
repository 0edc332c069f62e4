"""Change the store in a thread of its own, and say in the engine's thread what became of it.

Knows changes and the bytes that wait. What does not fit the queue is not taken, and no caller waits for room.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ..errors import StoreOff
from ..model.batch import UInt8Array
from ..store.store_state import PutResult
from .disk_reader import HANG_S, EngineThread

if TYPE_CHECKING:
    from ..store import PageKey, PageStore

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Change:
    work: Callable[[PageStore], PutResult]
    num_bytes: int = 0
    heads: tuple[PageKey, ...] = ()
    done: Future[None] = field(default_factory=Future)


class DiskWriter:
    """Makes changes in order; its thread is the only one to change the store.

    Args:
        max_bytes: of pages that wait, the ones being written included.
        queue: has `wrote` called.
        wrote: told of each change in the engine's thread: the pages that it was to store, and what became of them.
    """

    def __init__(
        self,
        store: PageStore,
        queue: EngineThread,
        *,
        max_bytes: int,
        wrote: Callable[[tuple[PageKey, ...], PutResult], None],
    ) -> None:
        self._store, self._queue, self._wrote = store, queue, wrote
        self.max_bytes = max_bytes
        self._num_unfinished = 0  # changes of which `wrote` was not told yet; the engine's thread's own
        self._wake = threading.Condition()  # guards all below
        self._changes: deque[_Change] = deque()
        self._current: _Change | None = None  # is being made, and its future has no result
        self._num_bytes = 0
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
    def is_off(self) -> bool:
        """Whether the store takes nothing any more."""
        return self._store.stats().is_off

    @property
    def is_idle(self) -> bool:
        """Whether all changes are made, and `wrote` was told of them."""
        return self._num_unfinished == 0

    def write(self, heads: Sequence[PageKey], pages: UInt8Array) -> bool:
        """Store pages, uint8 `[len(heads), page_bytes]`, which must not change any more. False: there is no room."""
        if pages.nbytes > self.room_bytes:
            return False
        taken = tuple(heads)
        return self._add(_Change(lambda store: store.put(taken, pages), pages.nbytes, taken))

    def submit(self, work: Callable[[PageStore], PutResult], *, num_bytes: int = 0) -> Future[None]:
        """Change the store in another way, after what is queued; the future's result comes when that is done.

        `num_bytes` are held until then.

        It raises StoreOff if that cannot be done any more, or the store says so.
        """
        change = _Change(work, num_bytes)
        if not self._add(change):
            change.done.set_exception(_closed())
        return change.done

    def discard(self, namespace: bytes) -> Future[None]:
        """Take a namespace off the disk, after what is queued; the future raises StoreOff if it may still be there."""
        return self.submit(lambda store: PutResult((), tuple(store.discard(namespace))))

    def drop(self, keys: Sequence[bytes]) -> Future[None]:
        """Take pages off the disk with all that goes on from them, after what is queued."""
        taken = tuple(keys)
        return self.submit(lambda store: PutResult((), tuple(store.drop(taken))))

    def close(self, timeout_s: float) -> bool:
        """Write what is queued, for so long, then drop the rest. What is being written is written whole; False if the
        disk hangs: the write goes on. May be called twice.
        """
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        with self._wake:
            changes = list(self._changes)
            self._changes.clear()
        for change in changes:
            change.done.set_exception(_closed())
        self._thread.join(HANG_S)
        with self._wake:
            hanging, self._current = self._current, None
        if hanging is not None:
            hanging.done.set_exception(_closed())
        return not self._thread.is_alive()

    def _add(self, change: _Change) -> bool:
        """Queue a change; False if the writer is closing."""
        with self._wake:
            if self._is_closing:
                return False
            self._num_bytes += change.num_bytes
            self._changes.append(change)
            self._wake.notify()
        self._num_unfinished += 1
        return True

    def _run(self) -> None:
        while (change := self._next()) is not None:
            result, failure = PutResult((), ()), None
            try:
                result = change.work(self._store)
            except StoreOff as error:
                failure = error
            except Exception:  # the store handles what disks do; this is a mistake of ours
                _LOGGER.exception("writing to the store failed")
            with self._wake:
                self._num_bytes -= change.num_bytes
                is_awaited, self._current = self._current is not None, None
            self._queue.post(partial(self._finish, change.heads, result))
            if is_awaited and failure is not None:
                change.done.set_exception(failure)
            elif is_awaited:
                change.done.set_result(None)
            del change  # or its pages would stay until the next one

    def _next(self) -> _Change | None:
        with self._wake:
            while not self._changes and not self._is_closing:
                self._wake.wait()
            self._current = self._changes.popleft() if self._changes else None
            return self._current

    def _finish(self, heads: tuple[PageKey, ...], result: PutResult) -> None:
        """In the engine's thread."""
        self._num_unfinished -= 1
        self._wrote(heads, result)


def _closed() -> StoreOff:
    return StoreOff("the store was closed before its disk was done; open it again, and ask again")


def remaining_s(deadline: float) -> float:
    """Seconds to a time of `time.monotonic`, 0.0 if it has passed."""
    return max(0.0, deadline - time.monotonic())
