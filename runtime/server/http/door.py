"""Access control and error handling around all endpoints: API keys, host names, origins, CORS.

One middleware runs all guards, because each layer adds work to every event of a stream. Two guards refuse requests that
a browser sends on behalf of other web sites. CORS alone keeps pages from reading responses, but not from sending
requests: any page could make its visitor's browser fill the queue of a server on the visitor's machine. A page can also
point its own name to that machine (DNS rebinding). The browser then takes the server for the page's own, and only the
Host header tells them apart. Knows headers, not routes.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ...cache.cache_namespace import CacheScope
from ...errors import InvalidParameter, RadixLMError
from ..errors import HTTPError, answer, respond
from ..field_policy import IGNORED_HEADER
from ..page import PAGE_PATHS
from ..request_log import HEALTH_PATHS, METRICS_PATHS, record_of
from ..server_options import ServerOptions
from .connection import ClientGone, header_of

_HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})
_EXPOSED = ("retry-after", "x-request-id", IGNORED_HEADER)
OPEN_PATHS = frozenset(HEALTH_PATHS) | PAGE_PATHS  # the web UI asks its user for a key
_NO_HEADER = frozenset("\r\n\0")
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
Guard = Callable[[Scope], Response | None]
"""Returns the response to a refused request, None to let it pass."""


def door(options: ServerOptions) -> list[Middleware]:
    """Return the middlewares for a server's keys, hosts and origins.

    Raises:
        InvalidParameter: an API key or an origin is invalid.
    """
    host, pages = KnownHosts(options.hosts), cors(options.cors_origins)
    others = SameOrigin(options.cors_origins), _keys_of(options)
    if not pages:
        return [Middleware(AccessGuards, guards=(host, *others))]
    return [Middleware(AccessGuards, guards=(host,)), *pages, Middleware(AccessGuards, guards=others)]


class AccessGuards:
    """An ASGI middleware that passes on requests which no guard refuses."""

    def __init__(self, app: ASGIApp, guards: Sequence[Guard]) -> None:
        self._app, self._guards = app, guards

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            for guard in self._guards:
                refusal = guard(scope)
                if refusal is not None:
                    if scope["type"] != "http":
                        return await send({"type": "websocket.close", "code": 1008})
                    return await refusal(scope, receive, send)
        await self._app(scope, receive, send)


class App(Starlette):
    """A Starlette application with fewer layers: routes, error handling, and the given middlewares."""

    def build_middleware_stack(self) -> ASGIApp:
        """Build the middlewares without Starlette's two layers for errors, which `ErrorResponses` replaces."""
        app: ASGIApp = ErrorResponses(self.router)
        for middleware, args, options in reversed(self.user_middleware):
            app = middleware(app, *args, **options)
        return app


class ErrorResponses:
    """An ASGI middleware that turns known errors into responses. Other exceptions are bugs, and pass through."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except (RadixLMError, msgspec.MsgspecError, HTTPException) as error:
            if record_of(scope).has_started:
                raise
            response = await answer(Request(scope), error)
            await response(scope, receive, send)
        except (ClientGone, ClientDisconnect):  # the latter in the middle of a request's body
            await Response(status_code=499)(scope, receive, send)  # nginx's status, for the log only


class Endpoint:
    """An ASGI application made of a function from a request to a response."""

    def __init__(self, answer: Callable[[Request], Awaitable[Response]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(Request(scope, receive, send))
        await response(scope, receive, send)


def cors(allowed: Sequence[str]) -> list[Middleware]:
    """Return the CORS middleware for web pages of the `allowed` origins, `*` for all; none if the list is empty.

    Raises:
        InvalidParameter: an origin is not of the form `scheme://host[:port]`.
    """
    for origin in allowed:
        _check(origin)
    answering = Middleware(
        CORSMiddleware,
        allow_origins=list(allowed),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=_EXPOSED,
        allow_private_network=True,  # allowed pages may access a server in a private network
    )
    return [answering] if allowed else []


def local_hosts(host: str) -> tuple[str, ...]:
    """Return the host names of a server to which only this machine can connect."""
    return (*LOCAL_HOSTS, host)


class KnownHosts:
    """A guard that refuses requests whose Host is not in `hosts`; an empty list accepts any.

    Requests without Host pass: they do not come from a browser.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)

    def __call__(self, scope: Scope) -> Response | None:
        host = header_of(scope, b"host") if self._hosts else None
        if host is None or self._is_known(_name_of(host)):
            return None
        message = (
            f"the host name {host!r:.100} is not allowed, because a web page may have made it point to this server; "
            "start the server with --allowed-host or --api-key (under Ray: hosts= or api_keys=), or let the proxy "
            "send Host: localhost"
        )
        return respond(HTTPError(403, message, code="host_not_allowed"), scope["path"])

    def _is_known(self, name: str) -> bool:
        """Return whether a name is allowed, or can only mean this machine, because browsers never look it up in DNS."""
        if name in self._hosts or name.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or bool(address.version == 6 and (v4 := address.ipv4_mapped) and v4.is_loopback)


