"""A request's deltas, for an event loop: the engine's thread wakes the loop, no thread waits for a reply.

Knows when there is something to read, not what it says.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
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


class Waker:
    """Lets an event loop's tasks go on, from the engine's thread: all that a step has something for by one call.

    Each such call asks the kernel, and gives the interpreter's lock to the loop's thread: with one call a reply, the
    engine's thread waited for the first reply to be sent before it could hand over the second.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: deque[asyncio.Event] = deque()
        self._is_called = False

    def set(self, event: asyncio.Event) -> None:
        """Set an event of the loop's; any thread may call this, and it does not wait."""
        self._ready.append(event)  # before the look at the flag, which is lowered before the look at the events
        if not self._is_called and not self._loop.is_closed():
            self._is_called = True
            self._loop.call_soon_threadsafe(self._set_all)

    def _set_all(self) -> None:
        self._is_called = False
        while self._ready:
            self._ready.popleft().set()


class ReplyStream:
    """One request's reply: iterate it once, or take `result`; left as a context manager, it is cancelled."""

    def __init__(self, stream: GenerationStream, ready: asyncio.Event, record: RequestRecord | None = None) -> None:
        self._stream = stream
        self._ready = ready
        self._record = record
        self._has_ended = False

    @classmethod
    async def open(cls, submit: Submit, run: Run, waker: Waker, record: RequestRecord | None = None) -> Self:
        """Submit a request, by `run`. Its end is told to `record`.

        Raises:
            InvalidRequest, EngineError: the engine refuses the request, or `run` does.
        """
        ready = asyncio.Event()
        submitted: list[GenerationStream] = []
        try:
            await run(lambda: submitted.append(submit(partial(waker.set, ready))))
        except BaseException:  # the client left while a thread handed the request over
            for stream in submitted:
                stream.cancel()
            raise
        return cls(submitted[0], ready, record)

    def __aiter__(self) -> Self:
        """The deltas, each as soon as it is there.

        Raises:
            EngineError: the request failed; EngineClosed if the engine was closed under it.
        """
        return self

    async def __anext__(self) -> Delta:
        delta = await self._next()
        if delta is None:
            raise StopAsyncIteration
        if delta.finish_reason == "cancelled":
            raise EngineClosed("the server is stopping; send the request again later")
        return delta

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
                async with asyncio.timeout(CANCELLING_S):
                    while await self._next() is not None:
                        pass

    def cancel(self) -> None:
        """End the request as soon as possible; harmless when it has ended."""
        self._stream.cancel()

    async def _next(self) -> Delta | None:
        """What the engine says next; None after its last delta, of which the record is told."""
        while True:
            self._ready.clear()  # before polling: what comes after the poll sets it again
            try:
                delta = self._stream.poll()
            except StopIteration:
                return None
            except RadixLMError:
                self._has_ended = True
                raise
            if delta is not None:
                break
            await self._ready.wait()
        if delta.finish_reason is not None:
            self._has_ended = True
            if self._record is not None:
                self._record.completions.append(self._stream.result())
        return delta
