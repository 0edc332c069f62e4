"""Errors in Anthropic's format: `{"type": "error", "error": {"type", "message"}}`.

Knows statuses and paths; `errors.py` knows which error has which status.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ...errors import ContextLengthExceeded

PATH = "/v1/messages"
MODELS = "/v1/models"  # which OpenAI's API has, too
VERSION_HEADER = b"anthropic-version"  # of Anthropic's clients
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# tells Anthropic's packages to send whole conversations
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


class MessagesErrorBody(msgspec.Struct):
    type: str
    message: str
    details: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET

    @property
    def name(self) -> str:
        """The name of the error in logs."""
        return self.type


class MessagesErrorReply(msgspec.Struct):
    error: MessagesErrorBody
    type: Literal["error"] = "error"


def is_of_messages(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API."""
    return path == PATH or path.startswith(f"{PATH}/")


def is_of_models(path: str) -> bool:
    """Return whether a path lists or describes models, which both OpenAI's and Anthropic's clients request."""
    return path == MODELS or path.startswith(f"{MODELS}/")


def error_reply(error: Exception, status: int, message: str) -> MessagesErrorReply:
    """Return an error in Anthropic's format, given the status and message of `errors.describe`.

    >>> error_reply(ValueError(), 404, "there is nothing").error.type
    'not_found_error'
    """
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if isinstance(error, ContextLengthExceeded):
        message = _too_long(error, message)
    details = _NO_THREADS if getattr(error, "param", None) == "thread" else msgspec.UNSET
    return MessagesErrorReply(MessagesErrorBody(kind, message, details))


def _too_long(error: ContextLengthExceeded, message: str) -> str:
    """Return the message in Anthropic's words, by which Claude Code knows that it must compact its conversation."""
    if error.num_tokens is None or error.most is None:
        return f"prompt is too long: {message}"
    return f"prompt is too long: {error.num_tokens} tokens > {error.most} maximum"
