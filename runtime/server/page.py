"""The page at `/`: a chat, and a picture of the cache. Files of the package, as they are; nothing is built.

Knows the files and the headers that fence them in. They hold no secret and are served without a key: what they show,
they ask the API for, with the key that the user gives them.
"""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_SCRIPTS = (
    *("main", "api", "chat", "elements", "inspector", "key"),
    *("request_list", "settings", "tree_view"),
)
_FILES = {
    "/": ("index.html", "text/html"),
    "/static/icon.svg": ("icon.svg", "image/svg+xml"),
    **{f"/static/{name}.css": (f"{name}.css", "text/css") for name in ("page", "chat", "cache")},
    **{f"/static/{name}.js": (f"{name}.js", "text/javascript") for name in _SCRIPTS},
}
PAGE_PATHS = frozenset(_FILES)

# What the model writes is hostile: even if some of it came to be markup, it could load, run and send nothing.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # ask again each time, which the ETag makes cheap
}


def page_routes() -> list[Route]:
    """A route for each file, read once."""
    static = files(__package__) / "static"
    return [
        Route(path, _File((static / name).read_bytes(), media_type).answer, methods=["GET"])
        for path, (name, media_type) in _FILES.items()
    ]


class _File:
    def __init__(self, content: bytes, media_type: str) -> None:
        self._content = content
        self._media_type = media_type
        self._etag = f'"{sha256(content).hexdigest()[:32]}"'

    async def answer(self, request: Request) -> Response:
        """The file, or 304 if the client has it."""
        headers = {**_HEADERS, "ETag": self._etag}
        if self._etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self._content, headers=headers, media_type=self._media_type)
