"""One header of a request, for middlewares that look at each request and need no object with all of them.

Knows ASGI's scope, not what headers mean.
"""

from __future__ import annotations

from starlette.types import Scope


def header_of(scope: Scope, name: bytes) -> str | None:
    """The first header of a name, which is in small letters; None if there is none.

    >>> header_of({"headers": [(b"host", b"localhost"), (b"accept", b"*/*")]}, b"host")
    'localhost'
    """
    for key, value in scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return None
