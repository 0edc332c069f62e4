"""Server-sent events: one JSON value each, sent while they are made, until the client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import describe
from ..request_log import CLIENT_GONE, RequestRecord, record_of
from .disconnect import ClientGone, while_connected

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
MAX_BURST = 3  # events without a look at anything else; asyncio warns of five that nobody receives
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # nor may proxies hold events back


class NamedEvent(Protocol):
    """What a stream of named events is made of."""

    @property
    def type(self) -> str: ...


class EventStream(Response):
    """Each of `values` as an event, then `[DONE]`; an error on the way is the last event, without `[DONE]`.

    `reply` is left as soon as the client disconnects or all is sent, also if nothing was ever sent. `encode` says how
    a value is written, `done` what comes after the last one. While nothing comes, a comment is sent every
    `keep_alive_s` seconds, which clients pass over.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        values: AsyncGenerator[msgspec.Struct],
        reply: AbstractAsyncContextManager[object],
        *,
        encode: Callable[[Any], bytes] | None = None,
        done: bytes = DONE,
        keep_alive_s: float | None = None,
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._values = values
        self._reply = reply
        self._encode = encode or _event
        self._done = done
        self._keep_alive_s = keep_alive_s
        self._sent_at = 0.0
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        async with self._reply:
            try:
                await while_connected(receive, self._send_all(send, record))
            except ClientGone:
                record.error = CLIENT_GONE

    async def _send_all(self, send: Send, record: RequestRecord) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        keeping_alive = asyncio.create_task(self._keep_alive(send))
        last = self._done
        async with aclosing(self._values) as values:
            try:
                async for value in values:
                    await self._send(send, self._encode(value))
            # The status line is sent: whatever fails now can only be said in the stream.
            except Exception as error:
                record.error = type(error).__name__
                last = _event(describe(error)[1])
            finally:
                keeping_alive.cancel()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send(self, send: Send, body: bytes) -> None:
        self._sent_at = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": body, "more_body": True})
        self._num_sent += 1
        if self._num_sent % MAX_BURST == 0:  # others have their turn, and a client that left is noticed
            await asyncio.sleep(0)

    async def _keep_alive(self, send: Send) -> None:
        """Send a comment whenever nothing was sent for long; one task a stream, for a timer a chunk costs more."""
        now = asyncio.get_running_loop().time
        self._sent_at = now()
        while self._keep_alive_s is not None:
            silent_s = now() - self._sent_at
            if silent_s >= self._keep_alive_s:
                await self._send(send, COMMENT)
                silent_s = 0.0
            await asyncio.sleep(self._keep_alive_s - silent_s)


def named_event(value: NamedEvent) -> bytes:
    """A value with its type as the event's name."""
    return b"event: " + value.type.encode() + b"\n" + _event(value)


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
