"""The storage of one server: responses, conversations, files and batches.

Knows its parts, and deletes responses when an engine deletes their namespace.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ...memory import ForgetResult, Memory
from ..server_options import ServerOptions
from .background import BackgroundResponses
from .batches import Batches
from .conversations import Conversations
from .database import Database
from .files import Files
from .turns import TurnLimits, Turns

MAX_TURNS = 100_000


class Stored(Memory):
    """The storage of one server. It is registered as a memory of every engine, so that it forgets with them.

    Args:
        directory: directory of the database; None: in memory.
        clock: the engines' clock.
    """

    def __init__(
        self, directory: Path | None, options: ServerOptions, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self.database = Database(directory)
        limits = TurnLimits(MAX_TURNS, options.response_bytes, options.response_ttl_s)
        self.turns = Turns(self.database, limits)
        self.background = BackgroundResponses()
        self.conversations = Conversations(self.database, self.turns)
        self.files = Files(self.database, max_bytes=options.response_bytes, ttl_s=options.response_ttl_s)
        self.batches = Batches(self.database, self.files)

    def forget(self, namespace: bytes) -> ForgetResult:
        """Delete the responses and conversations of a namespace."""
        return ForgetResult(pending=(self.database.submit(lambda sql: self.turns.forget(sql, namespace)),))

    def drop_unused(self, since: float) -> None:
        """Delete the responses and conversations that were not used since a time of the engines' clock."""
        before = self.database.clock() - (self._clock() - since)
        self.database.submit(lambda sql: self.turns.expire(sql, before))
