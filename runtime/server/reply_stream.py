"""A request's deltas, for an event loop: the engine's thread wakes the loop, no thread waits for a reply.

Knows when there is something to read, not what it says.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Self

from ..engine.completion import Completion, Delta
from ..engine.engine import GenerationStream
from ..errors import EngineClosed, RadixLMError
from .request_log import RequestRecord

CANCELLING_S = 1.0  # for the step that runs; what a request was until then is only for the log
Submit = Callable[[Callable[[], None]], GenerationStream]
"""Hands a request to the engine; gets the callback for `on_ready`."""
Run = Callable[[Callable[[], None]], Awaitable[None]]
"""Does this in a thread: tokenizing a long prompt takes a while."""


class ReplyStream:
    """One request's reply: iterate it once, or take `result`; left as a context manager, it is cancelled."""

    def __init__(self, stream: GenerationStream, ready: asyncio.Event, record: RequestRecord | None = None) -> None:
        self._stream = stream
        self._ready = ready
        self._record = record
        self._has_ended = False

    @classmethod
    async def open(cls, submit: Submit, run: Run, record: RequestRecord | None = None) -> Self:
        """Submit a request, by `run`. Its end is told to `record`.

        Raises:
            InvalidRequest, EngineError: the engine refuses the request, or `run` does.
        """
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(ready.set)

        submitted: list[GenerationStream] = []
        try:
            await run(lambda: submitted.append(submit(wake)))
        except BaseException:  # the client left while a thread handed the request over
            for stream in submitted:
                stream.cancel()
            raise
        return cls(submitted[0], ready, record)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """The deltas, each as soon as it is there.

        Raises:
            EngineError: the request failed; EngineClosed if the engine was closed under it.
        """
        async for delta in self._deltas():
            if delta.finish_reason == "cancelled":
                raise EngineClosed("the server is stopping; send the request again later")
            yield delta

    @property
    def num_swallowed(self) -> int:
        """How many characters the reply's tokens begin with that are not in its text."""
        return self._stream.num_swallowed

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
        self.cancel()
        if self._record is not None and not self._has_ended:
            self._stream.skip_to_end()
            with contextlib.suppress(TimeoutError, RadixLMError):
                async with asyncio.timeout(CANCELLING_S), aclosing(self._deltas()) as rest:
                    async for _ in rest:
                        pass

    def cancel(self) -> None:
        """End the request as soon as possible; harmless when it has ended."""
        self._stream.cancel()

    async def _deltas(self) -> AsyncGenerator[Delta]:
        """What the engine says, and at its end what the record wants to know."""
        while True:
            self._ready.clear()  # before polling: what comes after the poll sets it again
            try:
                while (delta := self._stream.poll()) is not None:
                    self._note(delta)
                    yield delta
            except StopIteration:
                return
            except RadixLMError:
                self._has_ended = True
                raise
            await self._ready.wait()

    def _note(self, delta: Delta) -> None:
        if delta.finish_reason is None:
            return
        self._has_ended = True
        if self._record is not None:
            self._record.completions.append(self._stream.result())
