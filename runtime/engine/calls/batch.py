"""Run many requests of one call: yield each result as it ends, and print a progress line.

Knows streams and results, not prompts or parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from ...errors import RadixLMError
from ..completion import Completion
from ..generation_stream import GenerationStream, StartRequest

MIN_PERCENT = 5  # between two progress lines, if the output is no terminal


@dataclass(frozen=True)
class PromptResult:
    """The result of one prompt of `Engine.generate_many`: a completion or an error.

    Attributes:
        index: the prompt's index, from 0.
        prompt: as it was given.
        error: why there is no completion; None if there is one.
    """

    index: int
    prompt: Any
    completion: Completion | None = None
    error: RadixLMError | None = None

    @property
    def text(self) -> str:
        """The reply's text.

        Raises:
            RadixLMError: the prompt failed; the message names it.
        """
        if self.completion is None:
            assert self.error is not None
            with naming(self.index):
                raise self.error
        return self.completion.text


def complete_all(asks: Iterable[StartRequest]) -> list[Completion]:
    """Wait for all requests. If one is refused or fails, or the wait is interrupted, the others are cancelled.

    Raises:
        InvalidRequest, EngineError: the error of the first request that failed; the message has its index.
    """
    ready: SimpleQueue[int] = SimpleQueue()
    with ExitStack() as opened:
        streams: list[GenerationStream] = []
        for index, ask in enumerate(asks):
            with naming(index):
                stream = opened.enter_context(ask(on_ready=partial(ready.put, index)))
            stream.skip_to_end()
            streams.append(stream)
        running = set(range(len(streams)))
        while running:
            index = ready.get()
            with naming(index):
                if index in running and _has_ended(streams[index]):
                    running.remove(index)
        return [stream.result() for stream in streams]


@contextmanager
def naming(index: int) -> Iterator[None]:
    """Surround the work on a prompt: begin the message of an error with `prompt INDEX: `."""
    try:
        yield
    except RadixLMError as error:
        name = f"prompt {index}: "
        if not str(error).startswith(name):
            error.args = (f"{name}{error}", *error.args[1:])
        raise


def results(prompts: Iterable[Any], ask: Callable[[Any], StartRequest], at_once: int) -> Iterator[PromptResult]:
    """Yield the result of each prompt when it ends, with at most `at_once` requests in the engine.

    Prompts are taken as there is room. If the iteration ends early, the running requests are cancelled.
    """
    ready: SimpleQueue[int] = SimpleQueue()
    running: dict[int, tuple[Any, GenerationStream]] = {}
    waiting = enumerate(prompts)
    try:
        while True:
            while len(running) < at_once and (item := next(waiting, None)) is not None:
                index, prompt = item
                try:
                    running[index] = prompt, (stream := ask(prompt)(on_ready=partial(ready.put, index)))
                    stream.skip_to_end()
                except RadixLMError as error:
                    yield PromptResult(index, prompt, error=error)
            if not running:
                return
            if (index := ready.get()) not in running:
                continue
            prompt, stream = running[index]
            try:
                if not _has_ended(stream):
                    continue
                result = PromptResult(index, prompt, stream.result())
            except RadixLMError as error:
                result = PromptResult(index, prompt, error=error)
            del running[index]
            yield result
    finally:
        for _, stream in running.values():
            stream.cancel()


class ProgressLine:
    """A progress line on standard error with the number of finished prompts; a context manager that ends the line.

    Args:
        total: number of prompts; None if unknown.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._num_ended, self._num_failed, self._num_tokens = 0, 0, 0
        self._is_terminal = sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def count(self, result: PromptResult) -> None:
        """Count a result and rewrite the line."""
        before = self._percent
        self._num_ended += 1
        self._num_failed += result.error is not None
        self._num_tokens += len(result.completion.token_ids) if result.completion is not None else 0
        if self._is_terminal:
            print(f"\r{self}", end="", file=sys.stderr, flush=True)
        elif self._percent // MIN_PERCENT > before // MIN_PERCENT:
            print(self, file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_terminal:
            print(file=sys.stderr)

    @property
    def _percent(self) -> int:
        """Percentage of prompts that have ended; their number if the total is unknown."""
        return self._num_ended * 100 // self._total if self._total else self._num_ended

    def __str__(self) -> str:
        of = "" if self._total is None else f"/{self._total}"
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        return f"{self._num_ended}{of} prompts, {self._num_tokens} tokens{failed}"


def _has_ended(stream: GenerationStream) -> bool:
    """Return whether the stream has ended; raise the request's error if it failed."""
    with suppress(StopIteration):
        while stream.poll() is not None:
            pass
        return False
    return True
