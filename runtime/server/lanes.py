"""Threads for work that would hold the event loop; each kind of work has its own, so that no kind waits for another.

Knows how much is done at a time and for which client, not what the work is. Work gets its turn before it gets a thread:
all kinds shared forty threads once, and a hundred long texts, of which two were encoded at a time, held them all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request

from ..chat.fair_lock import FairLock, Refusal
from ..errors import WorkOverloaded
from .http.connection import while_connected
from .http.door import client_of
from .http.request_body import num_body_bytes_of

if TYPE_CHECKING:
    from ..engine.engine import Engine

T = TypeVar("T")
NUM_SHORT = 4  # short requests at a time in each lane, milliseconds of work each
LONG_BODY_BYTES = 1 << 15  # so much text takes about 30 ms to encode; a body may have 500 times as much
AT_ONCE_BYTES = 1 << 11  # encoding the text of a shorter body takes less time than starting a thread
READ_AT_ONCE_BYTES = 1 << 14  # so does reading what a shorter body asks for, whatever that is
_NICENESS = 10  # of long work: it took a third of two processors from the model, whose threads wait for each other
_RETRY_AFTER_S = 1


class Lane:
    """One kind of work. Clients take turns, and short requests do not wait for long ones.

    Args:
        num_long: how many requests with long bodies are worked on at a time.
        at_once_bytes: work for bodies shorter than this is done at once, on the event loop.
        max_waiting: returns how many requests may wait now, short and long ones together.
        refusal: makes the error for one too many.
    """

    def __init__(
        self, *, num_long: int, max_waiting: Callable[[], int], refusal: Refusal, at_once_bytes: int = 0
    ) -> None:
        self._at_once_bytes = at_once_bytes
        # Both queues have one limit together. With one each, the clients of a queue that one client had filled were
        # refused.
        self._short = FairLock(num_turns=NUM_SHORT, max_waiting=max_waiting, refusal=refusal)
        self._long = FairLock(
            num_turns=num_long, max_waiting=max_waiting, refusal=refusal, beside=self._short, niceness=_NICENESS
        )

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn, short and long ones."""
        return self._short.num_waiting + self._long.num_waiting

    async def run(self, request: Request, work: Callable[[], T], *, may_hold_loop: bool = True) -> T:
        """What `work` returns or raises, done at once, or in a thread when the request's client has its turn.

        Args:
            may_hold_loop: whether it may be done at once, if the body is short.

        Raises:
            EngineOverloaded: too many requests wait.
            ClientGone: the client disconnected before the end.
        """
        num_bytes = num_body_bytes_of(request)
        if may_hold_loop and num_bytes < self._at_once_bytes:
            return work()
        lock = self._long if num_bytes > LONG_BODY_BYTES else self._short
        return await while_connected(request.receive, lock.run_in_thread(client_of(request), work))


@dataclass(frozen=True)
class Lanes:
    """The kinds of work that are done in threads for one model."""

    submission: Lane  # handing requests to the engine; those that wait here count as its queue
    tokenization: Lane
    truncation: Lane
    cache: Lane  # looking at the cache and clearing it; each waits for a step of the engine

    @classmethod
    def of(cls, engine: Engine) -> Lanes:
        """The lanes in front of an engine; where its queue is limited, each lane's is."""

        def room() -> int:
            return sys.maxsize if engine.queue.room is None else engine.queue.room

        def lane(work: str) -> Lane:
            return _lane(work, lambda: _most(engine), num_long=1)

        # Two long prompts at a time, so that a good one need not wait for one that is refused in the end.
        submission = Lane(num_long=2, max_waiting=room, refusal=engine.queue.refusal, at_once_bytes=AT_ONCE_BYTES)
        return cls(submission, lane("tokenization"), lane("truncation"), lane("the cache"))


def reading_lane(engines: Callable[[], Iterable[Engine]]) -> Lane:
    """The lane of what bodies ask for, before it is known of which of these engines: as many wait as all may take."""
    return _lane(
        "reading requests",
        lambda: min(sys.maxsize, sum(map(_most, engines()))),
        num_long=2,
        at_once_bytes=READ_AT_ONCE_BYTES,
    )


def _lane(work: str, max_waiting: Callable[[], int], *, num_long: int, at_once_bytes: int = 0) -> Lane:
    def refusal(num_waiting: int) -> WorkOverloaded:
        return WorkOverloaded(work, num_waiting, _RETRY_AFTER_S)

    return Lane(num_long=num_long, max_waiting=max_waiting, refusal=refusal, at_once_bytes=at_once_bytes)


def _most(engine: Engine) -> int:
    """How many requests an engine takes at once."""
    return sys.maxsize if engine.queue.max_num_requests is None else engine.queue.max_num_requests
