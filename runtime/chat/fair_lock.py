"""A lock that clients get in turn: a hundred requests of one client delay another client by one request, not by all.

Knows threads, event loops and names of clients, not the purpose of the lock.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from ..errors import EngineOverloaded
from ..system import give_way

T = TypeVar("T")
Refusal = Callable[[int], EngineOverloaded]
"""Make the error for a refused caller, from the number of waiting ones. It must not wait for a lock."""


@dataclass(eq=False)
class _Waiter:
    """A thread or a task in the queue. Once woken, it has its turn, or was refused one."""

    wake: Callable[[], object]
    has_turn: bool = False


class FairLock:
    """A lock, or a semaphore of `num_turns`. Clients take turns; the requests of one client keep their order.

    >>> lock = FairLock(max_waiting=lambda: 8, refusal=lambda num_waiting: EngineOverloaded(num_waiting, 8, 1))
    >>> with lock.turn("a client", deadline=time.monotonic() + 0.5):
    ...     lock.num_waiting
    0

    Args:
        num_turns: how many callers can hold the lock at a time.
        max_waiting: returns how many can wait now. When one too many arrives, the client with the most in the queue
            loses its latest request.
        beside: another lock; callers that wait for either are counted together.
        niceness: priority of the threads that work in turns, 0 to 19 for the lowest; Linux only.
    """

    def __init__(
        self,
        *,
        num_turns: int = 1,
        max_waiting: Callable[[], int],
        refusal: Refusal,
        beside: FairLock | None = None,
        niceness: int = 0,
    ) -> None:
        self._num_free = num_turns
        self._max_waiting = max_waiting
        self._refusal = refusal
        self._lock: threading.Lock = threading.Lock() if beside is None else beside._lock
        self._together: list[FairLock] = [] if beside is None else beside._together
        self._together.append(self)
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()  # the client whose turn is next comes first
        self._num_waiting = 0
        self._threads = ThreadPoolExecutor(num_turns, "radixlm-turn", give_way, (niceness,))

    @property
    def num_waiting(self) -> int:
        """Number of threads and tasks that wait for their turn."""
        return self._num_waiting

    def num_waiting_of(self, client: str) -> int:
        """Return how many threads and tasks of one client are in the queue."""
        return len(self._waiting.get(client, ()))

    @contextmanager
    def turn(self, client: str, *, deadline: float) -> Iterator[None]:
        """Hold the lock; wait for it at most until `deadline`, in seconds of `time.monotonic()`.

        Raises:
            EngineOverloaded: made by `refusal`. The turn did not come in time, or too many are waiting.
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
    async def turn_of_task(self, client: str, *, deadline: float | None = None) -> AsyncIterator[None]:
        """Like `turn`, for a task; no thread waits. Without a `deadline` the task waits as long as it takes.

        A cancelled task leaves the queue at once.

        Raises:
            EngineOverloaded: as `turn`.
        """
        loop, called = asyncio.get_running_loop(), asyncio.Event()
        waiter = self._enter(client, lambda: loop.call_soon_threadsafe(called.set))
        try:
            if not waiter.has_turn:
                left_s = None if deadline is None else deadline - time.monotonic()
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await called.wait()
            self._require_turn(client, waiter)
            yield
        finally:
            self._leave(client, waiter)

    async def run_in_thread(self, client: str, work: Callable[[], T], *, deadline: float | None = None) -> T:
        """Run `work` in a thread once the client has its turn; return or raise what it does.

        A task that is cancelled while it waits for its turn leaves the queue at once. One that is cancelled while
        `work` runs, once or more often, waits for its end, because the turn lasts as long as the work.

        Raises:
            EngineOverloaded: as `turn`.
        """
        async with self.turn_of_task(client, deadline=deadline):
            working = asyncio.get_running_loop().run_in_executor(self._threads, work)
            try:
                return await asyncio.shield(working)
            except asyncio.CancelledError:
                while not working.done():
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait([working])
                if not working.cancelled():
                    working.exception()  # retrieved, or asyncio would log that it never was
                raise

    def check(self) -> None:
        """Assert that no caller waits for a lock that is free, and that every waiting caller is in the queue."""
        assert not (self._num_free and self._waiting)
        assert all(self._waiting.values())
        assert self._num_waiting == sum(map(len, self._waiting.values()))

    def _enter(self, client: str, wake: Callable[[], object]) -> _Waiter:
        """Take a free turn, or join the queue; `wake` is called when the turn comes, or the place is lost.

        Raises:
            EngineOverloaded: made by `refusal`; too many wait, and no client has more callers than this one.
        """
        waiter = _Waiter(wake)
        with self._lock:
            if self._num_free:
                self._num_free -= 1
                waiter.has_turn = True
            else:
                self._queue(client, waiter)
        return waiter

    def _queue(self, client: str, waiter: _Waiter) -> None:
        """Add a caller to the queue; if it is full, the client with the most callers loses its newest one.

        The one that lost its place is woken.

        Raises:
            EngineOverloaded: made by `refusal`; no client has more callers than this one.
        """
        num_waiting = sum(lock._num_waiting for lock in self._together)
        if num_waiting >= self._max_waiting():
            by_client = Counter[str]()
            for lock in self._together:
                by_client.update({name: len(waiters) for name, waiters in lock._waiting.items()})
            greediest = max(by_client, key=by_client.__getitem__, default=client)
            if by_client[greediest] <= by_client[client] + 1:
                raise self._refusal(num_waiting)
            longest = max(self._together, key=lambda lock: len(lock._waiting.get(greediest, ())))
            latest = longest._waiting[greediest][-1]
            longest._remove(greediest, latest)
            latest.wake()
        self._waiting.setdefault(client, deque()).append(waiter)
        self._num_waiting += 1

    def _require_turn(self, client: str, waiter: _Waiter) -> None:
        """Leave the queue and raise the refusal if the turn has not come."""
        with self._lock:
            if not waiter.has_turn:
                self._remove(client, waiter)
                raise self._refusal(sum(lock._num_waiting for lock in self._together))

    def _leave(self, client: str, waiter: _Waiter) -> None:
        """Leave the queue, or pass the turn on to the next caller."""
        with self._lock:
            if not waiter.has_turn:
                self._remove(client, waiter)
            elif not self._waiting:
                self._num_free += 1
            else:
                self._call_next()

    def _call_next(self) -> None:
        """Give the turn to the first caller of the next client, and put that client last."""
        client, waiters = next(iter(self._waiting.items()))
        waiter = waiters[0]
        self._remove(client, waiter)
        if waiters:
            self._waiting.move_to_end(client)
        waiter.has_turn = True
        waiter.wake()

    def _remove(self, client: str, waiter: _Waiter) -> None:
        """Remove a caller from the queue, if it is still there."""
        waiters = self._waiting.get(client, deque())
        if waiter in waiters:
            waiters.remove(waiter)
            self._num_waiting -= 1
            if not waiters:
                del self._waiting[client]
