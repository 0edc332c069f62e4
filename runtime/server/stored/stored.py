"""All that clients leave on one server: responses, conversations, files and batches.

Knows which parts there are, and what becomes of them when an engine forgets a namespace.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ...memory import ForgetResult, Memory
from ..server_options import ServerOptions
from .batches import Batches
from .conversations import Conversations
from .database import Database
from .files import Files
from .turns import TurnLimits, Turns

MAX_TURNS = 100_000


class Stored(Memory):
    """What clients leave; a memory of every engine of the server.

    Args:
        directory: where it outlives the process; None: it is in memory.
        clock: that of the engines.
    """

    def __init__(
        self, directory: Path | None, options: ServerOptions, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self.database = Database(directory)
        limits = TurnLimits(MAX_TURNS, options.response_bytes, options.response_ttl_s)
        self.turns = Turns(self.database, limits)
        self.conversations = Conversations(self.database, self.turns)
        self.files = Files(self.database, max_bytes=options.response_bytes, ttl_s=options.response_ttl_s)
        self.batches = Batches(self.database, self.files)

    def forget(self, namespace: bytes) -> ForgetResult:
        """Forget the responses and the conversations of a namespace."""
        return ForgetResult(pending=(self.database.submit(lambda sql: self.turns.forget(sql, namespace)),))

    def drop_unused(self, since: float) -> None:
        """Forget the responses and the conversations that were not used since then."""
        before = self.database.clock() - (self._clock() - since)
        self.database.submit(lambda sql: self.turns.expire(sql, before))
