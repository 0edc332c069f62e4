"""A `radixlm serve` process for suites that talk to one as its users do.

Standard library only: these suites have environments of their own, in which radixlm is not installed.
RADIXLM names the command, RADIXLM_ARTIFACT the compiled SmolLM2; the Makefile's targets set both.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

STARTS_WITHIN_S = 120.0
STOPS_WITHIN_S = 30.0


def free_port() -> int:
    """Return a port that nothing listens on, below those that the system gives to others meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class ServeProcess:
    """A server on a free port of loopback; a context manager that is ready when it is entered, and stops it.

    `url` is the server's address without a path, `log` what it has said. `command` is run in place of `radixlm serve`
    with the artifact, `environment` is added to this process's own.
    """

    def __init__(
        self,
        *options: str,
        log: Path,
        api_key: str | None = None,
        command: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.url = ""
        self._log_path = log
        self._api_key = api_key
        if command is None:
            command = [os.environ["RADIXLM"], "serve", os.environ["RADIXLM_ARTIFACT"], "--port", "0"]
        self._connection: http.client.HTTPConnection | None = None  # kept open, as SDKs do
        with log.open("wb") as file:
            environ = {**os.environ, **(environment or {})}
            self._process = subprocess.Popen([*command, *options], stdout=file, stderr=file, env=environ)

    @property
    def log(self) -> str:
        """What the server has said so far."""
        return self._log_path.read_text(encoding="utf-8", errors="replace")

    def said(self, pattern: str) -> re.Match[str]:
        """The first place of the log that matches, when there is one: the server answers before it has said all."""
        deadline = time.monotonic() + STARTS_WITHIN_S
        while (found := re.search(pattern, self.log, re.MULTILINE)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{pattern!r} is not in what the server says:\n{self.log}")
            time.sleep(0.05)
        return found

    def __enter__(self) -> Self:
        deadline = time.monotonic() + STARTS_WITHIN_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise RuntimeError(f"the server did not start:\n{self.log}")
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOPS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise

    def json(self, path: str, body: object = None, method: str | None = None) -> Any:
        """What a plain client gets from `path`, parsed."""
        return json.loads(self.bytes(path, body, method))

    def bytes(self, path: str, body: object = None, method: str | None = None) -> bytes:
        """The same as it comes."""
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = None if body is None else json.dumps(body)
        method = method or ("GET" if data is None else "POST")
        try:
            response = self._ask(method, path, data, headers)
        except (http.client.RemoteDisconnected, ConnectionError):  # idle for long, it was closed
            self._connection = None
            response = self._ask(method, path, data, headers)
        content = response.read()
        if response.status >= 400:
            raise OSError(f"{method} {path}: {response.status} {content[:500]!r}")
        return content

    def terminate(self) -> None:
        """Tell the server to stop, and do not wait."""
        self._process.terminate()

    def wait_until_ended(self) -> int:
        """The exit status, when the process has ended by itself; minus the number of the signal that ended it."""
        return self._process.wait(STARTS_WITHIN_S)

    def wait_until_idle(self) -> None:
        """Return once no request runs or waits: what was cancelled is gone long before it would have ended."""
        deadline = time.monotonic() + 10
        while (health := self.json("/health"))["num_running"] or health["num_waiting"]:
            assert time.monotonic() < deadline, f"requests go on: {health}"
            time.sleep(0.02)

    def _ask(self, method: str, path: str, data: str | None, headers: dict[str, str]) -> http.client.HTTPResponse:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60)
        self._connection.request(method, path, data, headers)
        return self._connection.getresponse()

    def _is_ready(self) -> bool:
        found = re.search(r"http://127\.0\.0\.1:\d+", self.log)
        if not found:
            return False
        self.url = found[0]
        try:
            return bool(self.json("/health")["status"] == "ready")
        except (OSError, ValueError, KeyError):
            return False