class SameOrigin:
    """A guard that refuses requests from web pages of other origins, except the `allowed` ones; `*` allows all.

    Requests without Origin pass: they do not come from a browser.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = frozenset(allowed)

    def __call__(self, scope: Scope) -> Response | None:
        if scope["type"] != "http" or scope["method"] in _HARMLESS or self._is_welcome(scope):
            return None
        message = (
            "web pages of other origins may not use this server; start it with --cors-origin to allow one (under "
            "Ray: cors_origins=)"
        )
        return respond(HTTPError(403, message, code="origin_not_allowed"), scope["path"])

    def _is_welcome(self, scope: Scope) -> bool:
        origin = header_of(scope, b"origin")
        if origin is None or origin in self._allowed or "*" in self._allowed:
            return True
        host = header_of(scope, b"host")
        return bool(host) and origin in (f"http://{host}", f"https://{host}")


class ApiKeys:
    """A guard that requires one of `keys`, if there are any. `api_key_of` returns the key of a request later.

    Every key is compared, each in constant time, so that the response time reveals nothing about them.

    Args:
        metrics_key: gives access to `/metrics` only. If set, `/metrics` requires it or a client's key.
    """

    def __init__(self, keys: Sequence[str], metrics_key: str | None = None) -> None:
        self._keys = [(key, _digest(key.encode())) for key in keys]
        self._metrics_digest = None if metrics_key is None else _digest(metrics_key.encode())

    def __call__(self, scope: Scope) -> Response | None:
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
            return respond(HTTPError(401, message, code="invalid_api_key"), scope["path"], headers)
        scope.setdefault("state", {})["api_key"] = key
        return None

    def _opens_metrics(self, scope: Scope) -> bool:
        sent = (_bearer_of(header_of(scope, b"authorization") or "") or "").strip(" \t")
        return hmac.compare_digest(_digest(sent.encode("latin-1")), self._metrics_digest or b"")

    def _known(self, sent: str | None) -> str | None:
        sent = (sent or "").strip(" \t")  # other white space is part of the key
        given, known = _digest(sent.encode("latin-1")), None
        for key, digest in self._keys:
            if hmac.compare_digest(given, digest):
                known = key
        return known


def _bearer_of(authorization: str) -> str | None:
    scheme, _, sent = authorization.partition(" ")
    return sent if scheme.lower() == "bearer" else None


def _keys_of(options: ServerOptions) -> ApiKeys:
    keys = checked_keys(options.api_keys)
    if options.metrics_key is not None:
        checked_keys([options.metrics_key])
    return ApiKeys(keys, options.metrics_key)


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


def _name_of(host: str) -> str:
    """Return the name in a Host header: lower case, without port, brackets of IPv6 and final dot.

    >>> [_name_of(host) for host in ("LocalHost.:8000", "[::1]:8000", "127.0.0.1")]
    ['localhost', '::1', '127.0.0.1']
    """
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].removesuffix(".").lower()


def _check(origin: str) -> None:
    parts = urlsplit(origin)
    is_bare = not (parts.path or parts.query or parts.fragment or parts.username)
    if origin != "*" and not (parts.scheme and parts.netloc and is_bare):
        raise InvalidParameter(
            f"the origin {origin!r:.80} is not of the form https://example.com[:port]; remove the path"
        )


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()
