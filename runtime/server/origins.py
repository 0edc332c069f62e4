"""Which web pages may have a browser send requests here: none but the server's own, unless asked.

CORS alone keeps pages from reading answers, not from sending: a page anywhere could have its visitor's browser fill
the queue of a server on their machine. Knows headers, not routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import InvalidParameter
from .errors import HTTPError, respond

_HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})
_EXPOSED = ("retry-after", "x-request-id")


def origin_middleware(allowed: Sequence[str]) -> list[Middleware]:
    """What lets pages of the `allowed` origins in, and turns away those of others; `*` lets in all.

    Raises:
        InvalidParameter: an origin is not `scheme://host[:port]`.
    """
    for origin in allowed:
        _check(origin)
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(allowed),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=_EXPOSED,
    )
    return [*([cors] if allowed else []), Middleware(SameOrigin, allowed=allowed)]


class SameOrigin:
    """An ASGI middleware that refuses what a page of another origin sends; who is no browser sends no origin."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in _HARMLESS and not self._is_welcome(Headers(scope=scope)):
            message = "pages of other sites may not send requests here; start the server with --cors-origin for those"
            return await respond(HTTPError(403, message, code="origin_not_allowed"))(scope, receive, send)
        await self._app(scope, receive, send)

    def _is_welcome(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if origin is None or origin in self._allowed or "*" in self._allowed:
            return True
        host = headers.get("host", "")
        return bool(host) and origin in (f"http://{host}", f"https://{host}")


def _check(origin: str) -> None:
    parts = urlsplit(origin)
    is_bare = not (parts.path or parts.query or parts.fragment or parts.username)
    if origin != "*" and not (parts.scheme and parts.netloc and is_bare):
        raise InvalidParameter(f"the origin {origin!r:.80} is not of the form https://example.com[:port], without path")
