"""Connections of clients that are slow, send too much or no HTTP; over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import uvicorn
from radixlm.runtime.server import create_app
from radixlm.runtime.server.errors import ErrorBody, HTTPError
from radixlm.runtime.server.http import http_protocol
from radixlm.runtime.server.http.client_bounds import (
    MIN_TAKEN_BYTES,
    GuardedWriter,
    StepReader,
    connection_to_close,
)
from radixlm.runtime.server.http.exchange import Exchange
from radixlm.runtime.server.http.http_protocol import MAX_HEADER_BYTES, STEP_BYTES, HTTPProtocol
from radixlm.runtime.server.http.listener import listen, max_connections
from radixlm.runtime.server.http.request_body import BodyRoom, read_body
from radixlm.runtime.server.http.sse import EventStream
from starlette.requests import Request
from uvicorn.protocols.http.flow_control import FlowControl

from .real_server import wait_until

if TYPE_CHECKING:
    from .conftest import FakeEngine


class Hasty(HTTPProtocol):
    """Waits a fifth of a second for a client to read that its body is not wanted."""

    linger_s = 0.2
    write_s = 0.2


@pytest.fixture
def short_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of a second for headers."""
    monkeypatch.setattr(Hasty, "headers_s", 0.2)


@pytest.fixture
def address(engine: FakeEngine) -> Iterator[tuple[str, int]]:
    """A real server over the fake engine."""
    with serving(engine) as server:
        yield server.servers[0].sockets[0].getsockname()


