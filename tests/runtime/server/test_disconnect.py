"""A client that goes away stops its request; over real sockets, for no test client closes like one."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from radixlm.runtime.server import create_app
from radixlm.runtime.server.http.connection import while_connected
from radixlm.runtime.server.http.http_protocol import HTTPProtocol
from radixlm.runtime.server.http.listener import listen
from radixlm.runtime.server.work_queues import WorkQueues

from .conftest import FakeEngine
from .real_server import wait_until


@contextmanager
def serve(engine: FakeEngine) -> Iterator[tuple[str, int]]:
    """A real server over a fake engine, while the block runs."""
    listener = listen("127.0.0.1", 0)
    app = create_app(engine)  # type: ignore[arg-type]
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", http=HTTPProtocol))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


@pytest.fixture
def address(engine: FakeEngine) -> Iterator[tuple[str, int]]:
    with serve(engine) as address:
        yield address


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


class StandingEngine(FakeEngine):
    """Stands still over every prompt until `let_go`; begins a reply to each that it was given then."""

    def __init__(self) -> None:
        super().__init__()
        self.max_num_requests = self.room = 1
        self.begun = 0
        self.let_go = threading.Event()

    def stream(self, *arguments: Any, **options: Any) -> Any:
        self.begun += 1
        assert self.let_go.wait(60)
        return super().stream(*arguments, **options)


LONG = [{"role": "user", "content": "once there was " * 10_000}]


def test_leaving_the_queue_for_a_thread_makes_room_for_another_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, queues, of = StandingEngine(), list[WorkQueues](), WorkQueues.of
    monkeypatch.setattr(WorkQueues, "of", lambda engine: queues.append(of(engine)) or queues[-1])
    with serve(engine) as address:
        working = [send(address, messages=LONG) for _ in range(2)]
        wait_until(lambda: engine.begun == 2)
        waiting = send(address, messages=LONG)
        wait_until(lambda: queues[0].submission.num_waiting == 1)
        with send(address, messages=LONG) as connection:
            assert b" 429 " in connection.recv(4096)  # one waits, and there is room for one
        waiting.close()
        wait_until(lambda: queues[0].submission.num_waiting == 0)
        waiting = send(address, messages=LONG)
        wait_until(lambda: queues[0].submission.num_waiting == 1)
        engine.let_go.set()
        for connection in [*working, waiting]:
            connection.settimeout(10)
            assert b" 200 " in connection.recv(4096)
    assert len(engine.streams) == 3  # and never the one whose client left


def test_leaving_while_a_thread_hands_the_request_over_cancels_it() -> None:
    engine = StandingEngine()
    engine.go_on.clear()
    with serve(engine) as address:
        connection = send(address, messages=LONG)
        wait_until(lambda: engine.begun == 1)
        connection.close()
        time.sleep(0.1)
        engine.let_go.set()
        assert wait_for_stream(engine).wait(10)


def test_leaving_while_a_grammar_is_compiled_gives_up_its_place() -> None:
    engine = FakeEngine()
    waits, has_left = threading.Event(), threading.Event()

    class Grammars:
        async def compile_on_loop(self, grammar: object, *, client: str) -> object:
            waits.set()
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                has_left.set()
                raise
            raise AssertionError("the client was not heard")

    engine.grammars = Grammars()  # type: ignore[attr-defined]
    with serve(engine) as address:
        connection = send(address, guided_regex="a+")
        assert waits.wait(10)
        connection.close()
        assert has_left.wait(5)
    assert engine.streams == []


def test_a_client_that_goes_as_the_work_ends_cancels_nothing_that_comes_after_it() -> None:
    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def work() -> str:
        await asyncio.sleep(0)  # until the departure is known, and before anything is done about it
        return "done"

    async def serve() -> str:
        result = await while_connected(receive, work())  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        return result

    assert asyncio.run(serve()) == "done"
