"""Errors in Ollama's format, `{"error": "..."}`, with its statuses.

Knows statuses and paths; `errors.py` knows which error has which status.
"""

from __future__ import annotations

import msgspec

PREFIX = "/api/"
_STATUSES = {429: 503}  # a busy server


class OllamaErrorReply(msgspec.Struct):
    error: str


def is_of_ollama(path: str) -> bool:
    """Return whether a path belongs to Ollama's API."""
    return path.startswith(PREFIX)


def error_reply(status: int, message: str, code: str | None) -> tuple[int, OllamaErrorReply]:
    """Return the status and body of an error in Ollama's format, given those of `errors.describe`.

    >>> error_reply(404, "there is no model 'a'; this server has 'b'", "model_not_found")[1].error
    "model not found: there is no model 'a'; this server has 'b'"
    """
    if code == "model_not_found":  # clients search for these words
        message = f"model not found: {message}"
    return _STATUSES.get(status, status), OllamaErrorReply(message)
