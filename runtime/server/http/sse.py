"""Streaming responses of JSON values, until the client disconnects: server-sent events, or another encoding."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ...errors import EngineOverloaded
from ..anthropic.error_replies import is_of_messages
from ..errors import failure, shaped
from ..request_log import CLIENT_GONE, STATUS_CLIENT_GONE, RequestRecord, record_of
from .connection import ClientGone, while_connected

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
MAX_BURST = 16  # events per turn of the event loop
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the second keeps proxies from buffering


class NamedEvent(Protocol):
    """A value that is sent as an event with a name."""

    @property
    def type(self) -> str: ...


class ValueSource(AbstractAsyncContextManager[object], Protocol):
    """The source of a stream's values. It awaits `before_waiting` before it waits for the next value."""

    before_waiting: Callable[[], Awaitable[None]]


class EventStream(Response):
    """A streaming response: each of `values` as an event, then `[DONE]`. An error is sent as the last event instead.

    Events that are available at the same time are sent together.

    Args:
        reply: the source of the values; left when the client disconnects or all is sent, even if nothing was sent.
        encode: encodes a value.
        encode_error: encodes an error in the format of the path's API.
        done: sent after the last value.
        keep_alive_s: after this many seconds without an event, send `comment`, which clients ignore; None: never.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        values: AsyncGenerator[msgspec.Struct],
        reply: ValueSource,
        *,
        encode: Callable[[Any], bytes] | None = None,
        done: bytes = DONE,
        keep_alive_s: float | None = None,
        comment: bytes = COMMENT,
        encode_error: Callable[[Exception, str], bytes] | None = None,
        media_type: str | None = None,
    ) -> None:
        super().__init__(headers=_HEADERS, media_type=media_type)
        del self.headers["content-length"]
        self._values = values
        self._reply = reply
        self._encode = encode or _event
        self._encode_error = encode_error or error_event
        self._done = done
        self._keep_alive_s = keep_alive_s
        self._comment = comment
        self._keeping_alive: _KeepAlive | None = None
        self._events: list[bytes] = []  # not sent yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream to the client, and close its source; a client that goes away is logged."""
        record = record_of(scope)
        async with self._reply:
            try:
                await while_connected(receive, self._send_all(scope["path"], send, record))
            except ClientGone:
                record.fail(STATUS_CLIENT_GONE, CLIENT_GONE)

    async def _send_all(self, path: str, send: Send, record: RequestRecord) -> None:
        """Send the headers with the first event, then all events, several at a time if they come fast.

        An error ends the stream with an event in the form of the path's API. EngineOverloaded before the first event is
        raised, and becomes an HTTP status.
        """
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        has_started = False

        async def send_body(message: Message) -> None:
            nonlocal has_started
            if not has_started:
                has_started = True
                await send(start)
            await send(message)

        self._reply.before_waiting = partial(self._flush, send_body)
        if self._keep_alive_s is not None:
            self._keeping_alive = _KeepAlive(partial(_send, send_body, self._comment), self._keep_alive_s)
        last = self._done
        async with aclosing(self._values) as values:
            try:
                async for value in values:
                    self._events.append(self._encode(value))
                    if len(self._events) == MAX_BURST:
                        await self._flush(send_body)
                        await asyncio.sleep(0)  # lets other tasks run, and notices a disconnected client
            except Exception as error:
                if isinstance(error, EngineOverloaded) and not has_started:
                    raise  # as an HTTP status
                record.fail(*failure(error, path))
                last = self._encode_error(error, path)
            finally:
                if self._keeping_alive is not None:
                    self._keeping_alive.stop()
        body = b"".join([*self._events, last])
        await send_body({"type": "http.response.body", "body": body, "more_body": False})

    async def _flush(self, send: Send) -> None:
        """Send the events that wait in one message."""
        if self._events:
            body = b"".join(self._events)
            self._events.clear()
            if self._keeping_alive is not None:
                self._keeping_alive.sent()
            await _send(send, body)


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


class _KeepAlive:
    """Sends a comment whenever a stream has been silent for `after_s` seconds.

    Uses one timer per stream that checks when the last event was sent: a timer per event would cost more.
    """

    def __init__(self, comment: Callable[[], Coroutine[Any, Any, None]], after_s: float) -> None:
        self._comment, self._after_s = comment, after_s
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._timer = self._loop.call_later(after_s, self._comment_if_silent)
        self._commenting: asyncio.Task[None] | None = None

    def sent(self) -> None:
        """Note that an event is sent now."""
        self._sent_at = self._loop.time()

    def stop(self) -> None:
        """Stop sending comments."""
        self._timer.cancel()
        if self._commenting is not None:
            self._commenting.cancel()

    def _comment_if_silent(self) -> None:
        """Send a comment if nothing was sent for the whole interval, and set the timer again."""
        left_s = self._after_s - (self._loop.time() - self._sent_at)
        if left_s <= 0 and self._commenting is not None and not self._commenting.done():
            left_s = self._after_s  # the last comment is not sent yet
        elif left_s <= 0:
            self._commenting = self._loop.create_task(self._comment())
            left_s = self._after_s
        self._timer = self._loop.call_later(left_s, self._comment_if_silent)


def named_event(value: NamedEvent) -> bytes:
    """Encode a value as an event with its type as the name."""
    return b"event: " + value.type.encode() + b"\n" + _event(value)


def error_event(error: Exception, path: str) -> bytes:
    """Encode an error as the last event of a stream, in the format of the path's API."""
    event = _event(shaped(error, path)[1])
    return b"event: error\n" + event if is_of_messages(path) else event


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
