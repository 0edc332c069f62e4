"""An HTTP/1.1 client that can leave at any moment: one connection, kept alive until it is dropped.

Knows heads, chunks and server-sent events. No library's client closes a connection in the middle of a response, or of
a request, and two hundred of those would take CPU time from the server under test.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

_EVENT = b"data: "
_MAX_IDLE_S = 2.0  # servers close connections that are idle for longer, uvicorn after 5 s, which is no fault


class BrokenReply(Exception):
    """An error of a server that closed the connection, or sent invalid HTTP."""


@dataclass(frozen=True)
class Call:
    """A request: `body` is sent unchanged; `headers` are added to the usual ones, or replace them."""

    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] | None = None

    def encoded(self) -> bytes:
        """Return the bytes to send."""
        headers = {"host": "load", "content-length": str(len(self.body)), **(self.headers or {})}
        lines = [f"{self.method} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + self.body


@dataclass(frozen=True)
class Head:
    """The head of a response; header names are lower-case."""

    status: int
    headers: Mapping[str, str]


class Connection:
    """One client's connection to a server on this machine; opened when needed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._idle_since = 0.0

    async def ask(self, call: Call) -> Head:
        """Send a request and read the head of its response.

        Raises:
            BrokenReply: the server closed the connection instead, or sent no HTTP.
        """
        try:
            await self.send(call.encoded())
            reader, _ = await self._open()
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(lines[0].split()[1])
        except (OSError, IndexError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            self.drop()
            raise BrokenReply(f"no answer: {error}") from error
        pairs = (line.partition(":") for line in lines[1:] if line)
        return Head(status, {name.lower(): value.strip() for name, _, value in pairs})

    async def send(self, data: bytes) -> None:
        """Send any bytes; no response is read."""
        if time.monotonic() - self._idle_since > _MAX_IDLE_S:
            self.drop()
        _, writer = await self._open()
        writer.write(data)
        await writer.drain()

    async def body(self, head: Head) -> bytes:
        """Return the whole body of a response."""
        return b"".join([part async for part in self.parts(head)])

    async def events(self, head: Head) -> AsyncIterator[bytes]:
        """Yield the data of each server-sent event, without comments."""
        buffer = b""
        async for part in self.parts(head):
            *whole, buffer = (buffer + part).split(b"\n\n")
            for event in whole:
                if event.startswith(_EVENT):
                    yield event[len(_EVENT) :]

    async def parts(self, head: Head) -> AsyncIterator[bytes]:
        """Yield the body as it comes.

        Raises:
            BrokenReply: the server closed the connection before the end.
        """
        reader, _ = await self._open()
        try:
            if head.headers.get("transfer-encoding") == "chunked":
                while size := int(await reader.readline() or b"0x", 16):
                    yield (await reader.readexactly(size + 2))[:-2]
                await reader.readexactly(2)
            else:
                yield await reader.readexactly(int(head.headers.get("content-length", 0)))
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            self.drop()
            raise BrokenReply(f"the answer broke off: {error}") from error
        if head.headers.get("connection") == "close":
            self.drop()
        self._idle_since = time.monotonic()

    def drop(self) -> None:
        """Close the connection at once, whatever was still to come."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        return self._streams
