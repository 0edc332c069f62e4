"""Forward another server's response as it arrives, as long as the client is connected.

Knows ASGI's messages, not which server responds, nor how its messages arrive.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ...errors import RadixLMError
from ..errors import HTTPError
from .connection import ClientGone, while_connected
from .sse import error_event


class ServerGone(RadixLMError):
    """The server that a request was forwarded to has ended, or accepts no requests."""


class Forwarded(Response):
    """A response that another server makes.

    Args:
        messages: the response's ASGI messages; closed when the client leaves. Raises `ServerGone` if the server dies.
        gone: the error in a stream's last event if the server dies. Other responses break off, which clients notice.
        ended: called once, when nothing more is sent.
    """

    def __init__(
        self, messages: AsyncGenerator[Message], gone: HTTPError, ended: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._messages, self._gone, self._ended = messages, gone, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the other server's response to the client, until it ends or the client has gone."""
        try:
            with suppress(ClientGone):
                await while_connected(receive, self._relay(scope["path"], send))
        finally:
            self._ended()

    async def _relay(self, path: str, send: Send) -> None:
        """Send each message of the response; if the other server goes away in a stream, end it with an error event."""
        is_stream = False
        async with aclosing(self._messages) as messages:
            try:
                async for message in messages:
                    if message["type"] == "http.response.start":
                        is_stream = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
                    await send(message)
            except ServerGone:
                if not is_stream:
                    raise
                event = error_event(self._gone, path)
                await send({"type": "http.response.body", "body": event, "more_body": False})
