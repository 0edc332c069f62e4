"""Send the bodies in a file of JSON lines to a server in this process, so that prompts are the same as over HTTP.

Knows ASGI, events and the endpoint of each body. The server reads the bodies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Scope

Progressed = Callable[[int, int], None]
"""Called with the number of prefilled tokens of a prompt, and its total, whenever the former grows."""


@dataclass(frozen=True)
class PrefillCounts:
    """Token counts of one prefilled prompt."""

    num_prompt: int
    num_found: int  # tokens that were cached before


async def send_prefill(
    app: ASGIApp, path: str, body: Mapping[str, Any], api_key: str | None, progressed: Progressed
) -> PrefillCounts:
    """Send a request that prefills a prompt to `app`, and return its token counts. `body` must ask for progress.

    Raises:
        ValueError: the request is refused or fails; the message is the server's.
    """
    response = _PrefillResponse(progressed)
    sent = [{"type": "http.request", "body": msgspec.json.encode(body), "more_body": False}]

    async def receive() -> Message:
        if not sent:
            await asyncio.Event().wait()  # the client stays connected
        return sent.pop()

    await app(_asgi_scope(path, api_key), receive, response.take)
    return response.counts()


class _PrefillResponse:
    """Parses the streamed response to a prefill request as it arrives."""

    def __init__(self, progressed: Progressed) -> None:
        self._progressed = progressed
        self._status = 0
        self._rest = b""
        self._progress: dict[str, int] | None = None  # the last
        self._error: str | None = None

    async def take(self, message: Message) -> None:
        """Store the status or the next part of the body; read the events that it completes, if the status is 200."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            return
        self._rest += message.get("body", b"")
        if self._status == 200:
            *events, self._rest = self._rest.split(b"\n\n")
            for event in events:
                self._read_event(event)

    def counts(self) -> PrefillCounts:
        """Return the prompt's token counts, after the end of the response.

        Raises:
            ValueError: the request was refused, or failed.
        """
        if self._status != 200:
            raise ValueError(_message(msgspec.json.decode(self._rest)))
        if self._error is not None or self._progress is None:
            raise ValueError(self._error or "nothing was computed")
        return PrefillCounts(self._progress["total"], self._progress["cache"])

    def _read_event(self, event: bytes) -> None:
        """Record the prefill progress or the error that a server-sent event has, and report progress."""
        for line in event.split(b"\n"):
            if not line.startswith(b"data: {"):
                continue
            value = msgspec.json.decode(line.removeprefix(b"data: "))
            inner = value.get("response") or value  # in events of /v1/responses
            if inner.get("error"):
                self._error = _message(inner)
            progress = inner.get("prompt_progress")
            if progress:
                self._progress = progress
                self._progressed(progress["processed"], progress["total"])


def _message(value: Mapping[str, Any]) -> str:
    return str(value["error"]["message"])


def _asgi_scope(path: str, api_key: str | None) -> Scope:
    """Return the ASGI scope of a POST request: a dictionary of its path and headers, as a server would pass it."""
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


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
_ONE_TOKEN: Mapping[str, Mapping[str, Any]] = {  # fields for the shortest reply
    CHAT: {"max_tokens": 1},
    COMPLETIONS: {"max_tokens": 1},
    RESPONSES: {"max_output_tokens": 1},
    MESSAGES: {"max_tokens": 1},
}
_OF_THE_REPLY = frozenset({"max_completion_tokens", "min_tokens", "n", "best_of", "stream_options"})
_OF_MESSAGES = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking"})  # blocks


@dataclass(frozen=True)
class Body:
    """A request for an endpoint. `where` names its position in the file, for errors."""

    where: str
    path: str
    fields: Mapping[str, Any]

    def warming(self, model_id: str, cache_fields: Mapping[str, str]) -> dict[str, Any]:
        """Return the body of a request that prefills the prompt, generates one token and streams its progress.

        Args:
            cache_fields: `cache_salt` and `prompt_cache_key`, if given: they choose the cache namespace.
        """
        kept = {name: value for name, value in self.fields.items() if name not in _OF_THE_REPLY}
        return {
            **kept,
            **_ONE_TOKEN[self.path],
            **cache_fields,
            "model": model_id,
            "stream": True,
            "return_progress": True,
        }


def read_bodies(path: Path) -> Iterator[Body]:
    """Yield the bodies of a file, one JSON object per line. Empty lines are skipped.

    The endpoint is the field `path`, next to the body's fields or to a field `body`. Without it, the fields decide.

    Raises:
        ValueError: a line is not a body.
        OSError: the file cannot be read.
    """
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            where = f"line {number} of {path}"
            try:
                fields = msgspec.json.decode(line, type=dict[str, Any])
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ValueError(
                    f"{where} is not a JSON object: {error}; each line must be the body of a request"
                ) from error
            yield _body_of_line(where, fields)


def _body_of_line(where: str, fields: dict[str, Any]) -> Body:
    """Return the request in the decoded line `fields`; `where` names the line in errors.

    >>> _body_of_line("", {"path": "/v1/responses", "body": {"input": "Hi"}})
    Body(where='', path='/v1/responses', fields={'input': 'Hi'})
    """
    named: Any = fields.pop("path", None)
    inner = fields.get("body")
    if isinstance(inner, dict):
        fields = inner
    path = named or path_of(fields)
    if not isinstance(path, str) or path not in _ONE_TOKEN:
        problem = f"has the path {named!r}" if named else "has neither messages, input nor prompt"
        raise ValueError(f"{where} {problem}; give a body for one of {', '.join(_ONE_TOKEN)}")
    return Body(where, path, fields)


def path_of(fields: Mapping[str, Any]) -> str | None:
    """Return the endpoint that a body is for, by the body's fields; None if they fit no endpoint.

    >>> path_of({"messages": [], "system": "Be brief."}), path_of({"messages": [], "tools": []}), path_of({"input": ""})
    ('/v1/messages', '/v1/chat/completions', '/v1/responses')
    """
    if "messages" in fields:
        return MESSAGES if _is_of_messages(fields) else CHAT
    return RESPONSES if "input" in fields else COMPLETIONS if "prompt" in fields else None


def _is_of_messages(fields: Mapping[str, Any]) -> bool:
    """Return whether a body with `messages` is Anthropic's, by its fields and blocks."""
    if "system" in fields or any("input_schema" in tool for tool in _objects(fields.get("tools"))):
        return True
    contents = [message.get("content") for message in _objects(fields["messages"])]
    return any(block.get("type") in _OF_MESSAGES for content in contents for block in _objects(content))


def _objects(values: object) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []
