"""Server-sent events: one JSON value each, sent while they are made, until the client goes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .disconnect import ClientGone, while_connected
from .errors import describe

DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # nor may proxies hold events back


class EventStream(Response):
    """Each of `values` as an event, then `[DONE]`; an error on the way is the last event, without `[DONE]`.

    `reply` is left as soon as the client disconnects or all is sent, also if nothing was ever sent.
    """

    media_type = "text/event-stream"

    def __init__(self, values: AsyncGenerator[msgspec.Struct], reply: AbstractAsyncContextManager[object]) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._values = values
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._reply:
            with contextlib.suppress(ClientGone):
                await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._values) as values:
            try:
                async for value in values:
                    await _send_body(send, _event(value))
                await _send_body(send, DONE)
            # The status line is sent: whatever fails now can only be said in the stream.
            except Exception as error:
                await _send_body(send, _event(describe(error)[1]))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _event(value: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
