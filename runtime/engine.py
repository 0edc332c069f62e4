"""The engine as a library: text in, text out, from any number of threads.

Prepares prompts in the caller's thread, hands requests to the one thread that owns the model, and gives
streams back. Knows nothing of HTTP; prompts are `prompts.py`'s, batching and pages `engine_core.py`'s, the thread
`engine_loop.py`'s.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, get_args

from radixlm.tokenizer_fix import PreparedPrompt

from .artifact import Artifact
from .batch import Forward, PageIO
from .cache_expiry import CacheExpiry
from .cache_namespace import CacheNamespaces, ModelIdentity
from .cache_tree import CacheCleared, CacheTree
from .completion import CacheMatch, Completion, Delta, FinishReason, Timings, TokenLogprob, Usage
from .disk_tier import DiskTier
from .engine_core import EngineCore
from .engine_loop import EngineLoop
from .engine_stats import EngineStats
from .errors import InvalidParameter, InvalidRequest
from .generation_stream import GenerationStream
from .grammar import Grammar
from .kv_budget import KVBudget
from .kv_log import KVLog
from .manifest import Manifest
from .page_pool import PagePool
from .prefix_cache import PrefixCache
from .prefix_match import MatchPolicy
from .prompts import Message, Prompt, Prompts
from .request import Request, RequestLimits
from .sampling_params import SamplingParams
from .scheduler import SchedulerPolicy
from .store import PageStore, StoreIdentity
from .token_constraint import ConstraintSource
from .tool_format import Tool, ToolFormat

if TYPE_CHECKING:
    from .grammars import Grammars

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


class Runner(Forward, Protocol):
    """A model that runs, and can be freed; `ModelRunner` is the real one."""

    def close(self) -> None:
        """Free it."""
        ...


DEFAULT_STORE_BYTES = 10_000_000_000
MAX_THREADS = 1024  # far above it the thread pool aborts the process
OpenRunner = Callable[["Artifact", int, int | None], Runner]
"""Makes a runner of an artifact, with a number of KV pages and of threads."""


class Engine:
    """A compiled model, ready to answer; close it, or use it as a context manager.

    >>> with Engine("smollm2.radixlm") as engine:  # doctest: +SKIP
    ...     print(engine.generate("The capital of France is", SamplingParams(max_tokens=8)).text)

    Args:
        model: the artifact, or its directory.
        kv_cache_bytes: memory for KV pages; None: a quarter of the available memory, but no more than
            `max_num_seqs` full contexts need.
        max_num_seqs: requests computed together; more wait.
        max_queue: requests that may wait beside those; more are refused with EngineOverloaded; None: any number.
        max_num_batched_tokens: tokens of one step, at most the artifact's own limit; None: that limit.
        num_threads: threads of the kernels; None: the runtime's choice.
        match: how cached prefixes may be found, unless a request says otherwise: `exact` by the ids of the prompt's
            encoding; `seam` the same, but a prompt that goes on from an earlier one is not encoded whole again; `text`
            also what the model generated, where it spells the prompt's text in other ids.
        cache_ttl_s: cached prefixes that nobody uses for so many seconds are dropped; None: only to make room.
        store: a directory for what memory has no room for, and for the next process; None: no disk is used. A prefix
            on disk is loaded where that is quicker than computing it, and is the same to the last bit. Or a store
            that was opened for this artifact, which the engine closes.
        store_bytes: that the store's files may take.
        clock: seconds; only differences count.
        open_runner: what runs the artifact; None: the native runtime.
        kv_log: a file to which every change of sequences and pages is added as a line; see `kv_log.py`.

    Attributes:
        prompts: makes of texts and conversations what the model is fed.
        default_params: what the model's makers recommend; `dataclasses.replace` changes some of it.
        context_length: tokens of prompt and reply together: the model's, or fewer if the KV pages hold fewer.
        namespaces: makes the `namespace` of whoever is not to share with others.

    Raises:
        ArtifactError: the artifact cannot be used.
        InvalidParameter: an argument is outside its range, or `kv_cache_bytes` holds no context worth having.
        StoreError: the store cannot be used, or another process uses it.
    """

    def __init__(
        self,
        model: str | Path | Artifact,
        *,
        kv_cache_bytes: int | None = None,
        max_num_seqs: int = 64,
        max_queue: int | None = None,
        max_num_batched_tokens: int | None = None,
        num_threads: int | None = None,
        match: MatchPolicy = "text",
        cache_ttl_s: float | None = None,
        store: str | Path | PageStore | None = None,
        store_bytes: int = DEFAULT_STORE_BYTES,
        clock: Callable[[], float] = time.monotonic,
        open_runner: OpenRunner | None = None,
        kv_log: str | Path | None = None,
    ) -> None:
        artifact = Artifact.open(model) if isinstance(model, str | Path) else model
        manifest = artifact.manifest
        policy = _policy(manifest, max_num_seqs, max_num_batched_tokens)
        if num_threads is not None and not 1 <= num_threads <= MAX_THREADS:
            raise InvalidParameter(f"num_threads is {num_threads}; it must be 1 to {MAX_THREADS}, or None")
        if max_queue is not None and max_queue < 0:
            raise InvalidParameter(f"max_queue is {max_queue}; it must be 0 or more, or None")
        self._match = _checked_match(match)
        budget = KVBudget.choose(manifest, kv_cache_bytes=kv_cache_bytes, max_num_seqs=max_num_seqs)
        self.manifest = manifest
        self.prompts = Prompts(artifact, clock=clock)
        self.tokenizer = self.prompts.tokenizer
        self.default_params = SamplingParams(
            temperature=manifest.sampling.temperature,
            top_p=manifest.sampling.top_p,
            top_k=manifest.sampling.top_k,
            repetition_penalty=manifest.sampling.repetition_penalty,
        )
        self.context_length = budget.context_length
        vocab_size = min(manifest.model.vocab_size, self.tokenizer.vocab_size)  # embeddings may be padded
        self._limits = RequestLimits(vocab_size, budget.context_length)
        self._clock = clock
        self._opened_at = clock()
        self._request_numbers = itertools.count()
        self._grammars: Grammars | None = None
        self._opening_grammars = threading.Lock()
        log = None if kv_log is None else KVLog.open(kv_log)
        cache = PrefixCache(PagePool(budget.num_pages), clock=clock, kv_log=log)
        pages = store if store is None or isinstance(store, PageStore) else _open_store(store, store_bytes, manifest)
        self.namespaces = CacheNamespaces(ModelIdentity.of(manifest), None if pages is None else pages.secret)
        tier = None
        try:
            runner = (open_runner or _open_model_runner)(artifact, budget.num_pages, num_threads)
            if pages is not None:
                tier = DiskTier(pages, cache, _page_io(runner), clock=clock)
        except BaseException:
            if pages is not None:
                pages.close()
            raise
        expiry = None
        if cache_ttl_s is not None:
            drops: list[Callable[[float], object]] = [cache.drop_unused, self.tokenizer.forget_unused_texts]
            drops += [] if tier is None else [tier.drop_unused]
            expiry = CacheExpiry(cache_ttl_s, clock=clock, drops=drops)
        self._core = EngineCore(runner, cache, self._limits, policy=policy, clock=clock, tier=tier)
        self._loop = EngineLoop(
            self._core,
            clock=clock,
            on_exit=functools.partial(_close_all, tier, runner, log),
            expiry=expiry,
            max_num_requests=None if max_queue is None else max_num_seqs + max_queue,
        )
        # An engine that nobody closes is closed when it is collected, or before the interpreter ends.
        self._finalizer = weakref.finalize(self, self._loop.close)
        if tier is not None:
            tier.wake = self._loop.wake
            if tier.stats().num_pages:
                self._loop.call(lambda core: core.measure_prefill(policy.max_num_batched_tokens))

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        namespace: bytes = b"",
        cache_match: MatchPolicy | None = None,
        constraint: Grammar | ConstraintSource | None = None,
    ) -> Completion:
        """Continue `prompt` (text, or token ids fed as they are) and wait for the end.

        Raises:
            EmptyPrompt, ContextLengthExceeded, InvalidParameter, InvalidGrammar: before anything is computed.
            ConstraintFailed: the reply cannot go on by its grammar.
            EngineOverloaded: too many requests wait.
            EngineError: the request could not be computed, or the engine is closed.
        """
        return self.stream(
            prompt, params, namespace=namespace, cache_match=cache_match, constraint=constraint
        ).result()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        namespace: bytes = b"",
        cache_match: MatchPolicy | None = None,
        constraint: Grammar | ConstraintSource | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> GenerationStream:
        """Like `generate`, but returns at once; the deltas come while they are computed.

        `namespace` separates clients: cached prefixes are never shared between two namespaces. `cache_match` is
        the request's own choice of the engine's `match`. The reply keeps to `constraint`: a grammar, which is compiled
        here, or what `grammars.compile` made of one, for several requests. `on_ready` is
        called on the engine's thread whenever `poll` has something new (a delta or an error): an event loop
        passes `lambda: loop.call_soon_threadsafe(event.set)`. It must neither block nor raise.
        """
        self._loop.require_room()
        policy = self._match if cache_match is None else _checked_match(cache_match)
        seam_of = None if policy == "exact" else namespace
        prepared = self.prompts.completion(prompt, seam_of=seam_of, context_length=self.context_length)
        return self._submit(prepared, params, namespace, policy, None, constraint, on_ready)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        namespace: bytes = b"",
        cache_match: MatchPolicy | None = None,
        tools: Sequence[Tool] = (),
        constraint: Grammar | ConstraintSource | None = None,
    ) -> Completion:
        """Answer a conversation of `{"role": ..., "content": ...}` messages, rendered by the model's
        template, which is told of `tools`; `tool_format.grammar(tools, "auto")` is a constraint by which it calls them.

        Raises:
            InvalidRequest: the artifact has no chat template, or the template refuses the messages.
            EmptyPrompt, ContextLengthExceeded, InvalidParameter, EngineError: as `generate`.
        """
        return self.stream_chat(
            messages, params, namespace=namespace, cache_match=cache_match, tools=tools, constraint=constraint
        ).result()

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        namespace: bytes = b"",
        cache_match: MatchPolicy | None = None,
        tools: Sequence[Tool] = (),
        constraint: Grammar | ConstraintSource | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> GenerationStream:
        """Like `chat`, but returns at once; see `stream`."""
        self._loop.require_room()
        policy = self._match if cache_match is None else _checked_match(cache_match)
        seam_of = None if policy == "exact" else namespace
        prepared = self.prompts.chat(messages, tools, seam_of=seam_of, context_length=self.context_length)
        return self._submit(prepared, params, namespace, policy, self.prompts.render_reply, constraint, on_ready)

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """The ids that `generate` feeds for a text; `add_bos` overrides what the model asks for.

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
        with self._opening_grammars:
            if self._grammars is None:
                from .grammar_vocabulary import GrammarVocabulary
                from .grammars import Grammars  # loads a native library

                tokenizer, vocab_size = self.tokenizer, self._limits.vocab_size
                eos_token_ids = self.manifest.tokenizer.eos_token_ids
                if not eos_token_ids:
                    raise InvalidRequest(f"model {self.manifest.name} has no end of replies, so none can be structured")
                self._grammars = Grammars(
                    lambda: GrammarVocabulary(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids),
                    eos_token_ids,
                )
            return self._grammars

    def cache_tree(self, namespace: bytes = b"") -> CacheTree:
        """What is cached for a namespace, after the step that runs.

        Raises:
            EngineError: the engine is closed, or died.
        """
        return self._loop.call(
            lambda core: CacheTree.of(core.cache, namespace, self._clock(), live=core.live_uses(namespace))
        )

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
        return self._loop.max_num_requests

    def stats(self) -> EngineStats:
        """Counters and the state now; never waits for a step."""
        core, counters, cache = self._core, self._core.counters, self._core.cache
        return EngineStats(
            alive=self._loop.is_alive,
            crash=self._loop.crash,
            stalled_s=self._loop.stalled_s,
            uptime_s=self._clock() - self._opened_at,
            num_waiting=core.num_waiting + self._loop.num_submitted,
            num_running=core.num_running,
            num_pages=cache.pool.num_pages,
            num_free_pages=cache.pool.num_free,
            num_cached_pages=cache.pool.num_cached,
            num_steps=counters.num_steps,
            num_finished=counters.num_finished,
            num_failed=counters.num_failed,
            num_rejected=self._loop.num_rejected,
            num_preemptions=core.num_preemptions,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_cached_tokens=counters.num_cached_tokens,
            num_generated_tokens=counters.num_generated_tokens,
            num_computed_tokens=counters.num_computed_tokens,
            num_evicted_pages=cache.tree.num_evicted_pages,
            num_failed_steps=counters.num_failed_steps,
            num_failed_steps_in_a_row=counters.num_failed_steps_in_a_row,
            last_failure=counters.last_failure,
            num_unused_request_rows=cache.num_unused_request_rows,
            num_unused_cache_rows=cache.tree.num_unused_rows,
            finished_by_reason=dict(counters.finished_by_reason),
            failed_by_type=dict(counters.failed_by_type),
            cached_tokens_by_kind=dict(counters.cached_tokens_by_kind),
            disk_tokens_by_kind=dict(counters.disk_tokens_by_kind),
            tier=None if core.tier is None else core.tier.stats(),
            to_first_token=counters.to_first_token.read(),
            between_tokens=counters.between_tokens.read(),
            to_end=counters.to_end.read(),
        )

    def close(self) -> None:
        """Cancel what runs, stop the thread and free the model; later requests raise EngineClosed.

        May be called twice.
        """
        self._finalizer()
        if self._grammars is not None:
            self._grammars.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(
        self,
        prompt: PreparedPrompt,
        params: SamplingParams | None,
        namespace: bytes,
        policy: MatchPolicy,
        render_reply: Callable[[str], str] | None,
        constraint: Grammar | ConstraintSource | None,
        on_ready: Callable[[], None] | None,
    ) -> GenerationStream:
        params = self.default_params if params is None else params
        tokenizer = self.tokenizer
        self._limits.validate(prompt, params)
        if isinstance(constraint, Grammar):
            constraint = self.grammars.compile(constraint)
        request = Request(
            f"request-{next(self._request_numbers)}",
            prompt,
            params,
            decoder=self.tokenizer.stream(
                prompt_ids=prompt.ids, swallow_leading_space=prompt.swallow_leading_space
            ),
            vocab_size=self._limits.vocab_size,
            eos_token_ids=self.manifest.tokenizer.eos_token_ids,
            namespace=namespace,
            arrived_at=self._clock(),
            spelled=functools.cache(lambda: tokenizer.spelled(prompt.ids)) if policy == "text" else None,
            render_reply=render_reply if policy == "text" else None,
            explain=self.prompts.explain,
            constraint=None if constraint is None else constraint.start(),
        )
        stream = GenerationStream(
            request.request_id, tuple(prompt.ids), cancel=self._loop.cancel, on_ready=on_ready
        )
        self._loop.submit(request, stream.deliver)
        return stream


