"""Connections of clients that are slow, send too much or no HTTP; over real sockets."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import uvicorn
from radixlm.runtime.server import create_app
from radixlm.runtime.server.http_protocol import MAX_HEADER_BYTES, HTTPProtocol

if TYPE_CHECKING:
    from .conftest import FakeEngine


class Hasty(HTTPProtocol):
    """Waits a fifth of a second for headers."""

    headers_s = 0.2


@pytest.fixture
def address(engine: FakeEngine) -> Iterator[tuple[str, int]]:
    """A real server over the fake engine."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(engine)  # type: ignore[arg-type]
    config = uvicorn.Config(
        app, log_level="error", lifespan="off", http=Hasty, h11_max_incomplete_event_size=MAX_HEADER_BYTES
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join(10)
    listener.close()


def rest_of(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    connection.settimeout(10)
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionResetError:  # it closed with bytes of ours unread
        pass
    return received


def get(connection: socket.socket) -> bytes:
    """A request on a connection that stays open, and its answer."""
    connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
    received = b""
    while not received.endswith(b"}"):
        received += connection.recv(4096)
    return received


@pytest.mark.parametrize("begun", [b"", b"GET /version HT", b"GET /version HTTP/1.1\r\nhost: x\r\nx-slow: "])
def test_headers_that_do_not_come_close_the_connection(address: tuple[str, int], begun: bytes) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(begun)
        assert rest_of(connection) == b""


def test_headers_that_drip_close_the_connection(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection, pytest.raises(OSError):
        connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n")
        for _ in range(200):
            connection.sendall(b"x-slow: 1\r\n")
            time.sleep(0.05)


def test_the_deadline_is_each_requests_own(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection:
        for _ in range(3):
            assert b"200 OK" in get(connection)
        connection.sendall(b"GET /ver")
        assert rest_of(connection) == b""


def test_a_reply_that_takes_longer_than_the_headers_may_is_sent(address: tuple[str, int], engine: FakeEngine) -> None:
    engine.go_on.clear()
    threading.Timer(0.5, engine.go_on.set).start()
    body = b'{"prompt": "Hi"}'
    with socket.create_connection(address) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        connection.sendall(head + body)
        assert "Hello wörld!".encode() in rest_of(connection)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx-big: " + b"x" * 2 * MAX_HEADER_BYTES,
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * MAX_HEADER_BYTES,
        b"GET /" + b"x" * 2 * MAX_HEADER_BYTES,
    ],
)
def test_what_is_no_http_or_too_much_of_it_is_400_in_openais_shape(address: tuple[str, int], sent: bytes) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(sent + b"\r\n\r\n")
        head, _, body = rest_of(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["code"] == "invalid_http"
    with socket.create_connection(address) as connection:
        assert b"200 OK" in get(connection), "the next one is served"
