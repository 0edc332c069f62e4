"""The web UI at `/`: a chat, and a picture of the cache. Static files of the package; nothing is built.

Ollama's clients request `/` to see whether the server runs. Only browsers ask for HTML there and get the web UI.

Knows the files and their security headers. They contain no secret and are served without a key: they request all data
from the API, with the key that the user enters.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePath

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", "": "text/plain"}
_STATIC = files(__package__) / "static"


def _list_files(folder: Traversable, path: str) -> Iterator[tuple[str, Traversable]]:
    """Yield each file of a folder and of those in it, with its URL path; that of `index.html` is `/`."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _list_files(entry, f"{path}/{entry.name}")
        else:
            yield "/" if entry.name == "index.html" else f"{path}/{entry.name}", entry


_FILES = dict(_list_files(_STATIC, "/static"))
PAGE_PATHS = frozenset(_FILES)
OLLAMA_IS_RUNNING = "Ollama is running"
"""The text that Ollama's clients expect."""

# Text of the model is hostile: even if it were taken for markup, it could not load, run or send anything.
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
    "Cache-Control": "no-cache",  # revalidate each time, which the ETag makes cheap
}


def page_routes() -> list[Route]:
    """Return the HTTP routes of the web UI, one for each of its files, which are read once."""
    return [
        Route(
            path,
            (_Index if path == "/" else _File)(file.read_bytes(), _TYPES[PurePath(file.name).suffix]).answer,
            methods=["GET"],
        )
        for path, file in _FILES.items()
    ]


class _File:
    def __init__(self, content: bytes, media_type: str) -> None:
        self._content = content
        self._media_type = media_type
        self._etag = f'"{sha256(content).hexdigest()[:32]}"'

    async def answer(self, request: Request) -> Response:
        """Return the file, or 304 if the client has it."""
        headers = {**_HEADERS, "ETag": self._etag}
        if self._etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self._content, headers=headers, media_type=self._media_type)


class _Index(_File):
    """The web UI's HTML for browsers, and Ollama's status line for other clients."""

    async def answer(self, request: Request) -> Response:
        """Return the web UI to a browser, which asks for HTML, and Ollama's line of text to other clients."""
        if "text/html" in request.headers.get("accept", ""):
            response = await super().answer(request)
        else:
            response = Response(OLLAMA_IS_RUNNING, headers={"Cache-Control": "no-cache"}, media_type="text/plain")
        response.headers["Vary"] = "Accept"
        return response
