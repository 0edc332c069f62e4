"""So many at a time, and those that wait by client in turn: a client's hundred delay another by one, not by a hundred.

Knows threads, event loops and names of clients, not what is waited for.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from ..errors import EngineOverloaded

Refusal = Callable[[int], EngineOverloaded]
"""Makes the error of what is refused, of the number of those that wait. It must not wait for a turn."""


@dataclass(eq=False)
class _Waiter:
    """A thread or a task that waits until it is woken, and then has its turn, or was refused one."""

    wake: Callable[[], object]
    has_turn: bool = False


class FairTurns:
    """A semaphore that clients get in turn, each its own requests in the order in which they came.

    >>> turns = FairTurns(max_waiting=lambda: 8, refusal=lambda num_waiting: EngineOverloaded(num_waiting, 8, 1))
    >>> with turns.turn("a client", deadline=time.monotonic() + 0.5):
    ...     turns.num_waiting
    0

    Args:
        num_turns: that may be had at a time.
        max_waiting: says how many may wait now. Where one too many comes, the latest of the client that has most is
            refused.
        beside: other turns; those that wait there and here are counted together.
    """

    def __init__(
        self,
        *,
        num_turns: int = 1,
        max_waiting: Callable[[], int],
        refusal: Refusal,
        beside: FairTurns | None = None,
    ) -> None:
        self._num_free = num_turns
        self._max_waiting = max_waiting
        self._refusal = refusal
        self._lock: threading.Lock = threading.Lock() if beside is None else beside._lock
        self._together: list[FairTurns] = [] if beside is None else beside._together
        self._together.append(self)
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()  # the client whose turn is next is first
        self._num_waiting = 0

    @property
    def num_waiting(self) -> int:
        """Threads and tasks that wait for their turn."""
        return self._num_waiting

    @contextmanager
    def turn(self, client: str, *, deadline: float) -> Iterator[None]:
        """Wait for a turn, at most until `deadline` by `time.monotonic()`, and have it.

        Raises:
            EngineOverloaded: the refusal: it did not come in time, or too many wait.
        """
        called = threading.Event()
        waiter = self._enter(client, called.set)
        try:
            if not waiter.has_turn:
                called.wait(max(0.0, deadline - time.monotonic()))
            self._require_turn(client, waiter)
            yield
        finally:
            self._leave(client, waiter)

    @asynccontextmanager
    async def turn_of_task(self, client: str) -> AsyncIterator[None]:
        """As `turn`, for a task, however long it takes; no thread waits. A task that is cancelled waits no longer.

        Raises:
            EngineOverloaded: the refusal: too many wait.
        """
        loop, called = asyncio.get_running_loop(), asyncio.Event()
        waiter = self._enter(client, lambda: loop.call_soon_threadsafe(called.set))
        try:
            if not waiter.has_turn:
                await called.wait()
            self._require_turn(client, waiter)
            yield
        finally:
            self._leave(client, waiter)

    def check(self) -> None:
        """Assert that nothing waits for what is free, and that whatever waits can be found."""
        assert not (self._num_free and self._waiting)
        assert all(self._waiting.values())
        assert self._num_waiting == sum(map(len, self._waiting.values()))

    def _enter(self, client: str, wake: Callable[[], object]) -> _Waiter:
        waiter = _Waiter(wake)
        with self._lock:
            if self._num_free:
                self._num_free -= 1
                waiter.has_turn = True
            else:
                self._queue(client, waiter)
        return waiter

    def _queue(self, client: str, waiter: _Waiter) -> None:
        num_waiting = sum(turns._num_waiting for turns in self._together)
        if num_waiting >= self._max_waiting():
            by_client = Counter[str]()
            for turns in self._together:
                by_client.update({name: len(waiters) for name, waiters in turns._waiting.items()})
            greediest = max(by_client, key=by_client.__getitem__, default=client)
            if by_client[greediest] <= by_client[client] + 1:
                raise self._refusal(num_waiting)
            longest = max(self._together, key=lambda turns: len(turns._waiting.get(greediest, ())))
            latest = longest._waiting[greediest][-1]
            longest._remove(greediest, latest)
            latest.wake()
        self._waiting.setdefault(client, deque()).append(waiter)
        self._num_waiting += 1

    def _require_turn(self, client: str, waiter: _Waiter) -> None:
        with self._lock:
            if not waiter.has_turn:
                self._remove(client, waiter)
                raise self._refusal(sum(turns._num_waiting for turns in self._together))

    def _leave(self, client: str, waiter: _Waiter) -> None:
        with self._lock:
            if not waiter.has_turn:
                self._remove(client, waiter)
            elif not self._waiting:
                self._num_free += 1
            else:
                self._call_next()

    def _call_next(self) -> None:
        client, waiters = next(iter(self._waiting.items()))
        waiter = waiters[0]
        self._remove(client, waiter)
        if waiters:
            self._waiting.move_to_end(client)
        waiter.has_turn = True
        waiter.wake()

    def _remove(self, client: str, waiter: _Waiter) -> None:
        """Let it wait no longer, if it does."""
        waiters = self._waiting.get(client, deque())
        if waiter in waiters:
            waiters.remove(waiter)
            self._num_waiting -= 1
            if not waiters:
                del self._waiting[client]
