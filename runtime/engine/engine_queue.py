"""The queue of the engine's thread: requests, cancellations and calls from other threads; closures between two steps.

Knows commands, closures, a clock and the limit on requests, not what is computed.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from ..errors import EngineClosed, EngineDied, EngineOverloaded
from .request_options import Client

MIN_RETRY_S, MAX_RETRY_S = 1, 60


@dataclass(frozen=True)
class Command:
    """A command for the engine's thread; `refuse` is called with the fatal error instead if the thread is dead."""

    do: Callable[[], None]
    refuse: Callable[[BaseException], None]
    is_request: bool = False
    client: Client = b""  # the client of the request


class EngineQueue:
    """A queue of commands in order of arrival, until it is closed or its thread has died for good.

    Args:
        changed: guards the queue, and is notified of new commands; others can notify it of other work.
        clock: seconds; only differences count.
        max_num_requests: requests that can run and wait together; None: any number.
        make_room: ends the newest request of a client that did not run yet, with this error, and returns whether there
            was one; called on the engine's thread. None: requests that arrive too late are refused.
    """

    def __init__(
        self,
        changed: threading.Condition,
        *,
        clock: Callable[[], float],
        max_num_requests: int | None,
        make_room: Callable[[Client, EngineOverloaded], bool] | None = None,
    ) -> None:
        self.max_num_requests = max_num_requests
        self._clock = clock
        self._changed = changed  # guards all below
        self._commands: deque[Command] = deque()
        self._num_requests = 0  # submitted, and not ended yet
        self._by_client = Counter[Client]()  # of those, without those chosen to make room
        self._make_room = make_room
        self._num_making_room = 0
        self._num_rejected = 0
        self._usual_s = 0.0  # moving average of request durations, waiting included
        self._is_closed = False
        self._crash: BaseException | None = None
        # since when there is work, or the time of the last progress, set without the lock; None: there is no work
        self._busy_since: float | None = None
        self._progress = 0  # progress at that time
        self._quiet_since = clock()  # end of the last request; valid only while there is none

    def __len__(self) -> int:
        return len(self._commands)

    @property
    def is_closed(self) -> bool:
        """Return whether `close` was called."""
        return self._is_closed

    @property
    def crash(self) -> BaseException | None:
        """The error that killed the thread for good; None if it did not die."""
        return self._crash

    @property
    def num_submitted(self) -> int:
        """Number of requests that the thread has not taken yet."""
        return sum(command.is_request for command in tuple(self._commands))

    @property
    def num_rejected(self) -> int:
        """Number of requests that were refused because too many ran and waited."""
        return self._num_rejected

    @property
    def room(self) -> int | None:
        """The number of further requests that would be accepted now; None: any number."""
        most = self.max_num_requests
        return None if most is None else max(most - self._num_requests, 0)

    @property
    def stalled_s(self) -> float:
        """Seconds since the last progress while there is work; 0.0 when idle."""
        with self._changed:
            return 0.0 if self._busy_since is None else max(0.0, self._clock() - self._busy_since)

    @property
    def quiet_s(self) -> float:
        """Seconds since there was a request; 0.0 while there is one."""
        with self._changed:
            return 0.0 if self._num_requests else max(0.0, self._clock() - self._quiet_since)

    def refusal(self, num_waiting: int) -> EngineOverloaded:
        """Count a request that is refused before it is queued, and return its error; `num_waiting` others wait."""
        with self._changed:
            return self._refusal(num_waiting)

    def require_room(self, client: Client = b"") -> None:
        """Raise EngineOverloaded if a client's request would be refused, before work is spent on it."""
        with self._changed:
            self._greediest(client)

    def put(self, command: Command) -> None:
        """Add a command. If too many requests run and wait, the client with the most loses its newest one.

        Raises:
            EngineOverloaded: it is a request, too many run and wait, and no client has more than this one.
            EngineClosed: the queue was closed.
            EngineDied: the thread died of an error.
        """
        with self._changed:
            if self._crash is not None:
                raise EngineDied(self._crash, is_final=True)
            if self._is_closed:
                raise EngineClosed("the engine was closed; open it again")
            if command.is_request:
                if (greediest := self._greediest(command.client)) is not None:
                    self._take_from(greediest)
                self._num_requests += 1
                self._by_client[command.client] += 1
            if self._busy_since is None:
                self._busy_since = self._clock()
            self._commands.append(command)
            self._changed.notify()

    def close(self) -> None:
        """Accept no more commands, and wake the engine's thread, which then ends."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    # For the engine's thread.

    def note(self, progress: int) -> None:
        """Record that there is work and its progress, a number that rises when a step succeeds."""
        if progress != self._progress or self._busy_since is None:
            self._progress, self._busy_since = progress, self._clock()

    def wait(self, timeout_s: Callable[[], float | None]) -> None:
        """Wait for a command, `close` or other work; at most for the timeout, if there is one."""
        with self._changed:
            self._busy_since = self._clock() if self._commands else None
            if not (self._is_closed or self._commands):
                self._changed.wait(timeout_s())

    def do_all(self) -> None:
        """Run all commands."""
        while self._commands:
            self._commands.popleft().do()

    def leave(self, total_s: float | None, client: Client = b"") -> None:
        """Release the room of a request that ended.

        Args:
            total_s: its duration; None if it was cancelled or failed.
        """
        with self._changed:
            self._num_requests -= 1
            self._count(client, -1)
            self._quiet_since = self._clock()
            if total_s is not None:
                self._usual_s += (total_s - self._usual_s) / 4

    def start_over(self) -> None:
        """Count only requests that the thread has not taken yet: it has lost all others."""
        with self._changed:
            submitted = [command for command in self._commands if command.is_request]
            self._num_requests, self._num_making_room = len(submitted), 0
            self._by_client = Counter(command.client for command in submitted)

    def die(self, cause: BaseException) -> None:
        """Accept no more commands, and refuse those that wait, because the engine's thread died of `cause`."""
        with self._changed:
            self._crash, self._num_requests = cause, 0
            self._by_client = Counter()
            refused, self._commands = self._commands, deque()
        for command in refused:
            command.refuse(cause)

    def _greediest(self, client: Client) -> Client | None:
        """Return the client that must make room for a request of this one; None if there is room. The lock is held.

        Raises:
            EngineOverloaded: no client has more requests.
        """
        num_left = self._num_requests - self._num_making_room
        if self.max_num_requests is None or num_left < self.max_num_requests:
            return None
        greediest = max(self._by_client, key=self._by_client.__getitem__, default=client)
        is_full = self._make_room is None or self._num_requests >= 2 * self.max_num_requests
        if is_full or self._by_client[greediest] <= self._by_client[client] + 1:
            raise self._refusal()
        return greediest

    def _take_from(self, client: Client) -> None:
        """Make a client lose its newest request that did not run yet. The lock is held."""
        make_room, refusal, counts = self._make_room, self._refusal(), self._by_client
        assert make_room is not None, "some client is to make room"
        self._num_making_room += 1
        self._count(client, -1)

        def do() -> None:
            make_room(client, refusal)
            with self._changed:  # whether or not one was ended, the client's requests are counted as usual again
                if counts is self._by_client:  # else the thread has started over
                    self._num_making_room -= 1
                    self._count(client, 1)

        self._commands.append(Command(do, lambda cause: None))

    def _count(self, client: Client, number: int) -> None:
        """Add to the number of a client's requests; clients without requests are dropped. The lock is held."""
        self._by_client[client] += number
        if not self._by_client[client]:
            del self._by_client[client]

    def _refusal(self, num_waiting: int = 0) -> EngineOverloaded:
        """Count a refused request and return its error. The lock is held."""
        assert self.max_num_requests is not None
        self._num_rejected += 1
        retry_after_s = min(max(math.ceil(self._usual_s), MIN_RETRY_S), MAX_RETRY_S)
        return EngineOverloaded(self._num_requests + num_waiting, self.max_num_requests, retry_after_s)


