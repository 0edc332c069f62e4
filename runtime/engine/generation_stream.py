"""The stream of one request's results, from the engine's thread to its reader.

Knows queues, not tokens: outputs are passed on unchanged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Protocol, Self

from .completion import Completion, Delta, PrefillProgress, RequestOutput
from .request import Request
from .sampling_params import SamplingParams

_LOGGER = logging.getLogger(__name__)


Deliver = Callable[[RequestOutput], None]


class Recorder(Protocol):
    """Records requests and their outputs, so that they can be computed again."""

    def sampled_with(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters to sample a reply with, given its client's; called in any thread."""
        ...

    def watch(self, request: Request, deliver: Deliver) -> Deliver:
        """Return the callback for a request's outputs that replaces `deliver`; called before it is submitted."""
        ...


class GenerationStream(Iterator[Delta], AsyncIterable[Delta]):
    """The deltas of one request, as they come. One thread or task can read it; any can cancel it.

    As a context manager it cancels the request when the block is left early. Reading raises the error of a request
    that failed.

    Attributes:
        request_id: the caller's own id of the request, or the engine's.
        progress: prefill progress of the prompt, for any thread to read; None while the request is queued.
        num_swallowed: `Completion.num_swallowed`, known from the start.
    """

    num_swallowed = 0

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        *,
        cancel: Callable[[str], None],
        on_ready: Callable[[], None] | None = None,
        name: str | None = None,
        with_progress: bool = False,
        num_swallowed: int = 0,
    ) -> None:
        """Make a stream that `deliver` fills.

        Args:
            name: the caller's own id of the request; `cancel` knows it by `request_id`.
            with_progress: whether deltas also report the progress of the prompt.
            num_swallowed: `Completion.num_swallowed`.
        """
        self.request_id = request_id if name is None else name
        self._engine_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.num_swallowed = num_swallowed
        self._cancel = cancel
        self.progress: PrefillProgress | None = None
        self._on_ready = on_ready
        self._with_progress = with_progress
        self._outputs: SimpleQueue[RequestOutput] = SimpleQueue()
        self._wake_task: Callable[[], None] | None = None
        self._last: RequestOutput | None = None
        self._completion: Completion | None = None  # set by the engine's thread at the end
        self._wants_end_only = False

    @classmethod
    def of(cls, request: Request, cancel: Callable[[str], None], on_ready: Callable[[], None] | None = None) -> Self:
        """Return a stream for a request that is not submitted yet."""
        return cls(
            request.request_id,
            tuple(request.prompt.ids),
            cancel=cancel,
            on_ready=on_ready,
            name=request.spec.name,
            with_progress=request.spec.options.with_progress,
            num_swallowed=request.num_swallowed,
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt; once the request has started, of the ids that the cache matched."""
        progress = self.progress
        return len(self.prompt_token_ids) if progress is None else progress.num_prompt_tokens

    def computed_ids(self) -> tuple[int, ...] | None:
        """Return the ids of prompt and reply whose KV was computed, once the reply has ended; None before that."""
        end = self._completion
        return None if end is None else (end.prompt_token_ids + end.token_ids)[:-1]

    def deliver(self, output: RequestOutput) -> None:
        """Add an output, on the engine's thread."""
        if output.completion is not None:
            self._completion = output.completion
        if output.delta is not None and output.delta.progress is not None:
            self.progress = output.delta.progress
            if not self._with_progress:
                return
        if self._wants_end_only and output.completion is None and output.error is None:
            return  # a thread that wakes for each token takes CPU time from the kernels
        self._outputs.put(output)
        wake_task = self._wake_task  # the reader can reset it at any moment
        if wake_task is not None:
            wake_task()
        if self._on_ready is not None:
            try:
                self._on_ready()
            except Exception:  # the client's fault: it must not end the engine's thread
                _LOGGER.exception("on_ready of request %s failed", self.request_id)

    def __next__(self) -> Delta:
        """Wait for the next delta; raise StopIteration after the one with a `finish_reason`."""
        self._require_more()
        return self._take(self._outputs.get())

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield the deltas in any event loop, without blocking it; an iteration that ends early cancels the request."""
        ready, loop = asyncio.Event(), asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed, and nothing waits in it
                loop.call_soon_threadsafe(ready.set)

        self._wake_task = wake
        try:
            while True:
                ready.clear()  # before polling: what arrives after the poll sets it again
                with suppress(StopIteration):
                    while (delta := self.poll()) is not None:
                        yield delta
                if self._last is not None:
                    return
                await ready.wait()
        finally:
            self._wake_task = None
            self.cancel()

    def poll(self) -> Delta | None:
        """Return the next delta, None if there is none yet; raise StopIteration after the last delta."""
        self._require_more()
        try:
            return self._take(self._outputs.get_nowait())
        except Empty:
            return None

    def cancel(self) -> None:
        """Cancel the request: its last delta has the finish reason `cancelled`. Does nothing if it has ended."""
        if self._last is None:
            self._cancel(self._engine_id)

    def skip_to_end(self) -> None:
        """Announce that only the last delta will be read: the others then wake no thread."""
        self._wants_end_only = True

    def result(self) -> Completion:
        """Wait for the end, skipping unread deltas, and return the whole completion."""
        self.skip_to_end()
        for _ in self:
            pass
        assert self._last is not None
        if self._last.error is not None:
            raise self._last.error
        assert self._last.completion is not None
        return self._last.completion

    async def aresult(self) -> Completion:
        """Like `result`, without blocking the event loop; cancelling the task cancels the request."""
        self.skip_to_end()
        async for _ in self:
            pass
        return self.result()

    def __enter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __repr__(self) -> str:
        state = "running" if self._last is None else "ended"
        return f"<GenerationStream {self.request_id}: {state}, {len(self.prompt_token_ids)} prompt tokens>"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _require_more(self) -> None:
        if self._last is not None:
            raise StopIteration

    def _take(self, output: RequestOutput) -> Delta:
        """Return an output's delta; raise its error. The last output is kept for `result`."""
        if output.completion is not None or output.error is not None:
            self._last = output
        if output.error is not None:
            raise output.error
        assert output.delta is not None
        return output.delta


class StartRequest(Protocol):
    """Hands one request to the engine; `partial(engine.stream, prompt, params)` is one."""

    def __call__(self, *, on_ready: Callable[[], None]) -> GenerationStream: ...
