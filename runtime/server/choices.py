"""Several replies to one request: read together as they come, left together.

The engine's thread wakes the event loop, and no thread waits for a reply. Knows the order of deltas, and when there is
one to read, not what it says.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Self

from ..engine.completion import Completion, Delta
from ..engine.generation_stream import GenerationStream, StartRequest
from ..engine.request_options import require_few_logprobs
from ..engine.sampling_params import SamplingParams
from ..errors import EngineClosed, RadixLMError
from .prefill_log import PrefillLog
from .request_log import RequestRecord

CANCELLING_S = 1.0  # how long the log waits for the counts of a request that was cancelled
_NUM_SEEDS = 2**64


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

    Args:
        waker: wakes the tasks of the running loop.
        record: gets the completions, in the order in which they end.

    Attributes:
        before_waiting: awaited by the iteration whenever no delta is there yet.
    """

    def __init__(self, waker: Waker, record: RequestRecord | None = None) -> None:
        self._record = record
        self._streams: list[GenerationStream] = []
        self._running: dict[int, GenerationStream] = {}  # by the index of the choice
        self._ready = asyncio.Event()
        self._wake = partial(waker.set, self._ready)
        self.before_waiting: Callable[[], Awaitable[None]] = _nothing
        self._prefill_log = None if record is None else PrefillLog(record, self._streams, self._running.values())

    def submit(self, ask: StartRequest) -> None:
        """Hand the request of one more choice to the engine; any thread may, one at a time.

        Raises:
            InvalidRequest, EngineError: the engine refuses it.
        """
        stream = ask(on_ready=self._wake)
        self._running[len(self._streams)] = stream
        self._streams.append(stream)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        """Each delta with the index of its choice, as soon as it arrives.

        Raises:
            EngineError: one of the requests failed; EngineClosed if the engine was closed meanwhile.
        """
        while self._running:
            arrived = self._arrived()
            if not arrived:
                await self._wait()
            for index, item in arrived:
                if isinstance(item, RadixLMError):
                    raise item
                if item.finish_reason == "cancelled":
                    raise EngineClosed("the server is stopping; send the request again later")
                yield index, item

    def stream(self, index: int) -> GenerationStream:
        """The engine's stream of one choice."""
        return self._streams[index]

    def result(self, index: int) -> Completion:
        """One choice, whose last delta was read."""
        return self._streams[index].result()

    async def results(self) -> list[Completion]:
        """Wait for the end of all; after iterating, it is there at once.

        Raises:
            EngineError: one of the requests failed; the others are not waited for.
        """
        for stream in self._running.values():
            stream.skip_to_end()
        async for _ in self:
            pass
        return [stream.result() for stream in self._streams]

    def num_prompt_tokens(self, index: int) -> int:
        """Tokens of one choice's prompt, as far as is known."""
        return self._streams[index].num_prompt_tokens

    def require_few_logprobs(self, num_top: int) -> None:
        """Raise InvalidParameter if the prompts have too many tokens for each to come with `num_top` others."""
        require_few_logprobs(sum(stream.num_prompt_tokens for stream in self._streams), num_top)

    def num_swallowed(self, index: int) -> int:
        """How many characters the tokens of one choice begin with that are not in its text."""
        return self._streams[index].num_swallowed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        """Cancel those that run. Where there is a record, wait a moment for what they were until then."""
        if self._prefill_log is not None:
            self._prefill_log.stop()
        for stream in self._streams:  # all first: none is computed while another is waited for
            stream.cancel()
        if self._record is None or not self._running:
            return
        for stream in self._running.values():
            stream.skip_to_end()
        self.before_waiting = _nothing
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CANCELLING_S):
                while self._running:
                    if not self._arrived():
                        await self._wait()

    def _arrived(self) -> list[tuple[int, Delta | RadixLMError]]:
        """What is there now, at most one thing of each choice: a delta, or the error that it failed with."""
        self._ready.clear()  # before polling: what comes after the polls sets it again
        arrived: list[tuple[int, Delta | RadixLMError]] = []
        for index, stream in tuple(self._running.items()):
            item = self._poll(index, stream)
            if item is not None:
                arrived.append((index, item))
        return arrived

    async def _wait(self) -> None:
        """Wait until there may be something, after a look that found nothing."""
        if not self._ready.is_set():
            await self.before_waiting()
        await self._ready.wait()

    def _poll(self, index: int, stream: GenerationStream) -> Delta | RadixLMError | None:
        """What is there of a choice. The completion of one that ends goes to the record."""
        try:
            delta = stream.poll()
        except RadixLMError as error:
            del self._running[index]
            return error
        if delta is not None and delta.finish_reason is not None:
            del self._running[index]
            if self._record is not None:
                self._record.completions.append(stream.result())
        return delta


async def _nothing() -> None:
    pass


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
