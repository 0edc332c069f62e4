"""Ask a server of this process, without a socket: the same bodies lead to the same prompts as over HTTP.

Knows ASGI and events; not what a body says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Scope

Told = Callable[[int, int], None]
"""Called with the tokens of a prompt that are there, and with all that it has, whenever more are there."""


@dataclass(frozen=True)
class Warmed:
    """A prompt whose keys and values are there now."""

    num_prompt: int
    num_found: int  # of these, that were there before


async def ask(app: ASGIApp, path: str, body: Mapping[str, Any], api_key: str | None, told: Told) -> Warmed:
    """Have a prompt computed. `body` asks for a stream with progress.

    Raises:
        ValueError: it is refused, or fails; the message is the server's.
    """
    answer = _Answer(told)
    sent = [{"type": "http.request", "body": msgspec.json.encode(body), "more_body": False}]

    async def receive() -> Message:
        if not sent:
            await asyncio.Event().wait()  # the client stays
        return sent.pop()

    await app(_scope(path, api_key), receive, answer.take)
    return answer.warmed()


class _Answer:
    """What has come of an answer."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._status = 0
        self._rest = b""
        self._progress: dict[str, int] | None = None  # the last
        self._error: str | None = None

    async def take(self, message: Message) -> None:
        """The next message of ASGI."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            return
        self._rest += message.get("body", b"")
        if self._status == 200:
            *events, self._rest = self._rest.split(b"\n\n")
            for event in events:
                self._read(event)

    def warmed(self) -> Warmed:
        """The prompt, when all has come."""
        if self._status != 200:
            raise ValueError(_message(msgspec.json.decode(self._rest)))
        if self._error is not None or self._progress is None:
            raise ValueError(self._error or "nothing was computed")
        return Warmed(self._progress["total"], self._progress["cache"])

    def _read(self, event: bytes) -> None:
        for line in event.split(b"\n"):
            if not line.startswith(b"data: {"):
                continue
            value = msgspec.json.decode(line.removeprefix(b"data: "))
            inner = value.get("response") or value  # an event of /v1/responses has it there
            if inner.get("error"):
                self._error = _message(inner)
            progress = inner.get("prompt_progress")
            if progress:
                self._progress = progress
                self._told(progress["processed"], progress["total"])


def _message(value: Mapping[str, Any]) -> str:
    return str(value["error"]["message"])


def _scope(path: str, api_key: str | None) -> Scope:
    headers = [(b"content-type", b"application/json")]
    if api_key is not None:
        headers.append((b"authorization", b"Bearer " + api_key.encode()))
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 0),
        "server": ("localhost", 80),
    }
