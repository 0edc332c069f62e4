"""Several replies to one request: opened together, read as they come, left together.

The engine's thread wakes the event loop, and no thread waits for a reply. Knows the order of deltas, and when there is
one to read, not what it says.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from ..engine.completion import Completion, Delta
from ..engine.generation_stream import GenerationStream
from ..engine.request_options import require_few_logprobs
from ..engine.sampling_params import SamplingParams
from ..errors import EngineClosed, InvalidParameter, RadixLMError
from .request_log import RequestRecord

CANCELLING_S = 1.0  # how long the log waits for the counts of a request that was cancelled
_NUM_SEEDS = 2**64
Run = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs the submission, in a thread where the prompt is long: tokenizing takes a while."""


class Ask(Protocol):
    """Hands the request of one choice to the engine; `partial(engine.stream, prompt, params)` is one."""

    def __call__(self, *, on_ready: Callable[[], None]) -> GenerationStream: ...


def params_of_choices(params: SamplingParams, n: int) -> list[SamplingParams]:
    """The parameters of each of `n` replies to one prompt. Only the seeds differ, so that the replies do, too.

    >>> [params.seed for params in params_of_choices(SamplingParams(seed=7), 3)]
    [7, 8, 9]
    """
    if params.seed is None:
        return [params] * n
    seeds = (params.seed + number for number in range(n))
    return [replace(params, seed=seed - _NUM_SEEDS if seed >= _NUM_SEEDS else seed) for seed in seeds]


class Choices:
    """The replies to one request: iterate them once, or take `results`.

    Left as a context manager, all are cancelled.

    Attributes:
        before_waiting: awaited by the iteration whenever no delta is there yet.
    """

    def __init__(self, streams: Sequence[ReplyStream]) -> None:
        self._streams = streams
        self.before_waiting: Callable[[], Awaitable[None]] = _nothing

    @classmethod
    async def open(
        cls,
        asks: Sequence[Ask],
        run: Run,
        waker: Waker,
        record: RequestRecord | None = None,
        *,
        most: int | None = None,
    ) -> Self:
        """Submit one request for each choice, by `run`: all of them, or none. `record` gets their completions.

        Args:
            most: how many requests the engine takes at once; None: any number.

        Raises:
            InvalidParameter: there are more than that, and sending the request again cannot help.
            InvalidRequest, EngineError: the engine refuses one; those before it are cancelled.
        """
        if most is not None and len(asks) > most:
            message = f"{len(asks)} replies are asked for, and this server takes {most} at once; ask for fewer"
            raise InvalidParameter(message)  # of n, or of the prompts
        if len(asks) == 1:  # as nearly always
            return cls([await ReplyStream.open(asks[0], run, waker, record)])
        async with AsyncExitStack() as opened:
            streams = [
                await opened.enter_async_context(await ReplyStream.open(ask, run, waker, record)) for ask in asks
            ]
            opened.pop_all()
        return cls(streams)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        """Each delta with the index of its choice, as soon as it arrives.

        Raises:
            EngineError: one of the requests failed.
        """
        if len(self._streams) == 1:  # as nearly always: no task, no queue
            self._streams[0].before_waiting = self.before_waiting
            async for delta in self._streams[0]:
                yield 0, delta
            return
        arrived: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue(maxsize=len(self._streams))
        readers = [asyncio.create_task(_read(*item, arrived)) for item in enumerate(self._streams)]
        num_open = len(readers)
        try:
            while num_open:
                if arrived.empty():
                    await self.before_waiting()
                index, item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield index, item
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    def stream(self, index: int) -> GenerationStream:
        """The engine's stream of one choice."""
        return self._streams[index].stream

    async def result(self, index: int) -> Completion:
        """Wait for the end of one choice; after its last delta, it is there at once."""
        return await self._streams[index].result()

    def num_prompt_tokens(self, index: int) -> int:
        """Tokens of one choice's prompt, as far as is known."""
        return self._streams[index].num_prompt_tokens

    def require_few_logprobs(self, num_top: int) -> None:
        """Raise InvalidParameter if the prompts have too many tokens for each to come with `num_top` others."""
        require_few_logprobs(sum(stream.num_prompt_tokens for stream in self._streams), num_top)

    def num_swallowed(self, index: int) -> int:
        """How many characters the tokens of one choice begin with that are not in its text."""
        return self._streams[index].num_swallowed

    async def results(self) -> list[Completion]:
        """Wait for the end of all.

        Raises:
            EngineError: one of the requests failed; the others are not waited for.
        """
        if len(self._streams) == 1:  # as nearly always: no task
            return [await self._streams[0].result()]
        return await asyncio.gather(*(stream.result() for stream in self._streams))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._streams:  # all first: none is computed while another is waited for
            stream.cancel()
        leaving = [stream.__aexit__(kind, error, trace) for stream in self._streams]
        await (leaving[0] if len(leaving) == 1 else asyncio.gather(*leaving))  # as nearly always: no task


async def _nothing() -> None:
    pass


async def _read(index: int, stream: ReplyStream, arrived: asyncio.Queue[tuple[int, Delta | Exception | None]]) -> None:
    """Put the deltas of one choice, then None; or the error that ends it."""
    try:
        async for delta in stream:
            await arrived.put((index, delta))
        await arrived.put((index, None))
    except Exception as error:
        await arrived.put((index, error))


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
    async def open(cls, ask: Ask, run: Run, waker: Waker, record: RequestRecord | None = None) -> Self:
        """Submit a request, by `run`. `record` gets its completion.

        Raises:
            InvalidRequest, EngineError: the engine refuses the request, or `run` does.
        """
        ready = asyncio.Event()
        submitted: list[GenerationStream] = []
        try:
            await run(lambda: submitted.append(ask(on_ready=partial(waker.set, ready))))
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