_LOGGER = logging.getLogger(__name__)


class WorkQueue:
    """A queue of closures that run between two steps. Any thread can `post`; all else is for the engine's thread.

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
        """Return the number of posted closures that have not run."""
        return len(self._works)

    @property
    def wait_s(self) -> float | None:
        """Seconds until `run` has something to do, 0.0 if it has now; None if there is nothing."""
        if self._works:
            return 0.0
        return max(0.0, self._timers[0][0] - self._clock()) if self._timers else None

    def post(self, work: Callable[[], None]) -> None:
        """Run a closure before the next step."""
        with self.changed:
            self._works.append(work)
            self.changed.notify()

    def at(self, time_s: float, work: Callable[[], None]) -> None:
        """Run a closure once the clock reaches `time_s`."""
        heapq.heappush(self._timers, (time_s, next(self._numbers), work))

    def run(self) -> None:
        """Run the closures that were posted before this call, and those that are due; log one that raises and go on."""
        for _ in range(len(self._works)):
            _run_logging_errors(self._works.popleft())
        while self._timers and self._timers[0][0] <= self._clock():
            _run_logging_errors(heapq.heappop(self._timers)[2])


def _run_logging_errors(work: Callable[[], None]) -> None:
    """Run posted work; log an error, and go on."""
    try:
        work()
    except Exception:
        _LOGGER.exception("work between two steps failed")
