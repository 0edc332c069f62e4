"""Errors in Ollama's shape, `{"error": "..."}`, and its statuses where they are others.

Knows statuses and paths; `errors.py` knows which error has which status.
"""

from __future__ import annotations

import msgspec

PREFIX = "/api/"
_STATUSES = {429: 503}  # of a server that is busy


class OllamaErrorReply(msgspec.Struct):
    error: str


def is_of_ollama(path: str) -> bool:
    """Return whether requests to a path are answered in Ollama's shapes."""
    return path.startswith(PREFIX)


def error_reply(status: int, message: str, code: str | None) -> tuple[int, OllamaErrorReply]:
    """Return the status and body of an error of which `errors.describe` says this.

    >>> error_reply(404, "there is no model 'a' here; this server has 'b'", "model_not_found")[1].error
    "model not found: there is no model 'a' here; this server has 'b'"
    """
    if code == "model_not_found":  # clients look for the words
        message = f"model not found: {message}"
    return _STATUSES.get(status, status), OllamaErrorReply(message)
