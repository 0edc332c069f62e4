"""The replies (choices) to one request: streamed together as they are generated, and cancelled together.

The engine's thread wakes the event loop, so that no thread waits for a reply. Knows the order of deltas, not their
content.
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
    """Return the parameters of each of `n` replies to one prompt. The seeds count up, so that the replies differ.

    >>> [params.seed for params in params_of_choices(SamplingParams(seed=7), 3)]
    [7, 8, 9]
    """
    if params.seed is None:
        return [params] * n
    seeds = (params.seed + number for number in range(n))
    return [replace(params, seed=seed - _NUM_SEEDS if seed >= _NUM_SEEDS else seed) for seed in seeds]


class Choices:
    """The running replies to one request: iterate over their deltas once, or await `results`.

    Leaving the context manager cancels all that still run.

    Args:
        waker: wakes tasks of the running event loop.
        record: collects the completions, in the order in which they end.

    Attributes:
        before_waiting: awaited by the iteration before it waits for a delta.
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
        """Call `ask`, which submits the request of one more choice to the engine. For any thread, one at a time.

        Raises:
            InvalidRequest, EngineError: the engine refuses the request.
        """
        stream = ask(on_ready=self._wake)
        self._running[len(self._streams)] = stream
        self._streams.append(stream)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield each delta with the index of its choice, as soon as it arrives.

        Raises:
            EngineError: one of the requests failed. EngineClosed if the engine was closed.
        """
        while self._running:
            arrived = self._take_arrived()
            if not arrived:
                await self._wait()
            for index, item in arrived:
                if isinstance(item, RadixLMError):
                    raise item
                if item.finish_reason == "cancelled":
                    raise EngineClosed("the server is stopping; send the request again later")
                yield index, item

    def stream(self, index: int) -> GenerationStream:
        """Return the engine's stream of one choice."""
        return self._streams[index]

    def result(self, index: int) -> Completion:
        """Return the completion of one choice, whose last delta has been read."""
        return self._streams[index].result()

    async def results(self) -> list[Completion]:
        """Wait for all choices to end, and return their completions.

        Raises:
            EngineError: one of the requests failed. The others are not waited for.
        """
        for stream in self._running.values():
            stream.skip_to_end()
        async for _ in self:
            pass
        return [stream.result() for stream in self._streams]

    def num_prompt_tokens(self, index: int) -> int:
        """Return the number of prompt tokens of one choice."""
        return self._streams[index].num_prompt_tokens

    def require_few_logprobs(self, num_top: int) -> None:
        """Raise InvalidParameter if the prompts are too long for `num_top` logprobs per token."""
        require_few_logprobs(sum(stream.num_prompt_tokens for stream in self._streams), num_top)

    def num_swallowed(self, index: int) -> int:
        """Return the number of characters that the first tokens of one choice spell, but that its text omits."""
        return self._streams[index].num_swallowed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        """Cancel all running choices. If there is a record, wait up to a second for their token counts."""
        if self._prefill_log is not None:
            self._prefill_log.stop()
        for stream in self._streams:  # all before waiting: otherwise one is computed while another is awaited
            stream.cancel()
        if self._record is None or not self._running:
            return
        for stream in self._running.values():
            stream.skip_to_end()
        self.before_waiting = _nothing
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CANCELLING_S):
                while self._running:
                    if not self._take_arrived():
                        await self._wait()

    def _take_arrived(self) -> list[tuple[int, Delta | RadixLMError]]:
        """Return what has arrived, at most one item per choice: a delta, or the error that the choice failed with."""
        self._ready.clear()  # before polling: whatever arrives after the polls sets it again
        arrived: list[tuple[int, Delta | RadixLMError]] = []
        for index, stream in tuple(self._running.items()):
            item = self._poll(index, stream)
            if item is not None:
                arrived.append((index, item))
        return arrived

    async def _wait(self) -> None:
        """Wait until something may have arrived. Called after `_take_arrived` returned nothing."""
        if not self._ready.is_set():
            await self.before_waiting()
        await self._ready.wait()

    def _poll(self, index: int, stream: GenerationStream) -> Delta | RadixLMError | None:
        """Return the next delta or the error of a choice, or None. Records the completion when it ends."""
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

    Each call is a system call that passes the GIL to the loop's thread. With one call per reply, the engine's thread
    waited until the first reply was sent before it could deliver the second.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: deque[asyncio.Event] = deque()
        self._is_called = False

    def set(self, event: asyncio.Event) -> None:
        """Set an event of the loop. For any thread; does not wait."""
        self._ready.append(event)  # before reading the flag, which is cleared before the events are read
        if not self._is_called and not self._loop.is_closed():
            self._is_called = True
            self._loop.call_soon_threadsafe(self._set_all)

    def _set_all(self) -> None:
        self._is_called = False
        while self._ready:
            self._ready.popleft().set()
