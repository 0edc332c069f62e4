"""Server-sent events: one JSON value each, sent while they are made, until the client goes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .disconnect import ClientGone, while_connected
from .errors import describe

DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # nor may proxies hold events back


class NamedEvent(Protocol):
    """What a stream of named events is made of."""

    @property
    def type(self) -> str: ...


class EventStream(Response):
    """Each of `values` as an event, then `[DONE]`; an error on the way is the last event, without `[DONE]`.

    `reply` is left as soon as the client disconnects or all is sent, also if nothing was ever sent. `encode` says how
    a value is written, `done` what comes after the last one.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        values: AsyncGenerator[msgspec.Struct],
        reply: AbstractAsyncContextManager[object],
        *,
        encode: Callable[[Any], bytes] | None = None,
        done: bytes = DONE,
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._values = values
        self._reply = reply
        self._encode = encode or _event
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._reply:
            with contextlib.suppress(ClientGone):
                await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._values) as values:
            try:
                async for value in values:
                    await _send_body(send, self._encode(value))
                if self._done:
                    await _send_body(send, self._done)
            # The status line is sent: whatever fails now can only be said in the stream.
            except Exception as error:
                await _send_body(send, _event(describe(error)[1]))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def named_event(value: NamedEvent) -> bytes:
    """A value with its type as the event's name."""
    return b"event: " + value.type.encode() + b"\n" + _event(value)


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
