"""The reading end of a request that runs in the engine's thread.

Knows queues, not tokens: what arrives is handed on.
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
    """Notes requests and what comes of them, so that they can be computed again."""

    def sampled_with(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters that a reply is drawn with where its client asks for these; any thread calls it."""
        ...

    def watch(self, request: Request, deliver: Deliver) -> Deliver:
        """Return what outputs of a request that is to be submitted go to, instead of `deliver`."""
        ...


class GenerationStream(Iterator[Delta], AsyncIterable[Delta]):
    """The deltas of one request, as they come. One thread or task may read it; any may cancel it.

    As a context manager it cancels the request when the block is left early. Reading raises the error that
    the request failed with.

    Attributes:
        request_id: the caller's own name of the request, or the engine's.
        progress: how far the prompt is, for any thread to look at; None: the request waits for its turn.
        num_swallowed: as `Completion.num_swallowed`, which comes with the end.
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
        """A stream for `deliver` to fill; the engine makes it.

        Args:
            name: the caller's own name of the request, beside the id that `cancel` knows it by.
            with_progress: there are deltas that tell of the prompt, too.
            num_swallowed: as `Completion.num_swallowed`.
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
        self._completion: Completion | None = None  # the engine's thread has delivered
        self._wants_end_only = False

    @classmethod
    def of(cls, request: Request, cancel: Callable[[str], None], on_ready: Callable[[], None] | None = None) -> Self:
        """A stream for a request that is to be submitted."""
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
        """Tokens of the prompt, in the ids that were found cached once the request has started."""
        progress = self.progress
        return len(self.prompt_token_ids) if progress is None else progress.num_prompt_tokens

    def computed_ids(self) -> tuple[int, ...] | None:
        """The ids of prompt and reply that the model was given, once the reply has ended; None before that."""
        end = self._completion
        return None if end is None else (end.prompt_token_ids + end.token_ids)[:-1]

    def deliver(self, output: RequestOutput) -> None:
        """Add what came, on the engine's thread."""
        if output.completion is not None:
            self._completion = output.completion
        if output.delta is not None and output.delta.progress is not None:
            self.progress = output.delta.progress
            if not self._with_progress:
                return
        if self._wants_end_only and output.completion is None and output.error is None:
            return  # a thread that wakes for each token takes a processor from the kernels
        self._outputs.put(output)
        wake_task = self._wake_task  # its own thread may take it away at any moment
        if wake_task is not None:
            wake_task()
        if self._on_ready is not None:
            try:
                self._on_ready()
            except Exception:  # the client's fault, and not worth the engine's thread
                _LOGGER.exception("on_ready of request %s failed", self.request_id)

    def __next__(self) -> Delta:
        """Wait for the next delta; raise StopIteration after the one with a `finish_reason`."""
        self._require_more()
        return self._take(self._outputs.get())

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """The deltas, in any event loop, which goes on meanwhile; an iteration that ends early ends the request."""
        ready, loop = asyncio.Event(), asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed, and nothing waits in it
                loop.call_soon_threadsafe(ready.set)

        self._wake_task = wake
        try:
            while True:
                ready.clear()  # before polling: what comes after the poll sets it again
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
        """The next delta if there is one now, else None; after the last delta raise StopIteration."""
        self._require_more()
        try:
            return self._take(self._outputs.get_nowait())
        except Empty:
            return None

    def cancel(self) -> None:
        """End the request as soon as possible: its last delta has the finish reason `cancelled`.

        Harmless when it has ended.
        """
        if self._last is None:
            self._cancel(self._engine_id)

    def skip_to_end(self) -> None:
        """Say that no delta but the last will be read: the others wake no thread."""
        self._wants_end_only = True

    def result(self) -> Completion:
        """Wait for the end, skipping deltas not read yet, and return the whole completion."""
        self.skip_to_end()
        for _ in self:
            pass
        assert self._last is not None
        if self._last.error is not None:
            raise self._last.error
        assert self._last.completion is not None
        return self._last.completion

    async def aresult(self) -> Completion:
        """Like `result`, while the event loop goes on; cancelling the task ends the request."""
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
        if output.completion is not None or output.error is not None:
            self._last = output
        if output.error is not None:
            raise output.error
        assert output.delta is not None
        return output.delta


class Ask(Protocol):
    """Hands one request to the engine; `partial(engine.stream, prompt, params)` is one."""

    def __call__(self, *, on_ready: Callable[[], None]) -> GenerationStream: ...
