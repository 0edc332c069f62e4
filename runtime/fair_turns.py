"""One at a time, and those who wait by client in turn: who sends a hundred delays another by one, not by a hundred.

Knows threads and names of clients, not what they wait for.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .errors import GrammarsOverloaded

_RETRY_AFTER_S = 1


@dataclass(eq=False)
class _Waiter:
    """A thread that waits until `called`, and then has its turn, or was refused one."""

    called: threading.Event = field(default_factory=threading.Event)
    has_turn: bool = False


class FairTurns:
    """A lock that clients get in turn, each its own requests in the order in which they came.

    >>> turns = FairTurns(max_waiting=8)
    >>> with turns.turn("a client", deadline=time.monotonic() + 0.5):
    ...     turns.num_waiting
    0

    Args:
        max_waiting: threads. Where one too many comes, the latest of the client that has most is refused.
    """

    def __init__(self, *, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()  # the client whose turn is next is first

    @property
    def num_waiting(self) -> int:
        """Threads that wait for their turn."""
        return sum(map(len, self._waiting.values()))

    @contextmanager
    def turn(self, client: str, *, deadline: float) -> Iterator[None]:
        """Wait for a turn, at most until `deadline` by `time.monotonic()`, and have it.

        Raises:
            GrammarsOverloaded: it did not come in time, or too many wait.
        """
        self._enter(client, deadline)
        try:
            yield
        finally:
            self._leave()

    def check(self) -> None:
        """Assert that nobody waits for what is free, and that whoever waits can be found."""
        assert self._is_taken or not self._waiting
        assert all(self._waiting.values())
        assert self.num_waiting <= self._max_waiting

    def _enter(self, client: str, deadline: float) -> None:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            waiter = self._queue(client)
        waiter.called.wait(max(0.0, deadline - time.monotonic()))
        with self._lock:
            if waiter.has_turn:
                return
            if waiter in self._waiting.get(client, ()):
                self._remove(client, waiter)
            raise self._refusal()

    def _queue(self, client: str) -> _Waiter:
        own = len(self._waiting.get(client, ()))
        if self.num_waiting >= self._max_waiting:
            greediest = max(self._waiting, key=lambda name: len(self._waiting[name]))
            if len(self._waiting[greediest]) <= own + 1:
                raise self._refusal()
            latest = self._waiting[greediest][-1]
            self._remove(greediest, latest)
            latest.called.set()
        waiter = _Waiter()
        self._waiting.setdefault(client, deque()).append(waiter)
        return waiter

    def _leave(self) -> None:
        with self._lock:
            if not self._waiting:
                self._is_taken = False
                return
            client, waiters = next(iter(self._waiting.items()))
            waiter = waiters[0]
            self._remove(client, waiter)
            if waiters:
                self._waiting.move_to_end(client)
            waiter.has_turn = True
            waiter.called.set()

    def _remove(self, client: str, waiter: _Waiter) -> None:
        self._waiting[client].remove(waiter)
        if not self._waiting[client]:
            del self._waiting[client]

    def _refusal(self) -> GrammarsOverloaded:
        return GrammarsOverloaded(self.num_waiting, retry_after_s=_RETRY_AFTER_S)
