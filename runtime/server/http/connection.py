"""A client's connection: detect that it has disconnected, and read a header of its request.

Knows ASGI, not what headers mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Scope

T = TypeVar("T")
NOTICED_AFTER_S = 0.02  # shorter work ends before the listening task is started


class ClientGone(Exception):
    """The client closed the connection before its response was ready."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, and cancel it as soon as the client disconnects, but not before `NOTICED_AFTER_S`.

    The request's body must have been read before. `work` has always ended when this returns. It runs in the caller's
    task, because a task of its own would cost every request two more turns of the event loop.

    Raises:
        ClientGone: the client disconnected first.
    """
    worker, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert worker is not None, "there is no task to cancel"
    is_gone = has_ended = False
    leaving: asyncio.Future[None] | None = None

    def listen() -> None:
        nonlocal leaving
        leaving = loop.create_task(_disconnected(receive))
        leaving.add_done_callback(leave)

    def leave(leaving: asyncio.Future[None]) -> None:
        nonlocal is_gone
        if not leaving.cancelled() and not has_ended:  # the loop may have queued this call before the end
            is_gone = True
            worker.cancel()

    timer = loop.call_later(NOTICED_AFTER_S, listen)
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and worker.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        has_ended = True
        timer.cancel()
        if leaving is not None:
            leaving.remove_done_callback(leave)
            leaving.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def header_of(scope: Scope, name: bytes) -> str | None:
    """Return the first header with this lower-case name, or None.

    >>> header_of({"headers": [(b"host", b"localhost"), (b"accept", b"*/*")]}, b"host")
    'localhost'
    """
    for key, value in scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return None
