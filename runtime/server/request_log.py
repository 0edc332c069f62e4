"""Give every request an id, and log one line for each: its token counts, its times and how it ended.

Knows counts, times and names of errors. Prompts are logged only with `--log-prompts`.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import HTTPConnection
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..cache.why_not_more import MatchPolicy
from ..engine.completion import Completion
from .errors import respond
from .field_policy import IGNORED_HEADER, IgnoredFields, ignored_header
from .http.connection import header_of
from .page import PAGE_PATHS

_log = logging.getLogger("radixlm.requests")

# Monitors and the web UI request these every few seconds or all at once: logged at level debug, unless they fail.
HEALTH_PATHS = ("/health", "/health/ready", "/health/live")
METRICS_PATHS = ("/metrics", "/prometheus/metrics")  # NVIDIA's servers have the second path
QUIET = frozenset(("GET", path) for path in (*HEALTH_PATHS, *METRICS_PATHS, *PAGE_PATHS - {"/"}, "/v1/cache"))
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# Text that needs no quotes in the log: no white space, and nothing that controls a terminal or text direction.
_BARE = re.compile(
    r"[^\s\"\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]+"
)
_RANDOM = random.Random()
os.register_at_fork(after_in_child=_RANDOM.seed)  # otherwise a fork would reuse its parent's ids
_PROMPTS = ("messages", "prompt", "input")
_MAX_ERROR_BYTES = 1 << 14
STATUS_CLIENT_GONE = 499  # nginx's status
CLIENT_GONE = "client_gone"


@dataclass
class RequestRecord:
    """Facts about one request for the log and the metrics, filled in while it is processed."""

    request_id: str
    arrived_at: float
    status: int = STATUS_CLIENT_GONE
    has_started: bool = False  # the response has begun
    namespace: bytes | None = None
    key_number: int | None = None  # of the request's API key among several, from 1; the key itself is never logged
    completions: list[Completion] = field(default_factory=list)
    prefill: Callable[[], dict[str, int]] | None = None  # returns prompt token counts so far
    error: str | None = None
    body: bytearray | None = None  # None if prompts are not logged
    match: MatchPolicy = "text"  # if the body sets none
    ignored: IgnoredFields | None = None  # None: no body was read
    is_idle: bool = False  # from a batch: computed while there is no other request
    is_forwarded: bool = False  # passed on to another server, which logs and counts it
    _error_body: bytearray = field(default_factory=bytearray)

    def fields(self, scope: Scope) -> dict[str, Any]:
        """Return the fields of the log line: times in seconds, token counts summed over all replies."""
        error = self.error or self._error_of_body() or (CLIENT_GONE if self.status == STATUS_CLIENT_GONE else None)
        facts: dict[str, Any] = {
            "id": self.request_id,
            "method": scope["method"],
            "path": scope["path"],
            "status": self.status,
            "client": client[0] if (client := scope.get("client")) else None,
            **({} if self.key_number is None else {"key": self.key_number}),
            "namespace": None if self.namespace is None else self.namespace.hex()[:12],
        }
        if self.completions:
            facts |= _sum_completions(self.completions)
        elif self.prefill is not None:
            facts |= self.prefill()
        facts["total_s"] = round(time.monotonic() - self.arrived_at, 4)
        if error is not None:
            facts["error"] = error
        if self.ignored is not None and self.ignored.unknown:
            facts["unknown_fields"] = ignored_header(self.ignored.unknown)
        if self.body is not None:
            facts["prompt"] = _prompt_of(self.body, self.match)
        return facts

    def fail(self, status: int, error: str) -> None:
        """Record that the response ends with an error. Log and metrics use this status, even after a stream began."""
        self.status, self.error = status, error

    def add_error_body(self, part: bytes) -> None:
        """Collect the body of an error response, up to a limit."""
        if self.status >= 400 and len(self._error_body) + len(part) <= _MAX_ERROR_BYTES:
            self._error_body += part

    def _error_of_body(self) -> str | None:
        """Return the code or type of the error in the response, never its message: that may quote the prompt."""
        if not self._error_body:
            return None
        try:
            error = json.loads(bytes(self._error_body))["error"]
            return str(error.get("code") or error.get("type"))
        except (ValueError, KeyError, TypeError, AttributeError):
            return str(self.status)


class RequestLog:
    """The outermost ASGI middleware: logs and counts each request. `record_of` returns a request's record.

    Args:
        routes: routes that are counted by path; requests to other paths are counted together.
        responses: counts responses by path and status.
        has_prompts: log prompts, except of requests whose match policy is `off`.
        match: match policy of requests that set none.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Sequence[Route],
        responses: Counter[tuple[str, str]],
        has_prompts: bool = False,
        match: MatchPolicy = "text",
    ) -> None:
        self._app = app
        self._routes = routes
        self._responses = responses
        self._has_prompts = has_prompts
        self._match = match

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request by the wrapped application, with a record of it in `scope`; log a line when it ends.

        Adds the request's id to the response, counts the response, and answers 500 if the application raises before it.
        """
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        body = bytearray() if self._has_prompts else None
        record = RequestRecord(_request_id(scope), time.monotonic(), body=body, match=self._match)
        scope.setdefault("state", {})["record"] = record

        async def receiving() -> Message:
            message = await receive()
            if record.body is not None and message["type"] == "http.request":
                record.body += message.get("body", b"")
            return message

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.has_started = True
                if record.error is None:
                    record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_headers(record)]
            elif record.status >= 400:
                record.add_error_body(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receiving if self._has_prompts else receive, sending)
        except Exception as error:  # a bug: the client still gets a response with the request's id
            record.fail(500, type(error).__name__)
            if record.has_started:
                raise
            await respond(error, scope)(scope, receive, sending)
        finally:
            if not record.is_forwarded:
                self._responses[self._path_of(scope), str(record.status)] += 1
            is_quiet = record.is_forwarded or (record.status < 400 and (scope["method"], scope["path"]) in QUIET)
            level = logging.DEBUG if is_quiet else logging.INFO
            if _log.isEnabledFor(level):
                fields = record.fields(scope)
                _log.log(level, "%s", line_of(fields), extra={"fields": fields})

    def _path_of(self, scope: Scope) -> str:
        """Return the path of the route that a request belongs to, or "other"."""
        found = (route.path_format for route in self._routes if route.path_regex.match(scope["path"]))
        return next(found, "other")


def _headers(record: RequestRecord) -> list[tuple[bytes, bytes]]:
    """Return the headers of every response: the request's id, and the ignored fields if there are any."""
    headers = [(b"x-request-id", record.request_id.encode())]
    if record.ignored is not None and (record.ignored.harmless or record.ignored.unknown):
        headers.append((IGNORED_HEADER.encode(), ignored_header(record.ignored.names).encode()))
    return headers


