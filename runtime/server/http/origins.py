"""Refuse requests that a browser sends for web pages of other sites, unless these are allowed.

CORS alone keeps pages from reading answers, not from sending requests: a page anywhere could let its visitor's browser
fill the queue of a server on the visitor's machine. And a page may let its own name point to that machine (DNS
rebinding): the browser takes it for the server's own page then, and only the name in Host tells. Knows headers, not
routes.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Scope

from ...errors import InvalidParameter
from ..errors import HTTPError, respond
from ..field_policy import IGNORED_HEADER
from .headers import header_of

_HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})
_EXPOSED = ("retry-after", "x-request-id", IGNORED_HEADER)
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


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
            "may have made that name point here; start it with --api-key, under Ray with api_keys= or hosts=, "
            "or have a proxy send Host: localhost"
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
