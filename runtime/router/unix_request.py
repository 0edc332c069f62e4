"""An HTTP/1.1 client for a server on a Unix socket, which streams the response.

Knows HTTP/1.1 and ASGI's messages, not what is requested. Each connection has one request: opening one costs a fraction
of a millisecond, and closing it cancels the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import httptools
from starlette.types import Message

from ..server.http.forwarding import ServerGone

_PART_BYTES = 64 << 10
Headers = Sequence[tuple[bytes, bytes]]
# Hop-by-hop headers. The request's length is set anew, and the router's server frames the response.
_HOP = frozenset((b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"))
_REWRITTEN = _HOP | {b"content-length", b"expect", b"host"}


async def ask(
    socket: Path, method: str, target: bytes, headers: Headers = (), body: bytes = b""
) -> AsyncGenerator[Message]:
    """Send a request, and yield the ASGI messages of the response. Closing the generator early cancels the request.

    Args:
        target: path and query.

    Raises:
        ServerGone: the server does not listen, or ends before its response does.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(str(socket))
    except OSError as error:
        raise ServerGone(f"no server answers at {socket} ({error.strerror})") from error
    try:
        writer.write(
            _head(method, target, headers, body) + body
        )  # not drained: the server may respond without reading the whole body
        answer = _Answer(has_body=method != "HEAD")
        while not answer.is_whole:
            part = await reader.read(_PART_BYTES)
            if not part:
                raise ServerGone("the server ended before its response did")
            for message in answer.messages_of(part):
                yield message
    except (OSError, httptools.HttpParserError) as error:
        raise ServerGone(f"the connection to the server broke: {error}") from error
    finally:
        writer.close()


async def ask_whole(socket: Path, method: str, target: bytes, headers: Headers = ()) -> tuple[int, bytes]:
    """Send a request, and return the status and body of the response. Raises ServerGone."""
    start, *parts = [message async for message in ask(socket, method, target, headers)]
    return start["status"], b"".join(part["body"] for part in parts)


def _head(method: str, target: bytes, headers: Headers, body: bytes) -> bytes:
    own = [(b"host", b"localhost"), (b"connection", b"close")]
    if body or method not in ("GET", "HEAD", "DELETE", "OPTIONS"):
        own.append((b"content-length", b"%d" % len(body)))
    own += [header for header in headers if header[0] not in _REWRITTEN]
    lines = [b"%b: %b" % header for header in own]
    return b"\r\n".join([b"%b %b HTTP/1.1" % (method.encode(), target), *lines, b"", b""])


class _Answer:
    """Parses a response into ASGI messages; `httptools` calls its methods."""

    def __init__(self, *, has_body: bool) -> None:
        self.is_whole = False
        self._has_body = has_body
        self._parser: Any = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._messages: list[Message] = []

    def messages_of(self, part: bytes) -> list[Message]:
        """Parse the next bytes, and return the messages that they complete."""
        self._parser.feed_data(part)
        messages, self._messages = self._messages, []
        return messages

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        headers = [header for header in self._headers if header[0] not in _HOP]
        status = self._parser.get_status_code()
        self._messages.append({"type": "http.response.start", "status": status, "headers": headers})
        if not self._has_body:
            self.on_message_complete()

    def on_body(self, body: bytes) -> None:
        self._messages.append({"type": "http.response.body", "body": body, "more_body": True})

    def on_message_complete(self) -> None:
        if not self.is_whole:
            self.is_whole = True
            self._messages.append({"type": "http.response.body", "body": b"", "more_body": False})
