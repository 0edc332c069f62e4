"""HTTP status and body of every error: OpenAI's `{"error": {"message", "type", "param", "code"}}`, or another API's.

Knows which errors are the client's mistake: bad input is 400, never 422. The server's own are 500 or 503.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from ..errors import (
    ContextLengthExceeded,
    EngineClosed,
    EngineDied,
    EngineError,
    EngineOverloaded,
    InvalidParameter,
    InvalidRequest,
    ModelFailed,
    ModelTooLarge,
    RadixLMError,
    StoreOff,
)
from .anthropic.error_replies import VERSION_HEADER, MessagesErrorReply, error_reply, is_of_messages, is_of_models
from .hints.paths import near_path
from .hints.validation import explain
from .http.connection import header_of
from .ollama import error_replies as ollama

_log = logging.getLogger(__name__)
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None

    @property
    def name(self) -> str:
        """The name of the error in logs."""
        return self.code or self.type


class ErrorReply(msgspec.Struct):
    error: ErrorBody


class HTTPError(RadixLMError):
    """An error response: its status, and everything that its body says."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers


def describe(error: Exception) -> tuple[int, ErrorReply]:
    """Return the status and OpenAI's body of an error. Unforeseen errors are logged, and their text is not sent."""
    match error:
        case HTTPError():
            return error.status, _reply(error.status, str(error), error.param, error.code)
        case msgspec.ValidationError():
            found = explain(error)
            return 400, _reply(400, found.message, found.param)
        case msgspec.DecodeError():
            return 400, _reply(400, f"the body is not valid JSON: {error}")
        case ContextLengthExceeded():
            return 400, _reply(400, str(error), code="context_length_exceeded")
        case InvalidParameter():
            return 400, _reply(400, str(error), error.param)
        case InvalidRequest():
            return 400, _reply(400, str(error))
        case HTTPException():
            return error.status_code, _reply(error.status_code, str(error.detail))
        case EngineOverloaded():
            return 429, ErrorReply(
                ErrorBody(str(error), "requests", code="rate_limit_exceeded")
            )  # OpenAI's type and code
        case EngineClosed():
            return 503, _reply(503, str(error))
        case ModelFailed():
            return 503, _reply(503, str(error), "model", code="model_failed")
        case ModelTooLarge():
            return 507, _reply(507, str(error), "model", code="model_too_large")
        case StoreOff():
            return 503, _reply(503, str(error), code="store_off")
        case EngineDied():
            return 500, _reply(500, _without_cause(error), code="engine_died")
        case EngineError():
            _log.error("a request failed: %s", error)
            return 500, _reply(500, _without_cause(error))
        case _:
            _log.error("a request failed", exc_info=error)
            return 500, _reply(500, "internal error; see the server's log")


async def answer(request: Request, error: Exception) -> Response:
    """Return the response to an error. This is Starlette's exception handler."""
    match error:
        case HTTPException(status_code=404):
            path = request.scope["path"]
            near = near_path(path, _endpoints(request))
            hint = "see /openapi.json" if near is None else f"did you mean {near}?"
            error = HTTPError(404, f"there is no endpoint {path:.200}; {hint}", code="not_found")
        case HTTPException(status_code=405):
            allowed = (error.headers or {}).get("Allow", "")
            message = f"{request.url.path} does not allow {request.method}; use {allowed}"
            error = HTTPError(405, message, headers={"Allow": allowed})
    return respond(error, request.scope)


def _endpoints(request: Request) -> list[str]:
    """Return the paths of the application that a request came to, without static files and those with parameters."""
    routes = request.app.routes if "app" in request.scope else ()
    paths = (route.path for route in routes if isinstance(route, Route))
    return [path for path in paths if path != "/" and "{" not in path and not path.startswith("/static/")]


def respond(error: Exception, scope: Scope, headers: dict[str, str] | None = None) -> Response:
    """Return the response to an error, in the format of the path's API, or on a path that APIs share, the client's."""
    if isinstance(error, HTTPError):
        headers = {**error.headers, **(headers or {})}
    if isinstance(error, EngineDied | ModelTooLarge):  # clients retry a 500 by themselves, which does not help here
        headers = {"x-should-retry": "false", **(headers or {})}
    if isinstance(error, EngineOverloaded):
        headers = {"Retry-After": str(error.retry_after_s), **(headers or {})}
    status, reply = shaped(error, scope["path"], is_of_anthropic=header_of(scope, VERSION_HEADER) is not None)
    return Response(msgspec.json.encode(reply), status, headers, media_type="application/json")


def shaped(
    error: Exception, path: str, *, is_of_anthropic: bool = False
) -> tuple[int, ErrorReply | MessagesErrorReply | ollama.OllamaErrorReply]:
    """Return the status and body of an error, in the format of the path's API.

    Args:
        is_of_anthropic: the client is Anthropic's, which decides about paths that several APIs have, or none.
    """
    status, reply = describe(error)
    if ollama.is_of_ollama(path):
        return ollama.error_reply(status, reply.error.message, reply.error.code)
    is_shared = is_of_models(path) or reply.error.code == "not_found"
    if is_of_messages(path) or (is_shared and is_of_anthropic):
        return status, error_reply(error, status, reply.error.message)
    return status, reply


def failure(error: Exception, path: str) -> tuple[int, str]:
    """Return the status of an error and its name in logs, in the words of the path's API."""
    status, reply = shaped(error, path)
    named = describe(error)[1] if isinstance(reply, ollama.OllamaErrorReply) else reply
    return status, named.error.name


def _reply(status: int, message: str, param: str | None = None, code: str | None = None) -> ErrorReply:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return ErrorReply(ErrorBody(message, kind, param, code))


def _without_cause(error: EngineError) -> str:
    """Return an error's message without the text of its cause, which may contain paths or other clients' data."""
    cause = str(error.__cause__ or "")
    return str(error).replace(f": {cause}", " (see the log)") if cause else str(error)
