"""Threads for work that would block the event loop. Each kind of work has its own, so that kinds do not delay another.

Knows how much runs at a time and for which client, not what the work is. Work gets its turn before it gets a thread:
when all kinds shared forty threads, a hundred long texts held them all, although only two were encoded at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request

from ..chat.fair_lock import FairLock, Refusal
from ..errors import WorkOverloaded
from .http.api_keys import client_of
from .http.connection import while_connected
from .http.request_body import num_body_bytes_of

if TYPE_CHECKING:
    from ..engine.engine import Engine

T = TypeVar("T")
NUM_SHORT = 4  # short requests at a time per queue, milliseconds of work each
LONG_BODY_BYTES = 1 << 15  # encoding this much text takes about 30 ms; a body may be 500 times as long
AT_ONCE_BYTES = 1 << 11  # encoding the text of a shorter body takes less time than starting a thread
READ_AT_ONCE_BYTES = 1 << 14  # decoding a shorter body does too, whatever it asks for
_NICENESS = 10  # of long work: without it, it took a third of two cores from the model, whose threads are in lockstep
_RETRY_AFTER_S = 1


class WorkQueue:
    """A queue of one kind of work, with its threads. Clients take turns; short requests do not wait for long ones.

    Args:
        num_long: maximum requests with long bodies in progress at a time.
        at_once_bytes: work for shorter bodies is done at once, on the event loop.
        max_waiting: returns the maximum number of waiting requests, short and long ones together.
        refusal: makes the error for requests above that.
    """

    def __init__(
        self, *, num_long: int, max_waiting: Callable[[], int], refusal: Refusal, at_once_bytes: int = 0
    ) -> None:
        self._at_once_bytes = at_once_bytes
        # Both queues share one limit. With a limit each, one client could fill a queue, and others were refused.
        self._short = FairLock(num_turns=NUM_SHORT, max_waiting=max_waiting, refusal=refusal)
        self._long = FairLock(
            num_turns=num_long, max_waiting=max_waiting, refusal=refusal, beside=self._short, niceness=_NICENESS
        )

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for their turn, short and long ones."""
        return self._short.num_waiting + self._long.num_waiting

    async def run(self, request: Request, work: Callable[[], T], *, may_hold_loop: bool = True) -> T:
        """Return the result of `work`, run at once, or in a thread when it is the client's turn.

        Args:
            may_hold_loop: run it at once if the body is short.

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
class WorkQueues:
    """The work queues of one model: one for each kind of work that runs in threads."""

    submission: WorkQueue  # submitting requests to the engine; requests that wait here count as its queue
    tokenization: WorkQueue
    truncation: WorkQueue
    cache: WorkQueue  # reading and clearing the cache; each request waits for a step of the engine

    @classmethod
    def of(cls, engine: Engine) -> WorkQueues:
        """Return the queues for an engine's submissions, tokenization, truncation and cache requests.

        If the engine's queue is limited, each of them is, too.
        """

        def room() -> int:
            return sys.maxsize if engine.queue.room is None else engine.queue.room

        def queue(work: str) -> WorkQueue:
            return _make_queue(work, lambda: _most(engine), num_long=1)

        # Two long prompts at a time, so that a valid one need not wait for one that is refused in the end.
        submission = WorkQueue(num_long=2, max_waiting=room, refusal=engine.queue.refusal, at_once_bytes=AT_ONCE_BYTES)
        return cls(submission, queue("tokenization"), queue("truncation"), queue("the cache"))


def reading_queue(engines: Callable[[], Iterable[Engine]]) -> WorkQueue:
    """Return the queue for decoding bodies, before their model is known. Its limit is the sum of the engines'."""
    return _make_queue(
        "reading requests",
        lambda: min(sys.maxsize, sum(map(_most, engines()))),
        num_long=2,
        at_once_bytes=READ_AT_ONCE_BYTES,
    )


def _make_queue(work: str, max_waiting: Callable[[], int], *, num_long: int, at_once_bytes: int = 0) -> WorkQueue:
    """Return a queue for one kind of work; it refuses more than `max_waiting()` requests, with the work's name."""

    def refusal(num_waiting: int) -> WorkOverloaded:
        return WorkOverloaded(work, num_waiting, _RETRY_AFTER_S)

    return WorkQueue(num_long=num_long, max_waiting=max_waiting, refusal=refusal, at_once_bytes=at_once_bytes)


def _most(engine: Engine) -> int:
    """Return the maximum number of requests of an engine."""
    return sys.maxsize if engine.queue.max_num_requests is None else engine.queue.max_num_requests
