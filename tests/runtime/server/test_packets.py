"""How many packets an answer takes: one, or one for each thing that was worth waiting for."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import uvicorn
from radixlm.runtime.server import create_app
from radixlm.runtime.server.http.http_protocol import HTTPProtocol
from radixlm.runtime.server.http.listener import listen
from radixlm.runtime.server.http.sse import EventStream

if TYPE_CHECKING:
    from .conftest import FakeEngine

WRITES: list[bytes] = []


class Recorded:
    """A transport that keeps what is written."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        WRITES.append(data)
        self._transport.write(data)


class RecordedProtocol(HTTPProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Recorded(transport))  # type: ignore[arg-type]


@pytest.fixture
def connection(engine: FakeEngine) -> Iterator[socket.socket]:
    """One to a real server over the fake engine."""
    WRITES.clear()
    listener = listen("127.0.0.1", 0)
    app = create_app(engine)  # type: ignore[arg-type]
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", http=RecordedProtocol))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    with socket.create_connection(listener.getsockname(), timeout=10) as connection:
        yield connection
    server.should_exit = True
    thread.join(10)
    listener.close()


def answer(connection: socket.socket, end: bytes, path: str = "/version", **body: object) -> bytes:
    content = json.dumps(body).encode() if body else b""
    method = "POST" if body else "GET"
    connection.sendall(
        f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content
    )
    received = b""
    while not received.endswith(end):
        received += connection.recv(65536)
    return received


def test_the_headers_of_a_whole_answer_leave_with_its_body(connection: socket.socket) -> None:
    received = answer(connection, b"}")
    assert [received] == WRITES


def test_the_headers_of_a_stream_leave_with_its_first_event(connection: socket.socket) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    received = answer(connection, b"0\r\n\r\n", "/v1/chat/completions", **chat)
    assert received == b"".join(WRITES)
    assert WRITES[0].startswith(b"HTTP/1.1 200") and b"\r\n\r\n" in WRITES[0]
    assert b'"role":"assistant"' in WRITES[0]


def test_the_end_of_a_stream_is_no_packet_of_its_own(connection: socket.socket) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    answer(connection, b"0\r\n\r\n", "/v1/chat/completions", **chat)
    assert b"data: [DONE]" in WRITES[-1] and WRITES[-1].endswith(b"0\r\n\r\n")


def test_an_answer_without_tokens_before_its_end_is_one_packet(connection: socket.socket) -> None:
    received = answer(connection, b"}", "/v1/completions", prompt="Hi")
    assert [received] == WRITES


class Word(msgspec.Struct):
    word: str


class Reply(AbstractAsyncContextManager[object]):
    """Two words that are there at once, and one that must be waited for."""

    before_waiting: Callable[[], Awaitable[None]]

    async def __aexit__(self, *error: object) -> None:
        pass

    async def words(self) -> AsyncGenerator[msgspec.Struct]:
        yield Word("a")
        yield Word("b")
        await self.before_waiting()
        yield Word("c")


def test_events_that_are_there_at_once_leave_together_before_others_are_waited_for() -> None:
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.sleep(10)

    reply = Reply()
    scope = {"type": "http", "path": "/", "state": {}}
    asyncio.run(EventStream(reply.words(), reply, encode=msgspec.json.encode, done=b"done")(scope, receive, send))
    assert sent == [b"", b'{"word":"a"}{"word":"b"}', b'{"word":"c"}done']
