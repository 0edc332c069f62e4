"""A request that fails while its cost is measured ends the measurement: no median is of those that are left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench.engine.request_cost import time_one_connection, together


class OneFails(BaseHTTPRequestHandler):
    """Answers well but once, and that late."""

    protocol_version = "HTTP/1.1"
    status, content = 429, b'{"error": {"message": "busy"}}'
    num_asked: list[int]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.num_asked.append(1)
        fails = len(self.num_asked) == 5
        content = self.content if fails else b'{"choices": []}'
        self.send_response(self.status if fails else 200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def fails() -> type[OneFails]:
    return type("OneFailsOnce", (OneFails,), {"num_asked": []})


@pytest.fixture
def port(fails: type[OneFails]) -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), fails) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server.server_port
        server.shutdown()


def test_a_request_of_one_client_of_many_that_fails_is_an_error(port: int) -> None:
    with pytest.raises(RuntimeError, match="429"):
        together(port, "POST", "/v1/completions", "{}", 2)


def test_a_stream_that_ends_in_an_error_is_one_though_it_began_well(port: int, fails: type[OneFails]) -> None:
    fails.status, fails.content = 200, b'data: {"choices": []}\n\ndata: {"error": {"message": "it broke"}}\n\n'
    with pytest.raises(RuntimeError, match="it broke"):
        time_one_connection(port, "POST", "/v1/completions", "{}", 9)
