"""What stands between every request and its endpoint: who may ask, and what becomes of an error.

One middleware asks all guards: each layer of its own costs a stream's every event. Two guards refuse what a browser
sends for web pages of other sites. CORS alone keeps pages from reading answers, not from sending requests: a page
anywhere could let its visitor's browser fill the queue of a server on the visitor's machine. And a page may let its own
name point to that machine (DNS rebinding): the browser takes it for the server's own page then, and only the name in
Host tells. Knows headers, not routes.
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
OPEN_PATHS = frozenset(HEALTH_PATHS) | PAGE_PATHS  # the page asks its user for a key
_NO_HEADER = frozenset("\r\n\0")
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
Guard = Callable[[Scope], Response | None]
"""Returns the answer to a request that is refused."""


def door(options: ServerOptions) -> list[Middleware]:
    """The middlewares of an application whose clients send one of `api_keys` to one of `hosts`.

    Raises:
        InvalidParameter: an API key or an origin is none.
    """
    host, pages = KnownHosts(options.hosts), cors(options.cors_origins)
    others = SameOrigin(options.cors_origins), _keys_of(options)
    if not pages:
        return [Middleware(Guarded, guards=(host, *others))]
    return [Middleware(Guarded, guards=(host,)), *pages, Middleware(Guarded, guards=others)]


class Guarded:
    """An ASGI middleware that passes on what no guard refuses."""

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
    """Routes behind middlewares, the last of which answers errors."""

    def build_middleware_stack(self) -> ASGIApp:
        """Starlette's, without two layers of its own; `Answering` does what they do."""
        app: ASGIApp = Answering(self.router)
        for middleware, args, options in reversed(self.user_middleware):
            app = middleware(app, *args, **options)
        return app


class Answering:
    """An ASGI middleware that answers the errors that are known; others are a mistake of ours."""

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
            await Response(status_code=499)(scope, receive, send)  # nginx's status; only the log sees it


class Endpoint:
    """An ASGI application of a function that answers requests."""

    def __init__(self, answer: Callable[[Request], Awaitable[Response]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(Request(scope, receive, send))
        await response(scope, receive, send)


def cors(allowed: Sequence[str]) -> list[Middleware]:
    """A middleware that answers pages of the `allowed` origins; `*` allows all, none needs none.

    Raises:
        InvalidParameter: an origin is not `scheme://host[:port]`.
    """
    for origin in allowed:
        _check(origin)
    answering = Middleware(
        CORSMiddleware,
        allow_origins=list(allowed),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=_EXPOSED,
        allow_private_network=True,  # a page of an origin that is let in may ask a server in a private network
    )
    return [answering] if allowed else []


def local_hosts(host: str) -> tuple[str, ...]:
    """The names of a server that listens on `host`, where only this machine can connect."""
    return (*LOCAL_HOSTS, host)


class KnownHosts:
    """A guard that refuses requests which were sent to another name than one of `hosts`; none: any name.

    A request without Host does not come from a browser.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)

    def __call__(self, scope: Scope) -> Response | None:
        host = header_of(scope, b"host") if self._hosts else None
        if host is None or self._is_known(_name_of(host)):
            return None
        message = (
            f"this server answers only to names that it knows, as localhost, not to {host!r:.100}: a web page "
            "may have made that name point here; start it with --allowed-host or --api-key, under Ray with api_keys= "
            "or hosts=, or have a proxy send Host: localhost"
        )
        return respond(HTTPError(403, message, code="host_not_allowed"), scope["path"])

    def _is_known(self, name: str) -> bool:
        """True if a name can only mean this server: browsers ask no name server about these."""
        if name in self._hosts or name.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or bool(address.version == 6 and (v4 := address.ipv4_mapped) and v4.is_loopback)


class SameOrigin:
    """A guard that refuses requests from pages of other origins than `allowed`; `*` allows all.

    Only browsers send an origin.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = frozenset(allowed)

    def __call__(self, scope: Scope) -> Response | None:
        if scope["type"] != "http" or scope["method"] in _HARMLESS or self._is_welcome(scope):
            return None
        message = (
            "pages of other sites may not send requests here; start the server with --cors-origin for those, under "
            "Ray with cors_origins="
        )
        return respond(HTTPError(403, message, code="origin_not_allowed"), scope["path"])

    def _is_welcome(self, scope: Scope) -> bool:
        origin = header_of(scope, b"origin")
        if origin is None or origin in self._allowed or "*" in self._allowed:
            return True
        host = header_of(scope, b"host")
        return bool(host) and origin in (f"http://{host}", f"https://{host}")


class ApiKeys:
    """A guard that asks for one of `keys`, if there are any; `api_key_of` returns the key of a request later.

    Every key is compared, each in constant time, so that the time of an answer reveals nothing about them.

    Args:
        metrics_key: opens `/metrics`, and nothing else; if there is one, `/metrics` asks for it or for a client's key.
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
        if key is None:  # as Anthropic's clients send it, beside a token of another server or alone
            key = self._known(header_of(scope, b"x-api-key"))
        if key is None and (scope["type"] != "http" or scope["path"] not in OPEN_PATHS):
            # begins as OpenAI's, by which litellm knows what it is
            message = "Incorrect API key provided: send one that this server knows, as Authorization: Bearer KEY"
            headers = {"WWW-Authenticate": "Bearer"}
            return respond(HTTPError(401, message, code="invalid_api_key"), scope["path"], headers)
        scope.setdefault("state", {})["api_key"] = key
        return None

    def _opens_metrics(self, scope: Scope) -> bool:
        sent = (_bearer_of(header_of(scope, b"authorization") or "") or "").strip(" \t")
        return hmac.compare_digest(_digest(sent.encode("latin-1")), self._metrics_digest or b"")

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


def _keys_of(options: ServerOptions) -> ApiKeys:
    keys = checked_keys(options.api_keys)
    if options.metrics_key is not None:
        checked_keys([options.metrics_key])
    return ApiKeys(keys, options.metrics_key)


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


def _name_of(host: str) -> str:
    """`host` without its port, in small letters; an IPv6 address without its brackets, a name without its last dot.

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
        raise InvalidParameter(f"the origin {origin!r:.80} is not of the form https://example.com[:port], without path")


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()
