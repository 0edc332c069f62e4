"""The interface of a loaded model to the router: a complete server of one model, in another process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from starlette.types import Message

from ..server.about import ModelReply
from ..server.http.forwarding import ServerGone
from .model_row import Worker

ANSWER_S = 2.0  # for a model to report its health or metrics, which takes no longer while it is busy
Headers = Sequence[tuple[bytes, bytes]]


class ModelServer(Worker, Protocol):
    """A server of one model."""

    @property
    def described(self) -> Mapping[str, ModelReply]:
        """Its description in `/v1/models`, by each of its names."""
        ...

    def ask(self, method: str, target: bytes, headers: Headers = (), body: bytes = b"") -> AsyncGenerator[Message]:
        """Send a request, and yield the ASGI messages of the response. Closing the generator early cancels the request.

        Args:
            target: path and query.

        Raises:
            ServerGone: the server has ended, or ends before its response does.
        """
        ...


async def whole_answer(server: ModelServer, method: str, target: bytes, headers: Headers = ()) -> tuple[int, bytes]:
    """Send a request, and return the status and body of the response. Raises ServerGone."""
    start, *parts = [message async for message in server.ask(method, target, headers)]
    return start["status"], b"".join(part.get("body", b"") for part in parts)


async def answer_in_time(server: ModelServer | None, path: bytes, headers: Headers) -> bytes | None:
    """Send a GET to a model, and return the body; None if it is not loaded, or does not respond in time."""
    if server is None:
        return None
    try:
        async with asyncio.timeout(ANSWER_S):
            return (await whole_answer(server, "GET", path, headers))[1]
    except (ServerGone, TimeoutError):
        return None
