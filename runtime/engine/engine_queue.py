"""What other threads hand to the engine's thread: requests, cancellations and calls, and how many requests it may have.

Knows commands and counts, not what is computed. All methods may be called from any thread.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import EngineClosed, EngineDied, EngineOverloaded

MIN_RETRY_S, MAX_RETRY_S = 1, 60


@dataclass(frozen=True)
class Command:
    """Something for the thread to do; `refuse` is called instead, with what the thread died of, if it never will."""

    do: Callable[[], None]
    refuse: Callable[[BaseException], None]
    is_request: bool = False


class EngineQueue:
    """Commands in the order in which they came, until it is closed or its thread has died for good.

    Args:
        changed: guards the queue, and is notified of what is put; others may notify of other work.
        clock: seconds; only differences count.
        max_num_requests: that may run and wait together; None: any number.
    """

    def __init__(
        self, changed: threading.Condition, *, clock: Callable[[], float], max_num_requests: int | None
    ) -> None:
        self.max_num_requests = max_num_requests
        self._clock = clock
        self._changed = changed  # guards all below
        self._commands: deque[Command] = deque()
        self._num_requests = 0  # submitted, and not ended yet
        self._num_rejected = 0
        self._usual_s = 0.0  # what requests took of late, waiting included
        self._is_closed = False
        self._crash: BaseException | None = None
        # when the work began, or when a step last got on, which is set without the lock; None: there is no work
        self._busy_since: float | None = None
        self._progress = 0  # when that was set

    def __len__(self) -> int:
        return len(self._commands)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    @property
    def crash(self) -> BaseException | None:
        """What the thread died of for good."""
        return self._crash

    @property
    def num_submitted(self) -> int:
        """Requests that the thread has not looked at yet."""
        return sum(command.is_request for command in tuple(self._commands))

    @property
    def num_rejected(self) -> int:
        """Requests that were refused because too many ran and waited."""
        return self._num_rejected

    @property
    def room(self) -> int | None:
        """How many requests more would be taken now; None: any number."""
        most = self.max_num_requests
        return None if most is None else max(most - self._num_requests, 0)

    @property
    def stalled_s(self) -> float:
        """Seconds since a step got on while there is work; 0.0 when idle."""
        with self._changed:
            return 0.0 if self._busy_since is None else max(0.0, self._clock() - self._busy_since)

    def refusal(self, num_waiting: int) -> EngineOverloaded:
        """Count a request that was refused before it came here, where `num_waiting` others wait: what it is told."""
        with self._changed:
            return self._refusal(num_waiting)

    def require_room(self) -> None:
        """Raise EngineOverloaded if a request could not be put: asked first, one too many costs nothing."""
        with self._changed:
            self._require_room()

    def put(self, command: Command) -> None:
        """Add a command.

        Raises:
            EngineOverloaded: it is a request, and too many run and wait.
            EngineClosed: the queue was closed.
            EngineDied: the thread died of an error.
        """
        with self._changed:
            if self._crash is not None:
                raise EngineDied(self._crash, is_final=True)
            if self._is_closed:
                raise EngineClosed("the engine was closed; open it again")
            if command.is_request:
                self._require_room()
                self._num_requests += 1
            if self._busy_since is None:
                self._busy_since = self._clock()
            self._commands.append(command)
            self._changed.notify()

    def close(self) -> None:
        """Take no more commands, and end the thread's wait."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    # For the engine's thread.

    def note(self, progress: int) -> None:
        """There is work, which has come so far: a number that rises when a step gets on."""
        if progress != self._progress or self._busy_since is None:
            self._progress, self._busy_since = progress, self._clock()

    def wait(self, timeout_s: Callable[[], float | None]) -> None:
        """Wait for a command, `close` or other work, and until the timeout at most, if there is one."""
        with self._changed:
            self._busy_since = self._clock() if self._commands else None
            if not (self._is_closed or self._commands):
                self._changed.wait(timeout_s())

    def do_all(self) -> None:
        """Do what there is."""
        while self._commands:
            self._commands.popleft().do()

    def leave(self, total_s: float | None) -> None:
        """Make room for another request: one has ended, and took so long if it was not cancelled and did not fail."""
        with self._changed:
            self._num_requests -= 1
            if total_s is not None:
                self._usual_s += (total_s - self._usual_s) / 4

    def start_over(self) -> None:
        """Count only the requests that the thread has not looked at: it has lost all others."""
        with self._changed:
            self._num_requests = self.num_submitted

    def die(self, cause: BaseException) -> None:
        """Take no more commands, and refuse those that are here."""
        with self._changed:
            self._crash, self._num_requests = cause, 0
            refused, self._commands = self._commands, deque()
        for command in refused:
            command.refuse(cause)

    def _require_room(self) -> None:
        """The lock is held."""
        if self.max_num_requests is not None and self._num_requests >= self.max_num_requests:
            raise self._refusal()

    def _refusal(self, num_waiting: int = 0) -> EngineOverloaded:
        """The lock is held."""
        assert self.max_num_requests is not None
        self._num_rejected += 1
        retry_after_s = min(max(math.ceil(self._usual_s), MIN_RETRY_S), MAX_RETRY_S)
        return EngineOverloaded(self._num_requests + num_waiting, self.max_num_requests, retry_after_s)
