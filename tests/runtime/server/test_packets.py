"""How many packets an answer takes: one, or one for each thing that was worth waiting for."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from radixlm.runtime.server import create_app
from radixlm.runtime.server.http.corked_transport import CorkedTransport
from radixlm.runtime.server.http.http_protocol import HTTPProtocol
from radixlm.runtime.server.http.listener import listen

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


class Kept:
    """A transport that only keeps what is done to it."""

    def __init__(self) -> None:
        self.done: list[object] = []

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def write_eof(self) -> None:
        self.done.append("eof")

    def close(self) -> None:
        self.done.append("closed")


def test_writes_of_one_turn_leave_together_and_those_of_the_next_by_themselves() -> None:
    kept = Kept()

    async def run() -> None:
        corked = CorkedTransport(kept, asyncio.get_running_loop())  # type: ignore[arg-type]
        corked.write(b"a")
        corked.write(b"b")
        await asyncio.sleep(0)
        corked.write(b"c")
        await asyncio.sleep(0)

    asyncio.run(run())
    assert kept.done == [b"ab", b"c"]


@pytest.mark.parametrize(("end", "last"), [("close", "closed"), ("write_eof", "eof")])
def test_what_was_written_leaves_before_the_connection_closes(end: str, last: str) -> None:
    kept = Kept()

    async def run() -> None:
        corked = CorkedTransport(kept, asyncio.get_running_loop())  # type: ignore[arg-type]
        corked.write(b"a")
        getattr(corked, end)()
        await asyncio.sleep(0)

    asyncio.run(run())
    assert kept.done == [b"a", last]
