"""One request and its response over HTTP/1.1: an ASGI application reads the body and sends the response.

Knows a connection that it writes to, not how bytes were read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import cache
from http import HTTPStatus
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Scope
from uvicorn.protocols.http.flow_control import FlowControl

Headers = list[tuple[bytes, bytes]]

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_HEADERS_OF_500 = [(b"content-type", b"text/plain"), (b"content-length", b"21"), (b"connection", b"close")]
_log = logging.getLogger("radixlm.http")


class Writer(Protocol):
    """Sends bytes to the client, such as an asyncio transport."""

    def write(self, data: bytes) -> None: ...


class Exchange:
    """One request and its response. The connection adds the body while the application runs.

    Args:
        read_on: called when the application has read the body received so far.
        begins: called before the response; returns the headers that every response has.
        ends: called after the response.

    Attributes:
        num_body_bytes: bytes of the body received so far.
        is_whole: the whole body was received.
        keep_alive: the connection takes another request afterwards.
        has_started: a part of the response was sent.
    """

    def __init__(
        self,
        scope: Scope,
        writer: Writer,
        flow: FlowControl,
        *,
        keep_alive: bool,
        awaits_continue: bool,
        read_on: Callable[[], None],
        begins: Callable[[Exchange], Headers],
        ends: Callable[[Exchange], None],
    ) -> None:
        self.num_body_bytes = 0
        self.is_whole = self.has_started = False
        self.keep_alive = keep_alive
        self._scope, self._writer, self._flow = scope, writer, flow
        self._awaits_continue, self._read_on, self._begins, self._ends = awaits_continue, read_on, begins, ends
        self._body, self._start = bytearray(), dict[str, Any]()
        self._has_read = self._has_ended = self._is_gone = False  # the whole body; the response; the client
        self._is_chunked = self._has_body = False  # of the response
        self._changed = asyncio.Event()

    @property
    def num_waiting_bytes(self) -> int:
        """Number of received bytes that the application has not read."""
        return len(self._body)

    def add(self, body: bytes) -> None:
        """Add a received part of the body."""
        self._body += body
        self.num_body_bytes += len(body)
        self._changed.set()

    def end(self) -> None:
        """Note the end of the body."""
        self.is_whole = True
        self._changed.set()

    def leave(self) -> None:
        """Note that the client has disconnected, or that nothing can be sent to it any more."""
        self._is_gone = True
        self._changed.set()

    async def run(self, app: ASGIApp) -> None:
        """Run the application. If it fails, the client gets a 500, or sees the connection close within the response."""
        try:
            await app(self._scope, self.receive, self.send)
        except BaseException as error:
            _log.error("Exception in ASGI application\n", exc_info=error)
        if self._has_ended or self._is_gone:
            return
        self.keep_alive = False
        if not self.has_started:
            await self.send({"type": "http.response.start", "status": 500, "headers": _HEADERS_OF_500})
            await self.send({"type": "http.response.body", "body": b"Internal Server Error"})
        else:
            self._ends(self)

    async def receive(self) -> Message:
        """Return the body received since the last call. After its end, wait until the client leaves or is answered."""
        if self._awaits_continue and not self.is_whole:
            self._writer.write(_CONTINUE)
        self._awaits_continue = False
        while not (self._is_gone or self._has_ended):
            if not self._has_read and (self._body or self.is_whole):
                body, self._body, self._has_read = bytes(self._body), bytearray(), self.is_whole
                self._read_on()
                return {"type": "http.request", "body": body, "more_body": not self._has_read}
            self._changed.clear()
            await self._changed.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send a part of the response. The headers are sent with the first part of the body."""
        if message["type"] == "http.response.start":  # never waits, so that no part of the body overtakes it
            self._start = {**message}
            return
        if self._flow.write_paused:
            await self._flow.drain()
        if self._is_gone or self._has_ended:  # parts that waited until after the end are dropped
            return
        is_last = not message.get("more_body", False)
        head = b"" if self.has_started else self._head()
        data = head + self._framed(message.get("body", b""), is_last)
        self.has_started = True
        if data:
            self._writer.write(data)
        if is_last:
            self._has_ended = True
            self._changed.set()
            self._ends(self)

    def _head(self) -> bytes:
        """Return the status line and headers of the response, and decide how its body ends.

        Raises:
            ValueError: a header has several lines.
        """
        status, version = self._start["status"], self._scope["http_version"]
        headers = [*self._begins(self), *self._start.get("headers", ())]
        names = {name.lower() for name, _ in headers}
        self._has_body = self._scope["method"] != "HEAD" and status not in (204, 304)
        self._is_chunked = self._has_body and b"content-length" not in names and version == "1.1"
        if self._is_chunked:
            headers.append((b"transfer-encoding", b"chunked"))
        elif self._has_body and b"content-length" not in names:
            self.keep_alive = False  # the body ends with the connection
        if b"connection" in names:
            self.keep_alive = False  # applications only ever send "close"
        elif not self.keep_alive:
            headers.append((b"connection", b"close"))
        lines = [_status_line(status), *(b"%b: %b" % header for header in headers), b"\r\n"]
        head = b"\r\n".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
            raise ValueError("a header of the response has several lines")
        return head

    def _framed(self, body: bytes, is_last: bool) -> bytes:
        """Return a part of the body as sent: as a chunk, as it is, or nothing if the response has no body."""
        if not self._is_chunked:
            return body if self._has_body else b""
        chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return chunk + b"0\r\n\r\n" if is_last else chunk


@cache
def _status_line(status: int) -> bytes:
    phrase = next((each.phrase for each in HTTPStatus if each == status), "")
    return f"HTTP/1.1 {status} {phrase}".encode()
