"""A request's deltas, for an event loop: the engine's thread wakes the loop, no thread waits for a reply.

Knows when there is something to read, not what it says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from starlette.concurrency import run_in_threadpool

from ..completion import Completion, Delta
from ..engine import GenerationStream
from ..errors import EngineClosed

Submit = Callable[[Callable[[], None]], GenerationStream]
"""Hands a request to the engine; gets the callback for `on_ready`."""


class ReplyStream:
    """One request's reply: iterate it once, or take `result`; left as a context manager, it is cancelled."""

    def __init__(self, stream: GenerationStream, ready: asyncio.Event) -> None:
        self._stream = stream
        self._ready = ready

    @classmethod
    async def open(cls, submit: Submit) -> Self:
        """Submit a request; tokenizing a long prompt happens in a worker thread.

        Raises:
            InvalidRequest: the engine refuses the request.
        """
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(ready.set)

        return cls(await run_in_threadpool(submit, wake), ready)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """The deltas, each as soon as it is there.

        Raises:
            EngineError: the request failed; EngineClosed if the engine was closed under it.
        """
        while True:
            self._ready.clear()  # before polling: what comes after the poll sets it again
            try:
                while (delta := self._stream.poll()) is not None:
                    if delta.finish_reason == "cancelled":
                        raise EngineClosed("the server is stopping; send the request again later")
                    yield delta
            except StopIteration:
                return
            await self._ready.wait()

    async def result(self) -> Completion:
        """Wait for the end; after iterating, it is there at once."""
        self._stream.skip_to_end()
        async for _ in self:
            pass
        return self._stream.result()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.cancel()
