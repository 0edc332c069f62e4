"""The engine as a library: text in, text out, from any number of threads.

Puts its parts together, and gives streams back for what the one thread that owns the model computes. Knows nothing of
HTTP; requests are `request_intake.py`'s, batching and pages `engine_core.py`'s, the thread `engine_loop.py`'s.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeGuard, Unpack, cast, get_args, overload

from ..artifact import Artifact
from ..artifact.manifest import Manifest
from ..cache.cache_namespace import CacheNamespaces, ModelIdentity
from ..cache.cache_tree import CacheCleared, CacheTree
from ..cache.prefix_match import MatchPolicy
from ..chat.tool_format import Tool, ToolFormat
from ..errors import EngineOverloaded, InvalidParameter
from ..store import PageStore
from .admission import AdmissionPolicy
from .completion import CacheMatch, Completion, Delta, FinishReason, PrefillProgress, Timings, TokenLogprob, Usage
from .engine_core import EngineCore
from .engine_loop import EngineLoop
from .engine_parts import EngineParts, OpenRunner
from .engine_stats import EngineStats
from .generation_stream import GenerationStream, complete_all
from .kv_cache_size import KVCacheSize
from .prompts import Message, Prompt, Prompts, SuffixPolicy
from .request import Request
from .request_intake import RequestIntake
from .request_options import NO_OPTIONS, OptionKeywords, RequestOptions
from .sampling_params import SamplingParams
from .scheduler import SchedulerPolicy
from .upkeep import CacheExpiry, IdleWork, Upkeep
from .work_queue import WorkQueue

if TYPE_CHECKING:
    from ..chat.grammars import Grammars

__all__ = [
    "CacheMatch",
    "Completion",
    "Delta",
    "Engine",
    "EngineStats",
    "FinishReason",
    "GenerationStream",
    "PrefillProgress",
    "RequestOptions",
    "SamplingParams",
    "Timings",
    "TokenLogprob",
    "Usage",
]

_LOGGER = logging.getLogger(__name__)

DEFAULT_STORE_BYTES = 10_000_000_000


class Engine:
    """A compiled model, ready to answer; close it, or use it as a context manager.

    >>> with Engine("smollm2.radixlm") as engine:  # doctest: +SKIP
    ...     print(engine.generate("The capital of France is", SamplingParams(max_tokens=8)).text)

    Args:
        model: the artifact, or its directory. Opening it runs its model.so: trust where it comes from.
        kv_cache_bytes: memory for KV pages; None: a quarter of the available memory, but no more than
            `max_num_seqs` full contexts need. One that holds less than the context shortens it, with a warning.
        context_length: tokens of prompt and reply together; None: the model's, or as many as the KV pages hold.
        max_num_seqs: requests computed together; more wait.
        max_queue: requests that may wait beside those; more are refused with EngineOverloaded; None: any number.
        max_num_batched_tokens: tokens of one step, at most the artifact's own limit; None: that limit.
        admission: what of a reply has pages reserved when its request is let in: `optimistic` one token, and the newest
            request gives its pages back when they become too few; `conservative` `max_tokens`, and none ever does.
        num_threads: threads of the kernels; None: the runtime's choice.
        match: how cached prefixes may be found, unless a request says otherwise: `exact` by the ids of the prompt's
            encoding; `seam` the same, but a prompt that goes on from an earlier one is not encoded whole again; `text`
            also what the model generated, where it spells the prompt's text in other ids; `off`: nothing is found for a
            request, and nothing is kept of it, in memory or on disk.
        strip_suffix: which prompts are fed without the token of a lone space at their end (Llama-2's 29871), which the
            next turn's prompt would not have: `text`, chats and texts; `always`, token ids as well; `never`, none. The
            reply begins with that space, and is sent without it.
        cache_ttl_s: cached prefixes that nobody uses for so many seconds are dropped; None: only to make room.
        store: a directory for what memory has no room for, and for the next process; None: no disk is used. A prefix
            on disk is loaded where that is quicker than computing it, and is the same to the last bit. Or a store
            that was opened for this artifact, which the engine closes.
        store_bytes: that the store's files may take.
        kv_budget: the share of a stored prefix's keys and values that is enough, unless a request says otherwise;
            `usage.pruning` says of a reply that it is not exact. From prompts is learned which tokens matter, so that
            computing these takes longer. None: all is always loaded, and requests may not ask for less.
        clock: seconds; only differences count.
        open_runner: what runs the artifact; None: the native runtime.
        kv_log: a file to which every change of sequences and pages is added as a line; see `kv_log.py`.
        kv_log_bytes: with so many, that file is renamed, and the oldest of those that were goes; None: it only grows.

    Attributes:
        prompts: makes of texts and conversations what the model is fed.
        default_params: what the model's makers recommend; `dataclasses.replace` changes some of it.
        match: how cached prefixes may be found, unless a request says otherwise.
        context_length: tokens of prompt and reply together.
        namespaces: makes the `namespace` of whoever is not to share with others.

    Raises:
        ArtifactError: the artifact cannot be used.
        InvalidParameter: an argument is outside its range, or `kv_cache_bytes` holds no context worth having, or less
            than `context_length`.
        StoreError: the store cannot be used, or another process uses it.
    """

    def __init__(
        self,
        model: str | Path | Artifact,
        *,
        kv_cache_bytes: int | None = None,
        context_length: int | None = None,
        max_num_seqs: int = 64,
        max_queue: int | None = None,
        max_num_batched_tokens: int | None = None,
        admission: AdmissionPolicy = "optimistic",
        num_threads: int | None = None,
        match: MatchPolicy = "text",
        strip_suffix: SuffixPolicy = "text",
        cache_ttl_s: float | None = None,
        store: str | Path | PageStore | None = None,
        store_bytes: int = DEFAULT_STORE_BYTES,
        kv_budget: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        open_runner: OpenRunner | None = None,
        kv_log: str | Path | None = None,
        kv_log_bytes: int | None = None,
    ) -> None:
        artifact = Artifact.open(model) if isinstance(model, str | Path) else model
        manifest = artifact.manifest
        policy = _policy(manifest, max_num_seqs, max_num_batched_tokens, admission)
        if max_queue is not None and max_queue < 0:
            raise InvalidParameter(f"max_queue is {max_queue}; it must be 0 or more, or None")
        budget = KVCacheSize.choose(
            manifest, kv_cache_bytes=kv_cache_bytes, max_num_seqs=max_num_seqs, context_length=context_length
        )
        if budget.notice is not None:
            _LOGGER.warning("%s", budget.notice)
        self.manifest = manifest
        self.prompts = Prompts(artifact, clock=clock, strip_suffix=strip_suffix)
        self.tokenizer = self.prompts.tokenizer
        self.context_length = budget.context_length
        self._context_notice = budget.notice
        self._intake = RequestIntake(
            manifest, self.prompts, context_length=budget.context_length, match=match, kv_budget=kv_budget, clock=clock
        )
        self.default_params, self.match = self._intake.default_params, self._intake.match
        self._clock = clock
        self._opened_at = clock()
        queue = WorkQueue(clock=clock)
        parts = EngineParts.open(
            artifact,
            budget.num_pages,
            num_threads=num_threads,
            store=store,
            store_bytes=store_bytes,
            is_scored=kv_budget is not None,
            open_runner=open_runner,
            kv_log=kv_log,
            kv_log_bytes=kv_log_bytes,
            clock=clock,
            queue=queue,
        )
        self.namespaces = CacheNamespaces(ModelIdentity.of(manifest), parts.secret)
        try:
            expiry = None
            if cache_ttl_s is not None:
                drops = [parts.drop_unused, self.tokenizer.forget_unused_texts]
                expiry = CacheExpiry(cache_ttl_s, clock=clock, drops=drops)
            self._core = EngineCore(
                parts.runner,
                parts.cache,
                self._intake.limits,
                policy=policy,
                clock=clock,
                tier=parts.tier,
                queue=queue,
            )
        except BaseException:
            parts.close()
            raise
        measuring = parts.measure_prefill(
            context_length=budget.context_length, max_num_tokens=policy.max_num_batched_tokens, clock=clock
        )
        self._loop = EngineLoop(
            self._core,
            clock=clock,
            on_exit=parts.close,
            upkeep=Upkeep(expiry, None if measuring is None else IdleWork(measuring, clock=clock)),
            max_num_requests=None if max_queue is None else max_num_seqs + max_queue,
        )
        # An engine that nobody closes is closed when it is collected, or before the interpreter ends.
        self._finalizer = weakref.finalize(self, self._loop.close)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        strip_suffix: bool | None = None,
        **more: Unpack[OptionKeywords],
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        strip_suffix: bool | None = None,
        **more: Unpack[OptionKeywords],
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        strip_suffix: bool | None = None,
        **more: Unpack[OptionKeywords],
    ) -> Completion | list[Completion]:
        """Continue `prompt` (text or token ids) and wait for the end.

        Several prompts in a list are computed together, and their completions come in its order; where one is refused
        or fails, the others end, too. The options are those of `stream`.

        An exception that interrupts the wait, Ctrl-C for one, ends the request.

        Raises:
            EmptyPrompt, ContextLengthExceeded, InvalidParameter, InvalidGrammar: before anything is computed.
            ConstraintFailed: the reply cannot go on by its grammar.
            EngineOverloaded: too many requests wait.
            EngineError: the request could not be computed, or the engine is closed.
        """
        options = (options or NO_OPTIONS).changed(**more)
        if _are_prompts(prompt):
            ask = partial(self.stream, params=params, options=options, strip_suffix=strip_suffix)
            return complete_all([partial(ask, each) for each in prompt])
        self._loop.queue.require_room()
        return self._answer(self._intake.completion(cast(Prompt, prompt), params, options, strip_suffix=strip_suffix))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        strip_suffix: bool | None = None,
        on_ready: Callable[[], None] | None = None,
        **more: Unpack[OptionKeywords],
    ) -> GenerationStream:
        """Like `generate`, but returns at once; the deltas come while they are computed, to `for` and `async for`.

        Args:
            options: what the request asks for beside prompt and parameters. Keywords with the names of its fields set
                or change single ones: `stream(prompt, cache_match="off")`.
            strip_suffix: whether this prompt, be it text or ids, is fed without the token of a lone space at its end.
                A prompt with a constraint is fed as it is.
            on_ready: called on the engine's thread whenever `poll` has something new (a delta or an error); an event
                loop passes `lambda: loop.call_soon_threadsafe(event.set)`. It must neither block nor raise.
        """
        options = (options or NO_OPTIONS).changed(**more)
        self._loop.queue.require_room()
        request = self._intake.completion(prompt, params, options, strip_suffix=strip_suffix)
        return self._start(request, on_ready, options.with_progress)

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        tools: Sequence[Tool] = (),
        **more: Unpack[OptionKeywords],
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        tools: Sequence[Tool] = (),
        **more: Unpack[OptionKeywords],
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        tools: Sequence[Tool] = (),
        **more: Unpack[OptionKeywords],
    ) -> Completion | list[Completion]:
        """Answer a conversation of `{"role": ..., "content": ...}` messages, rendered by the model's
        template, which is told of `tools`; `tool_format.grammar(tools, "auto")` is a constraint by which it calls them.

        Several conversations in a list are computed together, as `generate` does it with prompts.

        An exception that interrupts the wait ends the request, as in `generate`.

        Raises:
            InvalidRequest: the artifact has no chat template, or the template refuses the messages.
            EmptyPrompt, ContextLengthExceeded, InvalidParameter, EngineError: as `generate`.
        """
        options = (options or NO_OPTIONS).changed(**more)
        if _are_conversations(messages):
            ask = partial(self.stream_chat, params=params, options=options, tools=tools)
            return complete_all([partial(ask, each) for each in messages])
        self._loop.queue.require_room()
        return self._answer(self._intake.chat(cast("Sequence[Message]", messages), tools, params, options))

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        tools: Sequence[Tool] = (),
        on_ready: Callable[[], None] | None = None,
        **more: Unpack[OptionKeywords],
    ) -> GenerationStream:
        """Like `chat`, but returns at once; see `stream`."""
        options = (options or NO_OPTIONS).changed(**more)
        self._loop.queue.require_room()
        return self._start(self._intake.chat(messages, tools, params, options), on_ready, options.with_progress)

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """The ids of a text, its suffix among them; `add_bos` overrides what the model asks for.

        Raises:
            InvalidRequest: the text cannot be encoded.
        """
        return self.prompts.encode(text, add_bos=add_bos)

    def encode_chat(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """The ids that `chat` feeds for a conversation.

        Raises:
            InvalidRequest: as `render`, or the text cannot be encoded.
        """
        return list(self.prompts.chat(messages, tools).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens included.

        Raises:
            InvalidRequest: an id is outside the vocabulary.
        """
        return self.prompts.decode(token_ids)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """The text that `chat` feeds the model: the conversation and the generation prompt.

        Raises:
            EmptyPrompt: there are no messages.
            InvalidRequest: the artifact has no chat template, or the template refuses the messages.
        """
        return self.prompts.render(messages, tools)

    @property
    def tool_format(self) -> ToolFormat:
        """How the model writes that it calls a tool."""
        return self.prompts.tool_format

    @property
    def grammars(self) -> Grammars:
        """Compiles what replies are to keep to; nothing is spent on it before the first use.

        Raises:
            InvalidRequest: the model has no token that ends a reply.
        """
        return self._intake.grammars

    def cache_tree(self, namespace: bytes = b"") -> CacheTree:
        """What is cached for a namespace, after the step that runs.

        Raises:
            EngineError: the engine is closed, or died.
        """
        return self._loop.call(
            lambda core: CacheTree.of(core.cache, namespace, self._clock(), live=core.live_uses(namespace))
        )

    def check(self) -> None:
        """Raise AssertionError unless requests, sequences, pages and prefixes agree, after the step that runs; slow.

        Raises:
            EngineError: the engine is closed, or died.
        """
        self._loop.call(lambda core: core.check())

    def clear_cache(self, namespace: bytes = b"") -> CacheCleared:
        """Forget a namespace's prefixes and texts, but for what live requests use: that stays until it makes room.

        Returns when they are off the disk, too.

        Raises:
            EngineError: the engine is closed, or died.
        """
        self.tokenizer.forget_texts(namespace)
        cleared, done = self._loop.call(lambda core: core.forget(namespace))
        done.result()
        return cleared

    def num_cached_elsewhere(self, prompt_ids: Sequence[int], namespace: bytes = b"") -> int:
        """How many of a prompt's tokens another namespace than this one has: for who owns them all, never for clients.

        Raises:
            EngineError: the engine is closed, or died.
        """
        return self._loop.call(lambda core: core.cache.num_elsewhere(prompt_ids, namespace))

    @property
    def max_num_requests(self) -> int | None:
        """How many requests may run and wait together; None: any number."""
        return self._loop.queue.max_num_requests

    @property
    def room(self) -> int | None:
        """How many requests more would be taken now; None: any number."""
        return self._loop.queue.room

    def refusal(self, num_waiting: int) -> EngineOverloaded:
        """Count a request that is refused because `num_waiting` others, which are still to come here, fill the queue:
        what it is told."""
        return self._loop.queue.refusal(num_waiting)

    def stats(self) -> EngineStats:
        """Counters and the state now; never waits for a step."""
        uptime_s = self._clock() - self._opened_at
        return EngineStats.of(self._core, self._loop, uptime_s=uptime_s, context_notice=self._context_notice)

    def close(self) -> None:
        """Cancel what runs, stop the thread and free the model; later requests raise EngineClosed.

        May be called twice.
        """
        self._finalizer()
        self._intake.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, request: Request) -> Completion:
        """Wait for the end of a request, which ends with the wait."""
        with self._stream_of(request) as stream:  # entered first: no interrupt comes between it and the request
            self._loop.submit(request, stream.deliver)
            return stream.result()

    def _start(self, request: Request, on_ready: Callable[[], None] | None, with_progress: bool) -> GenerationStream:
        stream = self._stream_of(request, on_ready, with_progress=with_progress)
        self._loop.submit(request, stream.deliver)
        return stream

    def _stream_of(
        self, request: Request, on_ready: Callable[[], None] | None = None, *, with_progress: bool = False
    ) -> GenerationStream:
        """A stream for a request that is to be submitted."""
        return GenerationStream(
            request.request_id,
            tuple(request.prompt.ids),
            cancel=self._loop.cancel,
            on_ready=on_ready,
            name=request.spec.name,
            with_progress=with_progress,
            num_swallowed=request.num_swallowed,
        )


