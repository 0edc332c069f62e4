"""The engine as a library: text in, text out, from any number of threads.

Prepares prompts in the caller's thread, hands requests to the one thread that owns the model, and gives
streams back. Knows nothing of HTTP; batching and pages are `engine_core.py`'s, the thread is
`engine_loop.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from .completion import CacheMatch, Completion, Delta, FinishReason, Timings, TokenLogprob, Usage
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from radixlm.tokenizer_fix import Tokenizer

    from .artifact import Artifact
    from .manifest import Manifest

__all__ = [
    "CacheMatch",
    "Completion",
    "Delta",
    "Engine",
    "EngineStats",
    "FinishReason",
    "GenerationStream",
    "SamplingParams",
    "Timings",
    "TokenLogprob",
    "Usage",
]

Prompt = str | Sequence[int]
Message = Mapping[str, object]  # {"role": ..., "content": ...}


@dataclass(frozen=True)
class EngineStats:
    """The engine's state now and what it did since it was opened."""

    alive: bool  # the owner thread runs
    stalled_s: float  # seconds since the last finished step while there is work; 0.0 when idle
    uptime_s: float
    num_waiting: int
    num_running: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int  # held by the prefix cache alone, can be evicted
    num_steps: int
    num_finished: int
    num_failed: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int


class GenerationStream(Iterator[Delta]):
    """The deltas of one request, as they come. One thread may read it; any may cancel it.

    As a context manager it cancels the request when the block is left early. Iterating raises the error that
    the request failed with.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]

    def __next__(self) -> Delta:
        """Wait for the next delta; raise StopIteration after the one with a `finish_reason`."""
        raise NotImplementedError

    def poll(self) -> Delta | None:
        """The next delta if there is one now, else None; after the last delta raise StopIteration."""
        raise NotImplementedError

    def cancel(self) -> None:
        """End the request as soon as possible; its last delta then has finish_reason `cancelled`. Harmless
        when finished.
        """
        raise NotImplementedError

    def result(self) -> Completion:
        """Wait for the end, skipping deltas not read yet, and return the whole completion."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class Engine:
    """A compiled model, ready to answer; close it, or use it as a context manager.

    >>> with Engine("smollm2.radixlm") as engine:  # doctest: +SKIP
    ...     print(engine.generate("The capital of France is", SamplingParams(max_tokens=8)).text)

    Args:
        model: the artifact, or its directory.
        kv_cache_bytes: memory for KV pages; None: a quarter of the available memory, but no more than
            `max_num_seqs` full contexts need.
        max_num_seqs: requests computed together; more wait.
        max_num_batched_tokens: tokens of one step, at most the artifact's own limit; None: that limit.
        num_threads: threads of the kernels; None: the runtime's choice.

    Raises:
        ArtifactError: the artifact cannot be used.
        InvalidParameter: an argument is outside its range, or `kv_cache_bytes` holds no context worth having.
    """

    manifest: Manifest
    tokenizer: Tokenizer
    default_params: SamplingParams  # what the model's makers recommend
    context_length: int  # tokens of prompt and reply together: the model's, or what the KV pages hold

    def __init__(
        self,
        model: str | Path | Artifact,
        *,
        kv_cache_bytes: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int | None = None,
        num_threads: int | None = None,
    ) -> None:
        raise NotImplementedError

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, namespace: bytes = b""
    ) -> Completion:
        """Continue `prompt` (text, or token ids fed as they are) and wait for the end.

        Raises:
            EmptyPrompt, ContextLengthExceeded, InvalidParameter: before anything is computed.
            EngineError: the request could not be computed, or the engine is closed.
        """
        return self.stream(prompt, params, namespace=namespace).result()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        namespace: bytes = b"",
        on_ready: Callable[[], None] | None = None,
    ) -> GenerationStream:
        """Like `generate`, but returns at once; the deltas come while they are computed.

        `on_ready` is called on the engine's thread whenever `poll` has something new (a delta or an error):
        an event loop passes `lambda: loop.call_soon_threadsafe(event.set)`. It must not block and must not
        raise. `namespace` separates clients: cached prefixes are never shared between two namespaces.
        """
        raise NotImplementedError

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, namespace: bytes = b""
    ) -> Completion:
        """Answer a conversation of `{"role": ..., "content": ...}` messages, rendered by the model's chat
        template.

        Raises:
            InvalidRequest: the artifact has no chat template, or the template refuses the messages; else as
                `generate`.
        """
        return self.stream_chat(messages, params, namespace=namespace).result()

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        namespace: bytes = b"",
        on_ready: Callable[[], None] | None = None,
    ) -> GenerationStream:
        """Like `chat`, but returns at once; see `stream`."""
        raise NotImplementedError

    def render(self, messages: Sequence[Message]) -> str:
        """The text that `chat` feeds the model: the conversation and the generation prompt."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """Counters and the state now; never waits for a step."""
        raise NotImplementedError

    def close(self) -> None:
        """Cancel what runs, stop the thread and free the model. Later requests raise EngineClosed. May be
        called twice.
        """
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
