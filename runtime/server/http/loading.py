"""Respond 503 while the model loads, and then pass requests on to the application that serves it.

Knows ASGI, not engines.
"""

from __future__ import annotations

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import HTTPError, respond

RETRY_AFTER_S = 2
LIVE = "/health/live"
_HEALTH = ("/health", "/health/ready")


class Loading:
    """An ASGI application that replaces another one until that is ready.

    Any thread may set the attributes.

    Attributes:
        app: the application that serves; while None, every response except `/health/live` is 503.
        stage: the stage of loading or compiling.
        fraction: overall progress, 0 to 1; None if unknown.
    """

    def __init__(self) -> None:
        self.app: ASGIApp | None = None
        self.stage = "start"
        self.fraction: float | None = None

    def progressed(self, stage: str, fraction: float | None) -> None:
        """Set the stage and progress that clients see."""
        self.stage = stage
        self.fraction = fraction

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass requests to the application once it is loaded; until then answer that it is loading."""
        if scope["type"] == "http":
            await (self.app or self._not_yet(scope))(scope, receive, send)
        elif self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1013})

    def _not_yet(self, scope: Scope) -> Response:
        """Return 503 with the stage and the progress of loading, or 200 to a check that the process lives."""
        path = scope["path"]
        if path == LIVE:
            return live()
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        percent = None if self.fraction is None else int(100 * self.fraction)
        stage = self.stage if percent is None else f"{self.stage}, {percent} %"
        message = f"the model is loading ({stage}); send the request again in {RETRY_AFTER_S} s"
        if path in _HEALTH:
            state = {"status": "loading", "reason": message, "stage": self.stage, "percent": percent}
            return Response(msgspec.json.encode(state), 503, headers, media_type="application/json")
        return respond(HTTPError(503, message, code="loading"), scope, headers)


def live() -> Response:
    """Return the response of `/health/live`: the process is alive, whatever its models do."""
    return Response(b'{"status":"live"}', media_type="application/json")
