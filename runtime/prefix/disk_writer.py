"""Change the store in a separate thread, and report each result in the engine's thread.

Knows changes and the bytes queued for them. A change that does not fit the queue is refused, and no caller waits for
room.
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
    page_keys: tuple[PageKey, ...] = ()
    done: Future[None] = field(default_factory=Future)


class DiskWriter:
    """Makes changes in order; its thread is the only one that changes the store.

    Args:
        max_bytes: the most bytes of queued pages, those being written included.
        queue: calls `wrote`.
        wrote: called in the engine's thread after each change, with the pages to store and the result.
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
        self._num_unfinished = 0  # changes not yet reported to `wrote`; owned by the engine's thread
        self._wake = threading.Condition()  # guards everything below
        self._changes: deque[_Change] = deque()
        self._current: _Change | None = None  # the change in progress, whose future has no result yet
        self._num_bytes = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="radixlm-store-writer", daemon=True)
        self._thread.start()

    @property
    def room_bytes(self) -> int:
        """Bytes of pages that the queue accepts now."""
        return max(0, self.max_bytes - self._num_bytes)

    @property
    def queued_bytes(self) -> int:
        """Bytes of pages that are not written yet."""
        return self._num_bytes

    @property
    def is_off(self) -> bool:
        """Return whether the store is off."""
        return self._store.stats().is_off

    @property
    def is_idle(self) -> bool:
        """Return whether all changes are made, and were reported to `wrote`."""
        return self._num_unfinished == 0

    def write(self, page_keys: Sequence[PageKey], pages: UInt8Array) -> bool:
        """Queue pages to store, uint8 `[len(page_keys), page_bytes]`, which must not change any more.

        False if there is no room.
        """
        if pages.nbytes > self.room_bytes:
            return False
        taken = tuple(page_keys)
        return self._add(_Change(lambda store: store.put(taken, pages), pages.nbytes, taken))

    def submit(self, work: Callable[[PageStore], PutResult], *, num_bytes: int = 0) -> Future[None]:
        """Queue any other change of the store; return a future that is done after it.

        `num_bytes` count as queued until then. The future raises StoreOff if the change is no longer possible, or if
        the store raises it.
        """
        change = _Change(work, num_bytes)
        if not self._add(change):
            change.done.set_exception(_closed())
        return change.done

    def discard(self, namespace: bytes) -> Future[None]:
        """Queue the removal of a namespace from disk; the future raises StoreOff if its pages can still exist."""
        return self.submit(lambda store: PutResult((), tuple(store.discard(namespace))))

    def drop(self, keys: Sequence[bytes]) -> Future[None]:
        """Queue the removal of pages from disk, with all that continue them."""
        taken = tuple(keys)
        return self.submit(lambda store: PutResult((), tuple(store.drop(taken))))

    def close(self, timeout_s: float) -> bool:
        """Write queued changes for at most `timeout_s` seconds, and drop the rest; the change in progress is completed.

        Return False if the disk hangs and the write continues. Can be called twice.
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
        """Queue a change; return False if the writer is closing."""
        with self._wake:
            if self._is_closing:
                return False
            self._num_bytes += change.num_bytes
            self._changes.append(change)
            self._wake.notify()
        self._num_unfinished += 1
        return True

    def _run(self) -> None:
        """Do the queued changes in order, and report each result, until the writer closes."""
        while (change := self._wait_for_change()) is not None:
            result, failure = PutResult((), ()), None
            try:
                result = change.work(self._store)
            except StoreOff as error:
                failure = error
            except Exception:  # the store handles errors of disks; this is a bug
                _LOGGER.exception("writing to the store failed")
            with self._wake:
                self._num_bytes -= change.num_bytes
                is_awaited, self._current = self._current is not None, None
            self._queue.post(partial(self._finish, change.page_keys, result))
            if is_awaited and failure is not None:
                change.done.set_exception(failure)
            elif is_awaited:
                change.done.set_result(None)
            del change  # otherwise its pages stay allocated until the next change

    def _wait_for_change(self) -> _Change | None:
        """Wait for a queued change, and take it off the queue; None if the writer closes and none is left."""
        with self._wake:
            while not self._changes and not self._is_closing:
                self._wake.wait()
            self._current = self._changes.popleft() if self._changes else None
            return self._current

    def _finish(self, page_keys: tuple[PageKey, ...], result: PutResult) -> None:
        """Report a change to `wrote`. Runs in the engine's thread."""
        self._num_unfinished -= 1
        self._wrote(page_keys, result)


def _closed() -> StoreOff:
    return StoreOff("the store was closed before its disk was done; open it again, and ask again")


def remaining_s(deadline: float) -> float:
    """Return the seconds until a time of `time.monotonic`, 0.0 if it has passed."""
    return max(0.0, deadline - time.monotonic())
