"""Closures to run in the engine's thread between two steps: those that other threads post, and those due at a time.

Knows closures and a clock, not what they do.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections import deque
from collections.abc import Callable
from itertools import count

_LOGGER = logging.getLogger(__name__)


class WorkQueue:
    """Any thread may `post`; everything else is the engine's thread's.

    >>> now, done = 0.0, []
    >>> queue = WorkQueue(clock=lambda: now)
    >>> queue.post(lambda: done.append("posted"))
    >>> queue.at(5.0, lambda: done.append("due"))
    >>> queue.run()
    >>> done, queue.wait_s
    (['posted'], 5.0)

    Args:
        clock: seconds; only differences count.

    Attributes:
        changed: notified by `post`; a thread that sleeps until there is work waits for it.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self.changed = threading.Condition()
        self._clock = clock
        self._works: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._numbers = count()

    def __len__(self) -> int:
        """Closures that were posted and have not run."""
        return len(self._works)

    @property
    def wait_s(self) -> float | None:
        """Seconds until `run` has something to do, 0.0 if it has now; None: there is nothing."""
        if self._works:
            return 0.0
        return max(0.0, self._timers[0][0] - self._clock()) if self._timers else None

    def post(self, work: Callable[[], None]) -> None:
        """Run a closure before the next step."""
        with self.changed:
            self._works.append(work)
            self.changed.notify()

    def at(self, time_s: float, work: Callable[[], None]) -> None:
        """Run a closure once the clock has come to `time_s`."""
        heapq.heappush(self._timers, (time_s, next(self._numbers), work))

    def run(self) -> None:
        """Run what is there when it is called, and what is due. A closure that raises is logged, and the others run."""
        for _ in range(len(self._works)):
            _run(self._works.popleft())
        while self._timers and self._timers[0][0] <= self._clock():
            _run(heapq.heappop(self._timers)[2])


def _run(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:
        _LOGGER.exception("work between two steps failed")
