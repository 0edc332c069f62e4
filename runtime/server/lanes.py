"""Threads for what an event loop may not do itself: of each kind of work its own, so that no kind waits for another.

Knows how much is done at a time and for which client, not what it is. Work has its turn before it has a thread: all
kinds shared forty threads once, and a hundred long texts, of which two were encoded at a time, held them all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request

from ..chat.fair_lock import FairLock, Refusal
from ..errors import WorkOverloaded
from .http.api_keys import client_of
from .http.disconnect import while_connected
from .http.request_body import num_body_bytes_of

if TYPE_CHECKING:
    from ..engine.engine import Engine

T = TypeVar("T")
NUM_SHORT = 4  # at a time in each lane; what they compute takes milliseconds
LONG_BODY_BYTES = 1 << 15  # whose text may take 30 ms to encode, and a hundred times as many a hundred times as long
AT_ONCE_BYTES = 1 << 11  # the text of a shorter body is encoded sooner than a thread begins
_RETRY_AFTER_S = 1


class Lane:
    """One kind of work: clients have their turns one after the other, and short requests wait for no long one.

    Args:
        num_long: requests with long bodies that are worked on at a time.
        at_once_bytes: work of bodies shorter than this is done at once, on the event loop.
        max_waiting: says how many may wait now, short and long ones together.
        refusal: makes the error for one too many.
    """

    def __init__(
        self, *, num_long: int, max_waiting: Callable[[], int], refusal: Refusal, at_once_bytes: int = 0
    ) -> None:
        self._at_once_bytes = at_once_bytes
        # One end for both queues: with one each, a client that filled its own had the other's clients refused.
        self._short = FairLock(num_turns=NUM_SHORT, max_waiting=max_waiting, refusal=refusal)
        self._long = FairLock(num_turns=num_long, max_waiting=max_waiting, refusal=refusal, beside=self._short)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn, short and long ones."""
        return self._short.num_waiting + self._long.num_waiting

    async def run(self, request: Request, work: Callable[[], T]) -> T:
        """What `work` returns or raises, done at once or in a thread when it is the turn of the request's client.

        Raises:
            EngineOverloaded: too many wait.
        """
        num_bytes = num_body_bytes_of(request)
        if num_bytes < self._at_once_bytes:
            return work()
        lock = self._long if num_bytes > LONG_BODY_BYTES else self._short
        return await while_connected(request.receive, lock.run_in_thread(client_of(request), work))


@dataclass(frozen=True)
class Lanes:
    """Every kind of work that requests are for the threads of one server."""

    submission: Lane  # of requests to the engine; those that wait here are part of its queue
    tokenization: Lane
    truncation: Lane
    cache: Lane  # looks at it, and clearing it: each waits for a step of the engine

    @classmethod
    def of(cls, engine: Engine) -> Lanes:
        """In front of an engine; where its queue has an end, so has each lane's."""

        def room() -> int:
            return sys.maxsize if engine.room is None else engine.room

        def lane(work: str) -> Lane:
            most = sys.maxsize if engine.max_num_requests is None else engine.max_num_requests

            def refusal(num_waiting: int) -> WorkOverloaded:
                return WorkOverloaded(work, num_waiting, _RETRY_AFTER_S)

            return Lane(num_long=1, max_waiting=lambda: most, refusal=refusal)

        # Two long prompts at a time: behind one that is refused in the end, another need not wait.
        submission = Lane(num_long=2, max_waiting=room, refusal=engine.refusal, at_once_bytes=AT_ONCE_BYTES)
        return cls(submission, lane("tokenization"), lane("truncation"), lane("the cache"))
