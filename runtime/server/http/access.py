"""Access control and error handling around all endpoints: host names, origins, CORS and API keys.

One middleware runs all guards, because each layer adds work to every event of a stream. Two guards refuse requests that
a browser sends on behalf of other web sites. CORS alone keeps pages from reading responses, but not from sending
requests: any page could make its visitor's browser fill the queue of a server on the visitor's machine. A page can also
point its own name to that machine (DNS rebinding). The browser then takes the server for the page's own, and only the
Host header tells them apart. Knows headers, not routes.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ...errors import InvalidParameter, RadixLMError
from ..errors import HTTPError, answer, respond
from ..field_policy import IGNORED_HEADER
from ..request_log import record_of
from ..server_options import ServerOptions
from .api_keys import ApiKeys
from .connection import ClientGone, header_of

_HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})
_EXPOSED = ("retry-after", "x-request-id", IGNORED_HEADER)
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
Guard = Callable[[Scope], Response | None]
"""Returns the response to a refused request, None to let it pass."""


def access_middleware(options: ServerOptions) -> list[Middleware]:
    """Return the middlewares for a server's keys, hosts and origins.

    Raises:
        InvalidParameter: an API key or an origin is invalid.
    """
    host, pages = KnownHosts(options.hosts), cors(options.cors_origins)
    others = SameOrigin(options.cors_origins), ApiKeys.of(options)
    if not pages:
        return [Middleware(AccessGuards, guards=(host, *others))]
    return [Middleware(AccessGuards, guards=(host,)), *pages, Middleware(AccessGuards, guards=others)]


class AccessGuards:
    """An ASGI middleware that passes on requests which no guard refuses."""

    def __init__(self, app: ASGIApp, guards: Sequence[Guard]) -> None:
        self._app, self._guards = app, guards

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer with the first guard's refusal; a refused WebSocket is closed."""
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
        """Run the application, and answer its errors as the path's API does, unless a response has started.

        If the client has gone, 499 is logged.
        """
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
        """Return 403 for a Host header with another name; None if the request may go on."""
        host = header_of(scope, b"host") if self._hosts else None
        if host is None or self._is_known(_name_of(host)):
            return None
        message = (
            f"the host name {host!r:.100} is not allowed, because a web page may have made it point to this server; "
            "start the server with --allowed-host or --api-key (under Ray: hosts= or api_keys=), or let the proxy "
            "send Host: localhost"
        )
        return respond(HTTPError(403, message, code="host_not_allowed"), scope)

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
        """Return 403 for a request that a web page of another origin sends to change something; None for others."""
        if scope["type"] != "http" or scope["method"] in _HARMLESS or self._is_welcome(scope):
            return None
        message = (
            "web pages of other origins may not use this server; start it with --cors-origin to allow one (under "
            "Ray: cors_origins=)"
        )
        return respond(HTTPError(403, message, code="origin_not_allowed"), scope)

    def _is_welcome(self, scope: Scope) -> bool:
        """Return whether the Origin header is missing, allowed, or that of the server itself."""
        origin = header_of(scope, b"origin")
        if origin is None or origin in self._allowed or "*" in self._allowed:
            return True
        host = header_of(scope, b"host")
        return bool(host) and origin in (f"http://{host}", f"https://{host}")


def _name_of(host: str) -> str:
    """Return the name in a Host header: lower case, without port, brackets of IPv6 and final dot.

    >>> [_name_of(host) for host in ("LocalHost.:8000", "[::1]:8000", "127.0.0.1")]
    ['localhost', '::1', '127.0.0.1']
    """
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].removesuffix(".").lower()


def _check(origin: str) -> None:
    """Raise InvalidParameter unless an allowed origin is `*`, or a scheme and host without a path."""
    parts = urlsplit(origin)
    is_bare = not (parts.path or parts.query or parts.fragment or parts.username)
    if origin != "*" and not (parts.scheme and parts.netloc and is_bare):
        raise InvalidParameter(
            f"the origin {origin!r:.80} is not of the form https://example.com[:port]; remove the path"
        )
