"""Answer 503 while the model loads, and then pass requests on to the application that serves it.

Knows ASGI, not engines.
"""

from __future__ import annotations

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import HTTPError, respond

RETRY_AFTER_S = 2
_MESSAGE = f"the model is loading; send the request again in {RETRY_AFTER_S} s"


class Loading:
    """An ASGI application that stands for another one until that is ready.

    Attributes:
        app: the application that answers; None: every answer is 503. Any thread may set it.
    """

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await (self.app or _not_yet(scope["path"]))(scope, receive, send)
        elif self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1013})


def _not_yet(path: str) -> Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    if path == "/health":
        body = msgspec.json.encode({"status": "loading", "reason": _MESSAGE})
        return Response(body, 503, headers, media_type="application/json")
    return respond(HTTPError(503, _MESSAGE, code="loading"), path, headers)