def _close_all(*parts: DiskTier | Runner | KVLog | None) -> None:
    for part in parts:
        if part is not None:
            part.close()


def _open_store(directory: str | Path, num_bytes: int, manifest: Manifest) -> PageStore:
    return PageStore.open(directory, StoreIdentity.of(manifest), max_bytes=num_bytes)


def _page_io(runner: Runner) -> PageIO:
    if not isinstance(runner, PageIO):
        raise InvalidParameter(f"{type(runner).__name__} cannot copy pages, which a store needs; open without one")
    return runner


def _open_model_runner(artifact: Artifact, num_pages: int, num_threads: int | None) -> Runner:
    from .model_runner import ModelRunner  # loads the native runtime, which other runners do without

    return ModelRunner(artifact, num_pages=num_pages, num_threads=num_threads)


def _policy(manifest: Manifest, max_num_seqs: int, max_num_batched_tokens: int | None) -> SchedulerPolicy:
    limits = manifest.module
    max_num_tokens = limits.max_num_tokens if max_num_batched_tokens is None else max_num_batched_tokens
    _require_within("max_num_seqs", max_num_seqs, min(limits.max_num_logits, limits.max_num_tokens))
    _require_within("max_num_batched_tokens", max_num_tokens, limits.max_num_tokens)
    return SchedulerPolicy(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_tokens)


def _checked_match(match: MatchPolicy) -> MatchPolicy:
    if match not in get_args(MatchPolicy):
        raise InvalidParameter(f"match is {match!r}; use one of {', '.join(get_args(MatchPolicy))}")
    return match


def _require_within(name: str, value: int, most: int) -> None:
    if not isinstance(value, int) or not 1 <= value <= most:
        raise InvalidParameter(f"{name} is {value!r}; this artifact allows 1 to {most}")
