"""Several replies to one request: opened together, read as they come, left together.

Knows their order, not what they say; `reply_stream.py` reads one of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

from ..engine.completion import Completion, Delta
from ..engine.generation_stream import GenerationStream
from ..engine.request_options import require_few_logprobs
from ..engine.sampling_params import SamplingParams
from ..errors import InvalidParameter
from .reply_stream import ReplyStream, Run, Waker
from .request_log import RequestRecord

_NUM_SEEDS = 2**64


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
            return cls([await _open(asks[0], run, waker, record)])
        async with AsyncExitStack() as opened:
            streams = [await opened.enter_async_context(await _open(ask, run, waker, record)) for ask in asks]
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


async def _open(ask: Ask, run: Run, waker: Waker, record: RequestRecord | None) -> ReplyStream:
    return await ReplyStream.open(lambda wake: ask(on_ready=wake), run, waker, record)


async def _read(index: int, stream: ReplyStream, arrived: asyncio.Queue[tuple[int, Delta | Exception | None]]) -> None:
    """Put the deltas of one choice, then None; or the error that ends it."""
    try:
        async for delta in stream:
            await arrived.put((index, delta))
        await arrived.put((index, None))
    except Exception as error:
        await arrived.put((index, error))