def _are_prompts(prompt: Prompt | Sequence[Prompt]) -> TypeGuard[Sequence[Prompt]]:
    """Whether it is several: a text is one, and so is a list of ids."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Sequence)


def _are_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> TypeGuard[Sequence[Sequence[Message]]]:
    return len(messages) > 0 and isinstance(messages[0], Sequence)


def _policy(
    manifest: Manifest, max_num_seqs: int, max_num_batched_tokens: int | None, admission: AdmissionPolicy
) -> SchedulerPolicy:
    limits = manifest.module
    max_num_tokens = limits.max_num_tokens if max_num_batched_tokens is None else max_num_batched_tokens
    _require_within("max_num_seqs", max_num_seqs, min(limits.max_num_logits, limits.max_num_tokens))
    _require_within("max_num_batched_tokens", max_num_tokens, limits.max_num_tokens)
    if admission not in get_args(AdmissionPolicy):
        raise InvalidParameter(f"admission is {admission!r}; use one of {', '.join(get_args(AdmissionPolicy))}")
    return SchedulerPolicy(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_tokens, admission=admission)


def _require_within(name: str, value: int, most: int) -> None:
    if not isinstance(value, int) or not 1 <= value <= most:
        raise InvalidParameter(f"{name} is {value!r}; this artifact allows 1 to {most}")
