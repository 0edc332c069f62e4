"""A server in a separate process, and clients of it that keep their connections open, as SDKs do.

Knows HTTP, `/health`, server-sent events and the times at which they arrive; nothing of engines.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .worker import ROOT, Closable

_STARTS_WITHIN_S = 120.0
_POLL_S = 0.01
_EVENT = b"data: "
Json = dict[str, Any]


@dataclass(frozen=True)
class Event:
    """An event from the server, and when it arrived, in seconds of `time.perf_counter`."""

    at: float
    data: Json


class ServedProcess(Closable):
    """`command --port PORT`, ready when it is made; close it, or use it as a context manager.

    Attributes:
        started_at, ready_at: seconds of `time.perf_counter`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        starts_within_s: float = _STARTS_WITHIN_S,
        environment: Mapping[str, str] | None = None,
        ready_path: str = "/health",
    ) -> None:
        """Start it and wait until `ready_path` succeeds; raise RuntimeError with its last output if it does not.

        `environment` is added to this process's own. Servers in Python may keep their bytecode, as installed ones do.
        """
        self.port = _free_port()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        command = [*command, "--port", str(self.port)]
        environ = {**os.environ, **(environment or {})}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        self.started_at = time.perf_counter()
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=self._log, stderr=self._log, env=environ)
        try:
            self._wait_until_ready(command, starts_within_s, ready_path)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process's id, for measuring its memory."""
        return self._process.pid

    @property
    def log(self) -> str:
        """Return its output so far."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def kill(self) -> None:
        """Kill it, as a crash does; it must be closed all the same."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(30.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _wait_until_ready(self, command: Sequence[str], within_s: float, path: str) -> None:
        """Wait until the server answers at `path`.

        Raises:
            RuntimeError: it ended, or takes longer than `within_s` seconds.
        """
        deadline = time.monotonic() + within_s
        while not _is_ready(self.port, path):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(command)} did not start: {self.log[-500:].strip() or 'it said nothing'}")
            time.sleep(_POLL_S)
        self.ready_at = time.perf_counter()


class Client:
    """One connection, opened when it is needed, and again if the server closed it, as llama.cpp does after each stream.

    http.client sets TCP_NODELAY.
    """

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600.0)

    def json(self, method: str, path: str, body: Json | None = None) -> Json:
        """Return the whole response, {} if it is empty; raise RuntimeError unless it succeeded."""
        content: Json = json.loads(self._ask(method, path, body).read() or b"{}")
        return content

    def read(self, path: str) -> Any:
        """Return the response to a GET, which may be a list."""
        return json.loads(self._ask("GET", path, None).read())

    def events(self, path: str, body: Json) -> list[Event]:
        """Return every event of a stream but `[DONE]`. They are parsed after the last one, so that none waits."""
        response = self._ask("POST", path, body)
        parts: list[tuple[float, bytes]] = []
        while part := response.read1():
            parts.append((time.perf_counter(), part))
        return parse_events(parts)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _ask(self, method: str, path: str, body: Json | None) -> http.client.HTTPResponse:
        """Send a request, and return its response; reconnect if the server closed the connection meanwhile.

        Raises:
            RuntimeError: its status is not 200.
        """
        sock = self._connection.sock
        if sock is not None and select.select([sock], [], [], 0)[0]:  # nothing is due but the end
            self._connection.close()
            sock = None
        data = None if body is None else json.dumps(body)
        try:
            response = self._sent(method, path, data)
        except (http.client.RemoteDisconnected, ConnectionError):
            if sock is None:
                raise
            self._connection.close()  # the end of the stream before was still on its way
            response = self._sent(method, path, data)
        if response.status != http.client.OK:
            raise RuntimeError(f"{method} {path} was answered {response.status}: {response.read()[:500]!r}")
        return response

    def _sent(self, method: str, path: str, data: str | None) -> http.client.HTTPResponse:
        self._connection.request(method, path, data, {"content-type": "application/json"})
        return self._connection.getresponse()


def parse_events(parts: Sequence[tuple[float, bytes]]) -> list[Event]:
    r"""Parse the events in received parts, each with the time of its last byte.

    >>> parse_events([(1.0, b'data: {"a": 1}\n\nda'), (2.0, b'ta: {"a": 2}\n\n'), (3.0, b"data: [DONE]\n\n")])
    [Event(at=1.0, data={'a': 1}), Event(at=2.0, data={'a': 2})]
    """
    events, rest = [], b""
    for at, part in parts:
        *whole, rest = (rest + part).split(b"\n\n")
        lines = [line.removeprefix(_EVENT) for line in whole if line.startswith(_EVENT)]
        events += [Event(at, json.loads(line)) for line in lines if line != b"[DONE]"]
    return events


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _is_ready(port: int, path: str) -> bool:
    """Return whether a server answers a GET request with 200."""
    client = Client(port)
    try:
        client.json("GET", path)
    except (OSError, http.client.HTTPException, RuntimeError):
        return False
    finally:
        client.close()
    return True
