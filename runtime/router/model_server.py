"""What the router asks of a loaded model: it is the whole server of one model, somewhere else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from starlette.types import Message

from ..server.about import ModelReply
from ..server.http.forwarding import ServerGone
from .model_row import Worker

ANSWER_S = 2.0  # for a model to say how it is; one that is busy answers at once, too
Headers = Sequence[tuple[bytes, bytes]]


class ModelServer(Worker, Protocol):
    """A server of one model."""

    @property
    def described(self) -> Mapping[str, ModelReply]:
        """What it says of its model in `/v1/models`, by each name."""
        ...

    def ask(self, method: str, target: bytes, headers: Headers = (), body: bytes = b"") -> AsyncGenerator[Message]:
        """Yield the messages of an answer. Closed early, it cancels the request.

        Args:
            target: path and query.

        Raises:
            ServerGone: the server has ended, or ends before its answer does.
        """
        ...


async def whole_answer(server: ModelServer, method: str, target: bytes, headers: Headers = ()) -> tuple[int, bytes]:
    """Return status and body of an answer. Raises ServerGone."""
    start, *parts = [message async for message in server.ask(method, target, headers)]
    return start["status"], b"".join(part.get("body", b"") for part in parts)


async def answer_in_time(server: ModelServer | None, path: bytes, headers: Headers) -> bytes | None:
    """Return what a loaded model answers to a GET; None if it is not loaded, or does not answer."""
    if server is None:
        return None
    try:
        async with asyncio.timeout(ANSWER_S):
            return (await whole_answer(server, "GET", path, headers))[1]
    except (ServerGone, TimeoutError):
        return None