def record_of(connection: HTTPConnection | Scope) -> RequestRecord:
    """Return the record of a request; an empty one if no `RequestLog` handled it."""
    scope = connection.scope if isinstance(connection, HTTPConnection) else connection
    record = scope.get("state", {}).get("record")
    return record if isinstance(record, RequestRecord) else RequestRecord("", 0.0)


def new_id(prefix: str) -> str:
    """Return an id that is unique across servers, with a prefix.

    `uuid4` makes a system call that releases the GIL, and gets it back 0.5 ms later if the engine's thread waits for
    it. These ids are predictable, and nothing relies on their being secret.
    """
    return f"{prefix}{_RANDOM.getrandbits(128):032x}"


def line_of(fields: dict[str, Any]) -> str:
    """Return fields as a line for people.

    >>> line_of({"id": "req-1", "path": "/v1/models", "status": 200, "namespace": None, "total_s": 0.1})
    'id=req-1 path=/v1/models status=200 namespace=- total_s=0.1'
    """
    return " ".join(f"{name}={_quote_value(value)}" for name, value in fields.items())


def _quote_value(value: Any) -> str:
    """Return a value as the log line has it: `-` for None, quoted as JSON if it is not one plain word."""
    if value is None:
        return "-"
    if type(value) in (int, float):
        return repr(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if _BARE.fullmatch(text) else json.dumps(text)


def _sum_completions(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the token counts and times of all replies to a request."""
    num_prompt = num_cached = num_generated = 0
    firsts, waits, paces = [], [], []
    for completion in completions:
        usage, timings = completion.usage, completion.timings
        num_prompt += usage.prompt_tokens
        num_cached += usage.cached_tokens
        num_generated += usage.completion_tokens
        if timings.time_to_first_token_s is not None:
            firsts.append(timings.time_to_first_token_s)
        if timings.queue_s is not None:
            waits.append(timings.queue_s)
        if timings.decode_tokens_per_s:
            paces.append(1 / timings.decode_tokens_per_s)
    return {
        "prompt_tokens": num_prompt,
        "cached_tokens": num_cached,
        "generated_tokens": num_generated,
        "queue_s": round(min(waits), 4) if waits else None,
        "ttft_s": round(min(firsts), 4) if firsts else None,
        "tpot_s": round(sum(paces) / len(paces), 5) if paces else None,
        "finish_reason": ",".join({completion.finish_reason: None for completion in completions}),
    }


def _request_id(scope: Scope) -> str:
    """Return the client's own request id if it is printable and short, else a new one."""
    given = header_of(scope, b"x-request-id") or ""
    return given if _REQUEST_ID.fullmatch(given) else new_id("req-")


def _prompt_of(body: bytearray, match: MatchPolicy) -> Any:
    """Return the prompt in a body; None if its match policy is `off`, or the body is not valid."""
    try:
        asked = json.loads(bytes(body))
        if (asked.get("cache_match") or match) == "off":
            return None
        return next((asked[name] for name in _PROMPTS if name in asked), None)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
