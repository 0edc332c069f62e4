"""A request's deltas, for an event loop: the engine's thread wakes the loop, and no thread waits for a reply.

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
from ..engine.generation_stream import GenerationStream
from ..errors import EngineClosed, RadixLMError
from .request_log import RequestRecord

CANCELLING_S = 1.0  # how long the log waits for the counts of a request that was cancelled
Submit = Callable[[Callable[[], None]], GenerationStream]
"""Hands a request to the engine; gets the callback for `on_ready`."""
Run = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs the submission, in a thread where the prompt is long: tokenizing takes a while."""


class Waker:
    """Wakes tasks of an event loop from the engine's thread, all tasks of a step by one call.

    Each call asks the kernel, and gives the interpreter's lock to the loop's thread. With one call a reply, the
    engine's thread waited until the first reply was sent before it could hand over the second.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: deque[asyncio.Event] = deque()
        self._is_called = False

    def set(self, event: asyncio.Event) -> None:
        """Set an event of the loop. Any thread may call this; it does not wait."""
        self._ready.append(event)  # before the look at the flag, which is lowered before the look at the events
        if not self._is_called and not self._loop.is_closed():
            self._is_called = True
            self._loop.call_soon_threadsafe(self._set_all)

    def _set_all(self) -> None:
        self._is_called = False
        while self._ready:
            self._ready.popleft().set()


class ReplyStream:
    """One request's reply: iterate it once, or await `result`. Left as a context manager, it is cancelled."""

    def __init__(self, stream: GenerationStream, ready: asyncio.Event, record: RequestRecord | None = None) -> None:
        self.stream = stream
        self._ready = ready
        self._record = record
        self._has_ended = False
        self.before_waiting: Callable[[], Awaitable[None]] | None = None
        """Awaited when there is no delta yet, for a caller that has something to do before it waits for one."""

    @classmethod
    async def open(cls, submit: Submit, run: Run, waker: Waker, record: RequestRecord | None = None) -> Self:
        """Submit a request, by `run`. `record` gets its completion.

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
        """The deltas, each as soon as it arrives.

        Raises:
            EngineError: the request failed; EngineClosed if the engine was closed meanwhile.
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
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, as far as is known."""
        return self.stream.num_prompt_tokens

    @property
    def num_swallowed(self) -> int:
        """How many characters the reply's tokens begin with that are not in its text."""
        return self.stream.num_swallowed

    async def result(self) -> Completion:
        """Wait for the end; after iterating, it is there at once."""
        self.stream.skip_to_end()
        async for _ in self:
            pass
        return self.stream.result()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
        if self._record is not None and not self._has_ended:
            self.stream.skip_to_end()
            with contextlib.suppress(TimeoutError, RadixLMError):
                async with asyncio.timeout(CANCELLING_S):
                    while await self._next() is not None:
                        pass

    def cancel(self) -> None:
        """End the request as soon as possible; harmless when it has ended."""
        self.stream.cancel()

    async def _next(self) -> Delta | None:
        """The next delta; None after the last one, whose completion goes to the record."""
        while True:
            self._ready.clear()  # before polling: what comes after the poll sets it again
            try:
                delta = self.stream.poll()
            except StopIteration:
                return None
            except RadixLMError:
                self._has_ended = True
                raise
            if delta is not None:
                break
            if self.before_waiting is not None and not self._ready.is_set():
                await self.before_waiting()
            await self._ready.wait()
        if delta.finish_reason is not None:
            self._has_ended = True
            if self._record is not None:
                self._record.completions.append(self.stream.result())
        return delta
