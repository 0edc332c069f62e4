"""Make a response without a connection: it is stored as in progress, and again when it ends.

Knows the order of these steps; `responses.py` makes the response itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from starlette.responses import Response

from ...engine.completion import Completion
from ...errors import InvalidParameter
from ..choices import Choices
from ..errors import ErrorBody, describe
from ..served import Served, json_response
from ..stored.background import as_cancelled
from .kept_responses import NOT_KEPT, Continuation
from .response_replies import ResponseReply
from .response_requests import ResponseRequest


def require_stored(served: Served, body: ResponseRequest) -> None:
    """Raise InvalidParameter if a request for a response in the background has another wish that excludes it."""
    if not body.background:
        return
    if body.stream:
        message = "stream is set, and a response in the background is not streamed; poll GET /v1/responses/ID"
        raise InvalidParameter(message, param="stream")
    if served.stored is None:
        raise InvalidParameter(f"background is true, and {NOT_KEPT}; wait for the reply", param="background")
    if not body.is_kept:
        message = "background is true, and the response would not be stored; set store to true"
        raise InvalidParameter(message, param="background")


async def begin(
    continuation: Continuation,
    begun: ResponseReply,
    choices: Choices,
    *,
    ended: Callable[[Completion], Awaitable[None]],
    failed: Callable[[ErrorBody], ResponseReply],
) -> Response:
    """Return a response that has just begun. A task of the event loop makes it.

    Args:
        choices: the running reply.
        ended: stores the whole response.
        failed: returns the response with an error.

    Raises:
        HTTPError: 404 if the response that it continues was deleted meanwhile.
        StoreOff: it cannot be stored.
    """

    async def work() -> None:
        try:
            async with choices:
                [completion] = await choices.results()
            await ended(completion)
        except asyncio.CancelledError:
            if continuation.background.is_cancelled(begun.id):
                await continuation.change(begun.id, as_cancelled)
            raise
        except Exception as error:
            failure = msgspec.json.encode(failed(describe(error)[1].error))
            await continuation.change(begun.id, lambda response: failure)

    try:
        await continuation.begin(begun.id, msgspec.json.encode(begun))
    except BaseException:
        await choices.leave()
        raise
    await continuation.background.begin(begun.id, work())
    return json_response(begun)
