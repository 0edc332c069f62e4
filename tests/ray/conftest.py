"""A small Ray cluster on this machine, and applications on it one after the other."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from radixlm.runtime.extras.ray.ray_app import build_app
from ray import serve

from ..serve_process import free_port

REPOSITORY = Path(__file__).resolve().parent.parent.parent
WAIT_S = 60.0  # only a hang takes that long


@dataclass
class Client:
    """HTTP to the application; every answer must come within `WAIT_S`."""

    port: int
    key: str | None = None

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> http.client.HTTPResponse:
        """Send a request; its answer, of which only the head was read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        connection.request(method, path, None if body is None else json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        answer.connection = connection  # type: ignore[attr-defined]  # it would be closed when it is collected
        return answer

    def json(self, method: str, path: str, body: object = None, **headers: str) -> Any:
        """The answer's body."""
        with self.ask(method, path, body, **headers) as answer:
            return json.loads(answer.read())

    def chat(self, text: str, **options: Any) -> http.client.HTTPResponse:
        """A conversation of one message."""
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0.0, "ignore_eos": True, **options}
        return self.ask("POST", "/v1/chat/completions", body)


def place_of(answer: http.client.HTTPResponse) -> str:
    """The replica that answers."""
    assert answer.status == 200, answer.read()
    return answer.headers["x-radixlm-replica"]


def events(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """The data of server-sent events, until the stream ends."""
    with contextlib.suppress(http.client.IncompleteRead):
        for line in answer:
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ").strip()


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Look every tenth of a second."""
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"not {what} after {WAIT_S:g} s"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port = free_port()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield port
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="session")
def run_app(port: int) -> Iterator[Callable[..., Client]]:
    """Starts an application in the place of the one before; its arguments are those of `build_app`."""

    def run(*arguments: Any, **options: Any) -> Client:
        serve.run(build_app(*arguments, **options), name="radixlm")
        return Client(port)

    yield run
    serve.delete("radixlm")
