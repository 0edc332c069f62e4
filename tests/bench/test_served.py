"""Servers are measured over connections that stay open, with the same calls whatever engine they have."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench.served import Client, ServedProcess, parse_events


class Answer(BaseHTTPRequestHandler):
    """Says which connection asked; closes it where the path says so, without a word in the header."""

    protocol_version = "HTTP/1.1"
    connections: list[object]

    def do_GET(self) -> None:
        self.connections += [] if self.connection in self.connections else [self.connection]
        body = json.dumps({"connection": self.connections.index(self.connection)}).encode()
        body = b"" if self.path == "/empty" else body
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


def test_a_client_keeps_its_connection_open(client: Client) -> None:
    assert [client.json("GET", "/")["connection"] for _ in range(3)] == [0, 0, 0]


def test_a_client_whose_server_closed_the_connection_opens_another(client: Client) -> None:
    assert client.json("GET", "/close")["connection"] == 0
    assert client._connection.sock.recv(1) == b""  # the end has come
    assert client.json("GET", "/")["connection"] == 1


def test_a_connection_that_ends_while_a_request_is_on_its_way_is_opened_again(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp ends it after a stream; that may come a moment after the next request was sent."""
    monkeypatch.setattr("bench.served.select.select", lambda *arguments: ([], [], []))
    assert [client.json("GET", path)["connection"] for path in ("/close", "/", "/")] == [0, 1, 1]


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


def test_an_empty_answer_is_one(client: Client) -> None:
    assert client.json("GET", "/empty") == {}


def test_a_server_without_health_is_not_waited_for_for_ever() -> None:
    program = (
        "import http.server as h, sys, time; time.sleep(0.3); "
        "h.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[-1])), h.SimpleHTTPRequestHandler).serve_forever()"
    )
    with pytest.raises(RuntimeError, match="did not start"):
        ServedProcess([sys.executable, "-c", program], starts_within_s=1.0)  # it has no /health
