"""Require an API key: if the server has any, every path but `/health` and the page's files asks for one.

Knows keys and headers, not routes: a path that is added later asks for a key, too.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import Scope

from ...cache.cache_namespace import CacheScope
from ...errors import InvalidParameter
from ..errors import HTTPError, respond
from ..page import PAGE_PATHS
from .headers import header_of

OPEN_PATHS = frozenset({"/health"}) | PAGE_PATHS  # the page asks its user for a key
_NO_HEADER = frozenset("\r\n\0")


class ApiKeys:
    """A guard that asks for one of `keys`, if there are any; `api_key_of` returns the key of a request later.

    Every key is compared, each in constant time, so that the time of an answer reveals nothing about them.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [(key, _digest(key.encode())) for key in keys]

    def __call__(self, scope: Scope) -> Response | None:
        if not self._keys:
            return None
        key = self._known(_bearer_of(header_of(scope, b"authorization") or ""))
        if key is None:  # as Anthropic's clients send it, beside a token of another server or alone
            key = self._known(header_of(scope, b"x-api-key"))
        if key is None and (scope["type"] != "http" or scope["path"] not in OPEN_PATHS):
            # begins as OpenAI's, by which litellm knows what it is
            message = "Incorrect API key provided: send one that this server knows, as Authorization: Bearer KEY"
            headers = {"WWW-Authenticate": "Bearer"}
            return respond(HTTPError(401, message, code="invalid_api_key"), scope["path"], headers)
        scope.setdefault("state", {})["api_key"] = key
        return None

    def _known(self, sent: str | None) -> str | None:
        sent = (sent or "").strip(" \t")  # other white space is a byte of the key
        given, known = _digest(sent.encode("latin-1")), None
        for key, digest in self._keys:
            if hmac.compare_digest(given, digest):
                known = key
        return known


def _bearer_of(authorization: str) -> str | None:
    scheme, _, sent = authorization.partition(" ")
    return sent if scheme.lower() == "bearer" else None


def checked_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """The keys themselves.

    Raises:
        InvalidParameter: a key is empty, has white space around it, is too long or of several lines.
    """
    for key in keys:
        CacheScope(api_key=key)
        if not key or key != key.strip():
            raise InvalidParameter("an API key is empty or has white space around it; choose another")
        if not _NO_HEADER.isdisjoint(key):
            raise InvalidParameter("an API key has several lines, which no header can; give one key, or a file of keys")
    return tuple(keys)


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys in a file, one a line. Empty lines, and those that begin with `#`, are left out.

    Raises:
        InvalidParameter: it cannot be read, or has no key: a server without keys answers every client.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameter(f"cannot read API keys from {path}: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise InvalidParameter(f"{path} holds no API key; write one into it, each on a line of its own")
    return checked_keys(keys)


def api_key_of(connection: HTTPConnection) -> str | None:
    """The key of a request; None on a server without keys, whatever the client sent."""
    key: str | None = getattr(connection.state, "api_key", None)
    return key


def client_of(connection: HTTPConnection) -> str:
    """The name of the client that takes turns with others: its key, or its address where there are no keys.

    Not its namespace: a client may make any number of namespaces with its salts.
    """
    address = "" if connection.client is None else connection.client.host
    return api_key_of(connection) or address


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()