@contextlib.contextmanager
def serving(engine: FakeEngine) -> Iterator[uvicorn.Server]:
    """The server itself, which has started."""
    listener = listen("127.0.0.1", 0)
    app = create_app(engine)  # type: ignore[arg-type]
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", http=Hasty))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    yield server
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
    return ask(connection, b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")


def ask(connection: socket.socket, request: bytes) -> bytes:
    """An answer in JSON, on a connection that stays open."""
    connection.sendall(request)
    received = b""
    while not received.endswith(b"}"):
        received += connection.recv(4096)
    return received


@pytest.mark.usefixtures("short_headers")
@pytest.mark.parametrize("begun", [b"", b"GET /version HT", b"GET /version HTTP/1.1\r\nhost: x\r\nx-slow: "])
def test_headers_that_do_not_come_close_the_connection(address: tuple[str, int], begun: bytes) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(begun)
        assert rest_of(connection) == b""


@pytest.mark.usefixtures("short_headers")
def test_headers_that_drip_close_the_connection(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection, pytest.raises(OSError):
        connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n")
        for _ in range(200):
            connection.sendall(b"x-slow: 1\r\n")
            time.sleep(0.05)


@pytest.mark.usefixtures("short_headers")
def test_the_deadline_is_each_requests_own(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection:
        for _ in range(3):
            assert b"200 OK" in get(connection)
        connection.sendall(b"GET /ver")
        assert rest_of(connection) == b""


@pytest.mark.usefixtures("short_headers")
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
        b"\r\n" * MAX_HEADER_BYTES,
        b"GET / HTTP/1.1\r\nhost: x\r\nhost: y",
        b"GET / HTTP/2.0\r\nhost: x",
        b"PRI * HTTP/2.0\r\n\r\nSM",
        b"CONNECT x:80 HTTP/1.1\r\nhost: x",
        b"GET / HTTP/1.1\nhost: x\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked, identity\r\n\r\n0",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding : chunked\r\n\r\n0",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: +3\r\n\r\nabc",
        b"GET / HTTP/1.1\r\nhost: x\r\na: b\x00c",
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


@pytest.mark.parametrize("framing", [b"content-length: 1000000", b"transfer-encoding: chunked"])
@pytest.mark.parametrize(
    ("line", "status"), [(b"POST /nothing", b"404"), (b"GET /health", b"200"), (b"PUT /v1/completions", b"405")]
)
def test_a_body_that_drips_after_its_answer_does_not_hold_the_connection(
    address: tuple[str, int], line: bytes, status: bytes, framing: bytes
) -> None:
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(line + b" HTTP/1.1\r\nhost: x\r\n" + framing + b"\r\n\r\n")
        head = connection.recv(65536).lower()
        assert head.startswith(b"http/1.1 " + status)
        assert b"connection: close" in head, "a client must not send its next request here"
        with pytest.raises(OSError):
            for _ in range(200):
                connection.sendall(b"1\r\nx\r\n")
                time.sleep(0.05)


def test_what_is_sent_after_an_answer_is_not_read_as_http(address: tuple[str, int]) -> None:
    """A million chunks of one byte took seconds of the event loop; broken ones show that no code looks at them."""
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(b"POST /nothing HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        answered = connection.recv(65536)
        connection.sendall(b"this is no chunk\r\n\r\n")
        assert b" 400 " not in answered + rest_of(connection)


def test_an_answer_that_came_before_a_long_body_is_not_lost(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is closed with bytes unread is reset, and takes answers with it."""
    monkeypatch.setattr(Hasty, "linger_s", 20.0)  # a starved machine takes so long to send it all
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n")
        for _ in range(64):
            connection.sendall(b"x" * 65536)
        received = b""
        while data := connection.recv(65536):  # a reset would raise here
            received += data
    assert received.startswith(b"HTTP/1.1 413")


def test_a_request_whose_body_came_along_and_that_is_refused_leaves_the_connection_open(
    address: tuple[str, int],
) -> None:
    with socket.create_connection(address, timeout=10) as connection:
        assert b"404" in ask(connection, b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
        assert b"200 OK" in get(connection)


def test_requests_that_come_in_one_piece_are_answered_one_after_the_other(address: tuple[str, int]) -> None:
    one = b"GET /version HTTP/1.1\r\nhost: x\r\nx-long: " + b"x" * 3000
    with socket.create_connection(address) as connection:
        connection.sendall((one + b"\r\n\r\n") * 20 + one + b"\r\nconnection: close\r\n\r\n")
        assert rest_of(connection).count(b"HTTP/1.1 200") == 21


def chunked(body: bytes, size: int) -> bytes:
    """A body in chunks of `size` bytes."""
    parts = (body[at : at + size] for at in range(0, len(body), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 5000, 1 << 20])
def test_a_body_in_chunks_is_read_whole(address: tuple[str, int], engine: FakeEngine, size: int) -> None:
    prompt = "word " * (20 if size == 1 else 40_000)
    body = json.dumps({"prompt": prompt}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    with socket.create_connection(address) as connection:
        connection.sendall(head + chunked(body, size))
        assert rest_of(connection).startswith(b"HTTP/1.1 200")
    assert engine.asked[0][0] == prompt


def test_a_body_that_is_mostly_the_borders_of_its_chunks_is_400(
    address: tuple[str, int], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hasty, "linger_s", 20.0)  # a starved machine takes so long to send it all
    body = json.dumps({"prompt": "x" * 100_000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    sent = head + chunked(body, 1)
    with socket.create_connection(address) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(sent)
        answered = rest_of(connection)
    assert answered.startswith(b"HTTP/1.1 400")
    assert b"chunks" in answered
    assert engine.asked == []


def test_others_are_served_while_small_chunks_are_read(address: tuple[str, int]) -> None:
    """A connection's bytes are read a few at a time, and others have their turn between them."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    turns: list[int] = []

    class Fed(StepReader):
        def take_turn(self) -> None:
            turns.append(self.num_waiting_bytes)
            super().take_turn()

    with pytest.MonkeyPatch.context() as patch, socket.create_connection(address) as connection:
        patch.setattr(http_protocol, "StepReader", Fed)
        with socket.create_connection(address) as other:
            other.sendall(head + chunked(b" " * 40_000, 10)[:-5])
            wait_until(lambda: len(turns) > 10)
            assert b"200 OK" in get(connection)


BODY = b'{"prompt": "Hi"}'
FRAMED = {
    b"content-length: %d" % len(BODY): BODY,
    b"transfer-encoding: chunked": b"%x\r\n%b\r\n0\r\ncontent-encoding: gzip\r\n\r\n" % (len(BODY), BODY),
}


@pytest.mark.parametrize("framing", FRAMED)
def test_a_request_that_wishes_for_another_protocol_is_answered_in_this_one(
    address: tuple[str, int], engine: FakeEngine, framing: bytes
) -> None:
    """Java's client and `curl --http2` ask for HTTP/2 in passing. llhttp reads no body then."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    with socket.create_connection(address, timeout=10) as connection:
        for num_asked in (1, 2):
            assert b"200 OK" in ask(connection, head + framing + b"\r\n\r\n" + FRAMED[framing])
            assert len(engine.asked) == num_asked
        assert b"200 OK" in get(connection)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_stream_ends_as_the_clients_version_has_it(address: tuple[str, int], version: bytes) -> None:
    body = b'{"prompt": "Hi", "stream": true}'
    head = b"POST /v1/completions HTTP/%b\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    with socket.create_connection(address) as connection:
        connection.sendall(head % (version, len(body)) + body)
        received = rest_of(connection)
    assert (b"transfer-encoding: chunked" in received) == (version == b"1.1")
    assert received.endswith(b"data: [DONE]\n\n" if version == b"1.0" else b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_client_that_waits_to_be_asked_for_its_body_is_asked(address: tuple[str, int]) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(head % len(BODY))
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert ask(connection, BODY).startswith(b"HTTP/1.1 200 OK")


def test_the_head_of_an_answer_has_no_body(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(b"HEAD /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        received = rest_of(connection)
    assert received.startswith(b"HTTP/1.1 200 OK") and received.endswith(b"\r\n\r\n")


def test_what_is_no_http_behind_a_request_does_not_cost_it_its_answer(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\nthis is no request\r\n\r\n")
        assert rest_of(connection).startswith(b"HTTP/1.1 200 OK")


def address_of(server: uvicorn.Server) -> tuple[str, int]:
    name: tuple[str, int] = server.servers[0].sockets[0].getsockname()
    return name


def test_an_answer_that_nobody_reads_is_dropped_with_its_connection(engine: FakeEngine) -> None:
    """Its connection stood for 14 minutes, and its bytes with it."""
    engine.words = ["x" * 20_000_000]
    with serving(engine) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address_of(server))
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 16\r\n\r\n" + BODY)
        assert connection.recv(12) == b"HTTP/1.1 200"
        wait_until(lambda: not server.server_state.connections)


def test_a_slow_reader_gets_its_whole_answer() -> None:
    """What it takes gives it more time: deadlines are counted on a clock of the test's own."""
    loop, transport = FakeLoop(), FakeTransport()
    writer = GuardedWriter(transport, loop, write_s=60.0)  # type: ignore[arg-type]
    writer.write(b"x" * 100 * MIN_TAKEN_BYTES)
    for taken in range(99):
        loop.wait(40.0)
        transport.num_waiting -= MIN_TAKEN_BYTES
        assert not transport.is_aborted, taken
    loop.wait(80.0)
    assert transport.is_aborted and not loop.timers


@pytest.mark.parametrize("num_bytes", [1000, 10 * MIN_TAKEN_BYTES])
def test_a_reader_that_takes_a_byte_now_and_then_is_dropped(num_bytes: int) -> None:
    """Each byte gave it another minute."""
    loop, transport = FakeLoop(), FakeTransport()
    writer = GuardedWriter(transport, loop, write_s=60.0)  # type: ignore[arg-type]
    writer.write(b"x" * num_bytes)
    for _ in range(12):
        loop.wait(10.0)
        transport.num_waiting -= 1
    assert transport.is_aborted and not loop.timers


class FakeLoop:
    def __init__(self) -> None:
        self.now, self.timers = 0.0, list[tuple[float, Any]]()

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, work: Any) -> Any:
        self.timers.append((self.now + delay, work))

    def wait(self, seconds: float) -> None:
        stop = self.now + seconds
        while self.timers and self.timers[0][0] <= stop:
            self.now, work = self.timers.pop(0)
            work()
        self.now = stop


class FakeTransport:
    num_waiting, is_aborted = 0, False

    def write(self, data: bytes) -> None:
        self.num_waiting += len(data)

    def get_write_buffer_size(self) -> int:
        return self.num_waiting

    def abort(self) -> None:
        self.is_aborted = True


def test_of_too_many_connections_the_longest_idle_one_is_closed(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than there are descriptors stopped the server, and filled its log."""
    monkeypatch.setattr(Hasty, "max_connections", lambda: 3)
    monkeypatch.setattr(Hasty, "headers_s", 60.0)
    with serving(engine) as server, contextlib.ExitStack() as opened:
        most = 0
        connections = [opened.enter_context(socket.create_connection(address_of(server), 10)) for _ in range(20)]
        for connection in connections[-2:]:
            assert b"200 OK" in get(connection)
            most = max(most, len(server.server_state.connections))
        assert most <= 3
        assert [rest_of(connection) for connection in connections[:17]] == [b""] * 17
        with socket.create_connection(address_of(server), 10) as another:
            assert b"200 OK" in get(another)


def test_of_too_many_unfinished_bodies_the_oldest_loses_its_connection(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client with as many of them as there may be connections kept all others out for a minute."""
    monkeypatch.setattr(Hasty, "max_connections", lambda: 3)
    engine.go_on.clear()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 16\r\n\r\n"
    with serving(engine) as server, contextlib.ExitStack() as opened:
        at_work, *slow = (opened.enter_context(socket.create_connection(address_of(server), 10)) for _ in range(3))
        at_work.sendall(head + BODY)
        wait_until(lambda: bool(engine.streams))
        for connection in slow:
            connection.sendall(head + BODY[:-1])
        wait_until(lambda: sum(each.has_request for each in server.server_state.connections) == 3)  # type: ignore[union-attr]
        with socket.create_connection(address_of(server), 10) as another:
            assert b"200 OK" in get(another)
        assert rest_of(slow[0]) == b""
        engine.go_on.set()
        for connection, rest in ((at_work, b""), (slow[1], BODY[-1:])):
            assert b"200 OK" in ask(connection, rest)


@dataclass(frozen=True)
class Waiting:
    host: str | None
    idle_since: float
    has_request: bool = False


@pytest.mark.parametrize(
    ("waiting", "closed"),
    [
        ([], None),
        ([Waiting("a", 1), Waiting("b", 2)], 0),
        ([Waiting("a", 1), Waiting("b", 2), Waiting("b", 3)], 1),  # who has most of them
        ([Waiting("a", 1), Waiting("b", 2, True), Waiting("b", 3, True)], 1),
        ([Waiting("b", 2, True), Waiting("b", 3)], 1),  # no client waits for an answer there
        ([Waiting("b", 2, True), Waiting("b", 9.5)], 0),  # which is about to be used
        ([Waiting("b", 9.6), Waiting("b", 9.5)], 1),
        ([Waiting("a", 1), Waiting("new", 2)], 1),  # the newest one counts
        ([Waiting(None, 1), Waiting(None, 2)], 0),
    ],
)
def test_the_address_with_most_connections_makes_room(waiting: list[Waiting], closed: int | None) -> None:
    newest = Waiting("new", 10.0)
    found = connection_to_close(waiting, newest, now=10.0)
    assert found is (newest if closed is None else waiting[closed])


def test_requests_that_wait_behind_another_are_few(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a client that went on sending took 130 MB a second."""
    request, num_requests, waiting = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n", 2000, list[int]()

    class Counting(Hasty):
        def on_message_complete(self) -> None:
            super().on_message_complete()
            waiting.append(len(self._exchanges))

    monkeypatch.setattr(sys.modules[__name__], "Hasty", Counting)
    with serving(engine) as server, socket.create_connection(address_of(server), 10) as connection:
        sending = threading.Thread(target=connection.sendall, args=(request * num_requests,))
        sending.start()
        received = b""
        while received.count(b"200 OK") < num_requests:
            received += connection.recv(1 << 20)
        sending.join()
    assert len(waiting) == num_requests and max(waiting) <= 2 * STEP_BYTES // len(request)


def test_there_are_fewer_connections_than_descriptors() -> None:
    resource = pytest.importorskip("resource")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < max_connections() < soft


@pytest.mark.parametrize("target", [b"http://x/version", b"HTTP://user@x/version", b"http://x:80/version?a=b"])
def test_a_target_in_absolute_form_is_served(address: tuple[str, int], target: bytes) -> None:
    with socket.create_connection(address) as connection:
        assert b"200 OK" in ask(connection, b"GET " + target + b" HTTP/1.1\r\nhost: proxy\r\n\r\n")


@pytest.mark.parametrize("head", [b"GET /version HTTP/1.0\r\n\r\n", b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"])
def test_a_client_that_ends_its_side_gets_its_answer(address: tuple[str, int], head: bytes) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(head)
        connection.shutdown(socket.SHUT_WR)
        assert b"200 OK" in rest_of(connection)


def test_a_reply_for_a_client_that_ended_its_side_is_not_waited_for(engine: FakeEngine) -> None:
    engine.go_on.clear()
    with serving(engine) as server, socket.create_connection(address_of(server)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 16\r\n\r\n" + BODY)
        connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: bool(engine.streams) and engine.streams[0].cancelled.is_set())


def body_message(num_bytes: int) -> dict[str, object]:
    return {"type": "http.request", "body": b" " * num_bytes, "more_body": True}


def test_the_client_with_most_bytes_of_bodies_makes_room_for_the_others() -> None:
    """Fifty connections that sent 15 MB each and stopped took 760 MB."""

    async def read(room: BodyRoom, client: str, sizes: list[int]) -> str:
        waits = asyncio.Event()

        async def receive() -> Any:
            if sizes:
                return body_message(sizes.pop(0))
            await waits.wait()

        with room.reading(client) as reading:
            try:
                scope = {"type": "http", "headers": []}
                await read_body(Request(scope, receive), max_bytes=100, deadline_s=30.0, room=reading)
            except HTTPError as error:
                assert room.num_bytes <= 100
                return f"{client} {error.status}"
        raise AssertionError

    async def run() -> list[str]:
        room, ended = BodyRoom(100), list[str]()
        tasks = [asyncio.create_task(read(room, "greedy", [30, 10])) for _ in range(2)]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(read(room, "modest", [20, 15])))
        for task in asyncio.as_completed(tasks):
            ended.append(await task)
            break
        assert room.num_bytes == 75 and sum(task.done() for task in tasks) == 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert room.num_bytes == 0
        return ended

    assert asyncio.run(run()) == ["greedy 503"]


@pytest.mark.parametrize("pauses_first", [False, True])
def test_no_comment_follows_the_end_of_an_answer_that_was_not_read_for_long(pauses_first: bool) -> None:
    """`: keep-alive` after the last chunk broke the next answer of the connection. Where the one before was not read
    either, the head waited behind the first comment, and the answer failed."""

    async def run() -> bytes:
        transport = FakeTransport()
        transport.pause_reading = transport.resume_reading = lambda: None  # type: ignore[attr-defined]
        written: list[bytes] = []
        transport.write = written.append  # type: ignore[method-assign]
        flow = FlowControl(transport)  # type: ignore[arg-type]
        exchange = Exchange(
            {"http_version": "1.1", "method": "POST", "path": "/"},
            transport,
            flow,
            keep_alive=True,
            awaits_continue=False,
            read_on=flow.resume_reading,
            begins=lambda exchange: [],
            ends=lambda exchange: None,
        )

        async def values() -> AsyncGenerator[msgspec.Struct]:
            if pauses_first:
                flow.pause_writing()
                await asyncio.sleep(0.1)  # a comment is due
                flow.resume_writing()
                yield ErrorBody("one", "two")
                return
            yield ErrorBody("one", "two")
            await asyncio.sleep(0)
            flow.pause_writing()
            asyncio.get_running_loop().call_later(0.3, flow.resume_writing)
            while flow.write_paused:
                await asyncio.sleep(0.01)

        stream = EventStream(values(), Left(), keep_alive_s=0.02)
        await stream({"type": "http", "path": "/", "state": {}}, asyncio.Event().wait, exchange.send)  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        return b"".join(written)

    sent = asyncio.run(run())
    assert sent.startswith(b"HTTP/1.1 200") and sent.count(b"HTTP/1.1") == 1
    assert sent.endswith(b"0\r\n\r\n") and sent.count(b": keep-alive") <= 2


class Left(contextlib.AbstractAsyncContextManager[object]):
    before_waiting: Any = None

    async def __aexit__(self, *_: object) -> None:
        pass
