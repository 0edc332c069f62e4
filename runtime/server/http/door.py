"""What stands between every request and its endpoint: who may ask, and what becomes of an error.

One middleware asks all guards: each layer of its own costs a stream's every event.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ...errors import RadixLMError
from ..errors import answer
from ..request_log import record_of
from .api_keys import ApiKeys, checked_keys
from .disconnect import ClientGone
from .origins import KnownHosts, SameOrigin, cors

Guard = Callable[[Scope], Response | None]
"""Returns the answer to a request that is refused."""


def door(api_keys: Sequence[str], hosts: Sequence[str], cors_origins: Sequence[str]) -> list[Middleware]:
    """The middlewares of an application whose clients send one of `api_keys` to one of `hosts`; as `create_app`.

    Raises:
        InvalidParameter: an API key or an origin is none.
    """
    host, pages = KnownHosts(hosts), cors(cors_origins)
    others = SameOrigin(cors_origins), ApiKeys(checked_keys(api_keys))
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
