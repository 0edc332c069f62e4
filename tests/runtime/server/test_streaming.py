"""Streams that are silent, that fail, and that no client reads; with the real engine's page counts."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest
from radixlm.runtime.errors import StepFailed
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.server import create_app
from radixlm.runtime.server.http.sse import COMMENT
from starlette.testclient import TestClient

from .real_server import CHAT, WAIT_S, RealServer, real_server, wait_until

if TYPE_CHECKING:
    from .conftest import FakeEngine


@pytest.fixture
def server() -> Iterator[RealServer]:
    with real_server(app={"keep_alive_s": 0.05}, context_length=1024, num_pages=200) as server:
        yield server


def test_a_silent_stream_is_kept_open_by_comments_which_clients_pass_over(server: RealServer) -> None:
    go_on = threading.Event()

    def hang(batch: Batch) -> None:
        assert go_on.wait(WAIT_S)

    server.model.before = hang
    received = b""
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=CHAT | {"stream": True, "max_tokens": 4}) as r:
        for part in r.iter_raw():
            received += part
            if received.count(COMMENT) >= 3:
                go_on.set()
    assert received.startswith(3 * COMMENT)  # nothing that a bench would take for the first token
    events = received.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") or event == COMMENT.decode().strip() for event in events[:-1])
    server.check()


def test_a_busy_stream_needs_no_comments() -> None:
    with real_server(app={"keep_alive_s": 1.0}) as server:
        server.model.step_s = 0.03
        text = server.chat(stream=True, max_tokens=50).text  # 1.5 s, of which no second is silent
        assert "data: " in text and COMMENT.decode() not in text


def test_an_error_in_the_middle_is_the_last_event(engine: FakeEngine) -> None:
    engine.words = ["Hello", StepFailed("the step failed; try again")]
    client = TestClient(create_app(engine))  # type: ignore[arg-type]
    events = client.post("/v1/chat/completions", json=CHAT | {"stream": True}).text.strip().split("\n\n")
    assert "Hello" in events[-2] and '"error"' in events[-1] and "the step failed" in events[-1]


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}, {"n": 3, "stream": True}])
def test_who_leaves_gives_back_the_pages_at_once(
    server: RealServer, fields: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "radixlm.requests")
    server.model.step_s = 0.01
    connection = server.send(max_tokens=900, **fields)
    wait_until(lambda: server.engine.stats().num_used_pages > 4)
    connection.close()
    at_leaving = server.engine.stats().num_generated_tokens
    wait_until(lambda: server.engine.stats().num_finished == fields.get("n", 1))
    stats = server.engine.stats()
    assert stats.num_used_pages == stats.num_running == stats.num_waiting == 0
    assert stats.num_generated_tokens - at_leaving < 300 * int(str(fields.get("n", 1))), "it was computed to the end"
    assert stats.finished_by_reason == {"cancelled": fields.get("n", 1)}
    wait_until(lambda: any(record.name == "radixlm.requests" for record in caplog.records))
    said = caplog.records[-1].fields  # type: ignore[attr-defined]
    assert (said["error"], said["finish_reason"]) == ("client_gone", "cancelled")
    assert said["generated_tokens"] == stats.num_generated_tokens
    server.check()


def test_a_client_that_reads_one_byte_a_second_holds_up_no_other(server: RealServer) -> None:
    """Not even itself, in the engine: its reply is computed at full speed and waits for it."""
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    slow.connect(server.address)
    content = httpx.Request("POST", "http://x", json=CHAT | {"stream": True, "max_tokens": 900, "seed": 7}).read()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    slow.sendall(head.encode() + content)
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(1.0):
            slow.recv(1)

    reader = threading.Thread(target=trickle, daemon=True)
    reader.start()
    others = [server.chat(max_tokens=30, seed=seed) for seed in range(5)]
    assert [other.status_code for other in others] == [200] * 5
    assert [other.json()["usage"]["completion_tokens"] for other in others] == [30] * 5
    wait_until(lambda: server.engine.stats().num_finished == 6)
    assert server.engine.stats().num_used_pages == 0
    assert server.get("/health").json()["status"] == "ready"
    stop.set()
    reader.join(WAIT_S)
    slow.settimeout(WAIT_S)
    rest = b""
    while b"[DONE]" not in rest[-100:]:
        rest += slow.recv(1 << 16)
    slow.close()
    server.check()
