"""Call an ASGI application without a socket: one request in, batches of response messages out.

So requests can reach a server in another process over any channel that carries Python values. Knows ASGI, not the
served application.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Scope

_PLAIN = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "client")


def plain_scope(scope: Scope) -> dict[str, Any]:
    """Return the parts of a request's scope that can be sent to another process."""
    plain = {name: scope[name] for name in _PLAIN if name in scope}
    return plain | {"headers": [(bytes(name), bytes(value)) for name, value in scope["headers"]]}


async def answer_of(app: ASGIApp, scope: Scope, body: bytes) -> AsyncGenerator[list[Message]]:
    """Yield the response's messages, in batches of all that are ready; if closed early, stop the application.

    Raises:
        Exception: raised by the application, unless its response is complete. Starlette answers 500 and then raises.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    is_gone = asyncio.Event()
    requests = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if not is_gone.is_set():
            messages.put_nowait(message)

    async def run() -> None:
        try:
            await app({**scope, "asgi": {"version": "3.0"}, "extensions": {}, "state": {}}, receive, send)
        finally:
            messages.put_nowait(None)

    running = asyncio.create_task(run())
    try:
        is_over = is_whole = False
        while not is_over:
            batch = [await messages.get()]
            while not messages.empty():
                batch.append(messages.get_nowait())
            is_over = batch[-1] is None
            whole = [message for message in batch if message is not None]
            is_whole = is_whole or any(_is_last(message) for message in whole)
            if whole:
                yield whole
        if not is_whole:
            await running
    finally:
        is_gone.set()
        with suppress(Exception):  # raised above, unless the caller closed this early
            await running


def _is_last(message: Message) -> bool:
    return message["type"] == "http.response.body" and not message.get("more_body", False)
