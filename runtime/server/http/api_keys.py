"""API keys: the guard that requires one, reading them from files, and the key of a request.

Knows headers and digests, not which namespaces keys have.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Self

from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import Scope

from ...cache.cache_namespace import CacheScope
from ...errors import InvalidParameter
from ..errors import HTTPError, respond
from ..page import PAGE_PATHS
from ..request_log import HEALTH_PATHS, METRICS_PATHS, record_of
from ..server_options import ServerOptions
from .connection import header_of

OPEN_PATHS = frozenset(HEALTH_PATHS) | PAGE_PATHS  # the web UI asks its user for a key
_NO_HEADER = frozenset("\r\n\0")


class ApiKeys:
    """A guard that requires one of `keys`, if there are any. `api_key_of` returns the key of a request later.

    Every key is compared, each in constant time, so that the response time reveals nothing about them.

    Args:
        metrics_key: gives access to `/metrics` only. If set, `/metrics` requires it or a client's key.
    """

    def __init__(self, keys: Sequence[str], metrics_key: str | None = None) -> None:
        self._keys = [(key, _digest(key.encode())) for key in keys]
        self._metrics_digest = None if metrics_key is None else _digest(metrics_key.encode())

    @classmethod
    def of(cls, options: ServerOptions) -> Self:
        """Return the guard for a server's options.

        Raises:
            InvalidParameter: a key is invalid.
        """
        keys = checked_keys(options.api_keys)
        if options.metrics_key is not None:
            checked_keys([options.metrics_key])
        return cls(keys, options.metrics_key)

    def __call__(self, scope: Scope) -> Response | None:
        """Return 401 for a request without a valid key; None if it may go on, with its key noted in the scope."""
        is_metrics = scope["type"] == "http" and scope["path"] in METRICS_PATHS
        has_own_key = is_metrics and self._metrics_digest is not None
        if (has_own_key and self._opens_metrics(scope)) or not (has_own_key or self._keys):
            return None
        key = self._known(_bearer_of(header_of(scope, b"authorization") or ""))
        if key is None:  # Anthropic's clients send it here, alone or together with a token of another server
            key = self._known(header_of(scope, b"x-api-key"))
        if key is None and (scope["type"] != "http" or scope["path"] not in OPEN_PATHS):
            # litellm recognizes OpenAI's first words
            message = "Incorrect API key provided: send a valid key as Authorization: Bearer KEY"
            headers = {"WWW-Authenticate": "Bearer"}
            return respond(HTTPError(401, message, code="invalid_api_key"), scope, headers)
        scope.setdefault("state", {})["api_key"] = key
        if len(self._keys) > 1 and key is not None:
            record_of(scope).key_number = 1 + [own for own, _ in self._keys].index(key)
        return None

    def _opens_metrics(self, scope: Scope) -> bool:
        sent = (_bearer_of(header_of(scope, b"authorization") or "") or "").strip(" \t")
        return hmac.compare_digest(_digest(sent.encode("latin-1")), self._metrics_digest or b"")

    def _known(self, sent: str | None) -> str | None:
        """Return the sent API key if it is one of the server's; None otherwise. It takes equally long for each."""
        sent = (sent or "").strip(" \t")  # other white space is part of the key
        given, known = _digest(sent.encode("latin-1")), None
        for key, digest in self._keys:
            if hmac.compare_digest(given, digest):
                known = key
        return known


def checked_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """Return the keys after checking them.

    Raises:
        InvalidParameter: a key is empty, too long, surrounded by white space or has several lines.
    """
    for key in keys:
        CacheScope(api_key=key)
        if not key or key != key.strip():
            raise InvalidParameter("an API key is empty or has white space around it; choose another")
        if not _NO_HEADER.isdisjoint(key):
            raise InvalidParameter("an API key has several lines; give one key, or a file of keys")
    return tuple(keys)


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the keys in a file, one per line. Empty lines and lines that begin with `#` are skipped.

    Raises:
        InvalidParameter: the file cannot be read, or has no key, which would let every client in.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameter(f"cannot read API keys from {path}: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise InvalidParameter(f"{path} has no API key; write each on a line of its own")
    return checked_keys(keys)


def api_key_of(connection: HTTPConnection) -> str | None:
    """Return the API key of a request; None on a server without keys, whatever the client sent."""
    key: str | None = getattr(connection.state, "api_key", None)
    return key


def client_of(connection: HTTPConnection) -> str:
    """Return the client for fair scheduling: its API key, or its address if there are no keys.

    Its namespace will not do, because a client can have any number of namespaces with its salts.
    """
    address = "" if connection.client is None else connection.client.host
    return api_key_of(connection) or address


def _bearer_of(authorization: str) -> str | None:
    scheme, _, sent = authorization.partition(" ")
    return sent if scheme.lower() == "bearer" else None


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()
