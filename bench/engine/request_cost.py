"""Measure what a request costs beyond the engine's own time: `radixlm serve` compared with `Engine`.

    python -m bench.engine.request_cost ARTIFACT [--openai PYTHON]

Connections stay open. One greedy token, for a prompt that is cached except for its last token. In every round each way
takes its turn, alone and eight at once; a figure is the median of all requests of all rounds. The engine's own time is
that of a caller of `Engine.generate` in another process. `models` requests only the list of models, which is the cost
of the client, the connection and the web framework. `--openai` names a Python that has the `openai` package: after
`make test-clients` that is `.venv-clients/bin/python`.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from ..connection import Call, Connection
from ..options import read_options
from ..processes import RADIXLM
from ..report.page import publish
from ..served import ServedProcess
from ..timing import in_turns, seconds_of
from ..worker import Worker
from .one_token import MAX_TOKENS, PROMPT

NUM_TOGETHER = 8
_ERROR = b'{"error"'  # the beginning of an error, also within a stream
_HEADERS = {"content-type": "application/json"}
_WHOLE = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}


def main() -> None:
    """Time one-token requests by each way to send them, print medians, write `results/request_cost.json`."""
    options = read_options(__doc__, "artifact", rounds=5, requests=10, openai=Path)  # requests: per way and round
    with ExitStack() as stack:
        server = stack.enter_context(ServedProcess([RADIXLM, "serve", str(options.artifact)]))
        engine = stack.enter_context(Worker("bench.engine.one_token", "engine", options.artifact))
        asked = request_timers(server.port, engine, options.requests)
        if options.openai:
            client = Worker("bench.engine.one_token", "openai", server.port, python=str(options.openai))
            stack.enter_context(client)
            asked["openai"] = lambda: client.call("one", count=options.requests)
        seconds = in_turns(asked, options.rounds)
    medians = {name: statistics.median(each) * 1e3 for name, each in seconds.items()}
    publish("request_cost", {"requests": options.rounds * options.requests, "median_ms": medians})


def request_timers(port: int, engine: Worker, count: int) -> dict[str, Callable[[], list[float]]]:
    """Return functions that time `count` requests, by the name of the way to send them.

    They go to the engine or over HTTP, from one client, or from each of `NUM_TOGETHER` at once.
    """
    asked: dict[str, Callable[[], list[float]]] = {
        "engine": lambda: engine.call("one", count=count),
        "models": lambda: time_one_connection(port, "GET", "/v1/models", None, count),
        "models, new connection": lambda: time_new_connections(port, "GET", "/v1/models", None, count),
    }
    for name, stream in (("whole", False), ("stream", True)):
        body = json.dumps(_WHOLE | {"stream": stream})
        asked[name] = lambda body=body: time_one_connection(port, "POST", "/v1/completions", body, count)  # type: ignore[misc]
        asked[f"{name}, new connection"] = lambda body=body: time_new_connections(  # type: ignore[misc]
            port, "POST", "/v1/completions", body, count
        )
    asked["models, 8 at once"] = lambda: together(port, "GET", "/v1/models", "", count)
    asked["engine, 8 at once"] = lambda: engine.call("together", clients=NUM_TOGETHER, count=count)
    for name, stream in (("whole, 8 at once", False), ("stream, 8 at once", True)):
        body = json.dumps(_WHOLE | {"stream": stream})
        asked[name] = lambda body=body: together(port, "POST", "/v1/completions", body, count)  # type: ignore[misc]
    return asked


def time_one_connection(port: int, method: str, path: str, body: str | None, count: int) -> list[float]:
    """Return the seconds of each of `count` requests on one connection, as SDKs send them."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    seconds = [seconds_of(lambda: _request(connection, method, path, body)) for _ in range(count + 1)]
    connection.close()
    return seconds[1:]  # the first opened the connection


def time_new_connections(port: int, method: str, path: str, body: str | None, count: int) -> list[float]:
    """Return the seconds of each of `count` requests with a new connection each."""

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        _request(connection, method, path, body)
        connection.close()

    return [seconds_of(ask) for _ in range(count)]


def together(port: int, method: str, path: str, body: str, count: int) -> list[float]:
    """Return the seconds of all requests of `NUM_TOGETHER` simultaneous HTTP clients, `count` each.

    They share a thread and a client that costs little: eight threads of `http.client` take some 6 ms of CPU time from
    the server under test.
    """
    call = Call(method, path, body.encode(), {**_HEADERS, "host": "localhost"})

    async def client() -> list[float]:
        connection, seconds = Connection(port), []
        for _ in range(count + 1):
            start = time.perf_counter()
            head = await connection.ask(call)
            _check(f"{method} {path}", head.status, await connection.body(head))
            seconds.append(time.perf_counter() - start)
        connection.drop()
        return seconds[1:]  # the first opened the connection

    async def clients() -> list[float]:
        each = await asyncio.gather(*(client() for _ in range(NUM_TOGETHER)))
        return [seconds for client in each for seconds in client]

    return asyncio.run(clients())


def _request(connection: http.client.HTTPConnection, method: str, path: str, body: str | None) -> None:
    """Send a request and read its response.

    Raises:
        RuntimeError: it is an error.
    """
    connection.request(method, path, body, _HEADERS)
    response = connection.getresponse()
    _check(f"{method} {path}", response.status, response.read())


def _check(asked: str, status: int, content: bytes) -> None:
    if status != 200 or _ERROR in content:
        raise RuntimeError(f"{asked}: {status} {content[:200]!r}")


if __name__ == "__main__":
    main()
