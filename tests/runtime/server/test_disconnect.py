"""A client that goes away stops its request; over real sockets, for no test client closes like one."""

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
from radixlm.runtime.server.http.listener import listen

if TYPE_CHECKING:
    from .conftest import FakeEngine


@pytest.fixture
def address(engine: FakeEngine) -> Iterator[tuple[str, int]]:
    """A real server over the fake engine."""
    listener = listen("127.0.0.1", 0)
    app = create_app(engine)  # type: ignore[arg-type]
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join(10)
    listener.close()


def send(address: tuple[str, int], **body: object) -> socket.socket:
    """A connection on which a chat request was sent."""
    content = json.dumps({"messages": [{"role": "user", "content": "Hi"}], **body}).encode()
    connection = socket.create_connection(address, timeout=10)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def wait_for_stream(engine: FakeEngine) -> threading.Event:
    """The event that is set when the one request is cancelled."""
    deadline = time.monotonic() + 10
    while not engine.streams and time.monotonic() < deadline:
        time.sleep(0.01)
    return engine.streams[0].cancelled


def test_leaving_before_the_first_token_cancels_a_whole_reply(address: tuple[str, int], engine: FakeEngine) -> None:
    engine.go_on.clear()
    connection = send(address)
    cancelled = wait_for_stream(engine)
    assert not cancelled.is_set()
    connection.close()
    assert cancelled.wait(10)


def test_leaving_before_the_first_token_cancels_a_stream(address: tuple[str, int], engine: FakeEngine) -> None:
    engine.go_on.clear()
    connection = send(address, stream=True)
    cancelled = wait_for_stream(engine)
    assert b"text/event-stream" in connection.recv(4096)
    assert not cancelled.is_set()
    connection.close()
    assert cancelled.wait(10)


def test_leaving_in_the_middle_of_a_stream_cancels_it(address: tuple[str, int], engine: FakeEngine) -> None:
    engine.num_free_words = 1
    engine.go_on.clear()
    connection = send(address, stream=True)
    cancelled = wait_for_stream(engine)
    received = b""
    while b"Hello" not in received:
        received += connection.recv(4096)
    assert not cancelled.is_set()
    connection.close()
    assert cancelled.wait(10)


def test_a_client_that_stays_gets_everything_and_can_ask_again(address: tuple[str, int], engine: FakeEngine) -> None:
    for number in range(3):
        with send(address, stream=True) as connection:
            received = b""
            while b"[DONE]" not in received:
                received += connection.recv(4096)
        assert len(engine.streams) == number + 1
