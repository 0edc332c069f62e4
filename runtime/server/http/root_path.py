"""Serve under a path prefix, for a proxy that forwards the whole path."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from ...errors import InvalidParameter

_ROOT_PATH = re.compile(r"(/[^/?#\s]+)*/?")


def checked_root_path(root_path: str) -> str:
    """Return the path without a final slash.

    Raises:
        InvalidParameter: it does not begin with a slash, or has a query or an empty part.

    >>> checked_root_path("/llm/"), checked_root_path("/")
    ('/llm', '')
    """
    if not _ROOT_PATH.fullmatch(root_path):
        raise InvalidParameter(f"the root path {root_path!r:.80} is not of the form /path")
    return root_path.removesuffix("/")


class UnderRootPath:
    """An ASGI application that removes the prefix `root_path` from each request's path.

    Requests without it are passed on unchanged, because many proxies remove it themselves.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, its path without the root path if it begins with that."""
        if scope["type"] in ("http", "websocket"):
            rest = scope["path"].removeprefix(self._root_path)
            if rest != scope["path"] and rest.startswith("/"):
                scope = {**scope, "path": rest}
        await self._app(scope, receive, send)
