"""Servers are measured over connections that stay open, with the same calls whatever engine they have."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bench.prompts import Prompts
from bench.served import Client, ServedProcess, parse_events
from bench.worker import ROOT, Worker, WorkerError

LLAMA_SERVER = ROOT / ".cache" / "llama.cpp" / "llama-server"
RADIXLM = str(Path(sys.executable).with_name("radixlm"))
VOCABULARY = 300


class Answer(BaseHTTPRequestHandler):
    """Says which connection asked; closes it where the path says so, without a word in the header."""

    protocol_version = "HTTP/1.1"
    connections: list[object]

    def do_GET(self) -> None:
        self.connections += [] if self.connection in self.connections else [self.connection]
        body = json.dumps({"connection": self.connections.index(self.connection)}).encode()
        self.send_response(500 if self.path == "/broken" else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = self.path == "/close"

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def client() -> Iterator[Client]:
    answer = type("OneServersAnswer", (Answer,), {"connections": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), answer) as server:
        threading.Thread(target=server.serve_forever).start()
        client = Client(server.server_port)
        yield client
        client.close()
        server.shutdown()


@pytest.fixture(scope="module")
def radixlm(tiny_artifact: Path) -> Iterator[Worker]:
    with Worker("bench.peers.http_worker", "radixlm", RADIXLM, "serve", tiny_artifact) as worker:
        yield worker


def test_a_client_keeps_its_connection_open(client: Client) -> None:
    assert [client.json("GET", "/")["connection"] for _ in range(3)] == [0, 0, 0]


def test_a_client_whose_server_closed_the_connection_opens_another(client: Client) -> None:
    assert client.json("GET", "/close")["connection"] == 0
    assert client._connection.sock.recv(1) == b""  # the end has come
    assert client.json("GET", "/")["connection"] == 1


def test_an_answer_that_is_no_success_is_an_error(client: Client) -> None:
    with pytest.raises(RuntimeError, match="GET /broken was answered 500"):
        client.json("GET", "/broken")


def test_an_event_has_the_time_at_which_its_last_byte_came() -> None:
    parts = [
        (1.0, b'data: {"n": 1}\n\n: hi\n\ndata: {"n"'),
        (2.0, b': 2}\n\ndata: {"n": 3}\n\n'),
        (3.0, b"data: [DONE]\n\n"),
    ]
    assert [(event.at, event.data["n"]) for event in parse_events(parts)] == [(1.0, 1), (2.0, 2), (2.0, 3)]


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(RuntimeError, match="no such model"):
        ServedProcess([sys.executable, "-c", "raise SystemExit('no such model')"])


def test_radixlm_is_measured_over_http(radixlm: Worker) -> None:
    prompts = Prompts(0, VOCABULARY)
    assert radixlm.call("streams", prompts=prompts.batch(5, 6), num_tokens=200) > 0
    assert radixlm.call("streams", prompts=prompts.batch(1, 6), num_tokens=20) > 0
    assert radixlm.call("resume", prefix=prompts.ids(64), suffix=prompts.ids(9)) > 0


def test_a_stream_that_is_refused_is_an_error(radixlm: Worker) -> None:
    with pytest.raises(WorkerError, match="answered 400"):
        radixlm.call("streams", prompts=[[5, 6, 7], [VOCABULARY * 1000]], num_tokens=8)


def test_llama_cpp_is_measured_by_the_same_calls(smollm2_gguf: Path) -> None:
    if not LLAMA_SERVER.is_file():
        pytest.skip("llama.cpp is built by `make bench-peers`")
    prompts = Prompts(0)
    options = ("--parallel", 2, "--ctx-size", 256, "--threads", 2, "--flash-attn", "on", "--cache-ram", 0)
    with Worker("bench.peers.http_worker", "llama.cpp", LLAMA_SERVER, "--model", smollm2_gguf, *options) as worker:
        assert worker.call("prefill", prompt=prompts.ids(8)) > 0
        assert worker.call("decode", prompt=prompts.ids(4), num_tokens=4) > 0
        assert worker.call("streams", prompts=prompts.batch(2, 4), num_tokens=8) > 0
        assert worker.call("resume", prefix=prompts.ids(32), suffix=prompts.ids(5)) > 0
