"""Several requests that are computed together: their completions, or the error of the one that fails first.

Knows streams, not what is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from .completion import Completion
from .generation_stream import GenerationStream


class Ask(Protocol):
    """Hands one request to the engine; `partial(engine.stream, prompt, params)` is one."""

    def __call__(self, *, on_ready: Callable[[], None]) -> GenerationStream: ...


def complete_all(asks: Iterable[Ask]) -> list[Completion]:
    """Wait for all requests; where one is refused or fails, or the wait is interrupted, the others end, too.

    Raises:
        InvalidRequest, EngineError: of the first request that was refused or failed.
    """
    ready: SimpleQueue[int] = SimpleQueue()
    with ExitStack() as opened:
        streams: list[GenerationStream] = []
        for index, ask in enumerate(asks):
            stream = opened.enter_context(ask(on_ready=partial(ready.put, index)))
            stream.skip_to_end()
            streams.append(stream)
        running = set(range(len(streams)))
        while running:
            index = ready.get()
            if index in running and _has_ended(streams[index]):
                running.remove(index)
        return [stream.result() for stream in streams]


def _has_ended(stream: GenerationStream) -> bool:
    """Whether nothing more will come; raises what the request failed with."""
    with suppress(StopIteration):
        while stream.poll() is not None:
            pass
        return False
    return True
