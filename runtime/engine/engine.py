"""The engine as a library: text in, text out, from any number of threads.

Prepares requests in the caller's thread, and hands them to the one thread that owns the model. Knows nothing of HTTP.
`prompts.py` handles text, `engine_loop.py` the thread, `engine_core.py` batching and pages.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from radixlm.tokenizer_fix import PreparedPrompt

from ..artifact import Artifact
from ..artifact.find_artifact import find_artifact
from ..cache.cache_namespace import adapted_namespace
from ..cache.cache_tree import CacheCleared, CachedText, CacheTree
from ..chat.tools.tool_calls import ReadReply, ToolCall, read_reply
from ..chat.tools.tool_format import AnyTool, ToolFormat
from ..errors import EngineError, InvalidArgument, StoreOff
from ..fields import fields_of, takes_fields_of
from ..memory import ForgetResult, Memory
from .background_work import IdleThread
from .calls.arguments import require_known
from .calls.text_calls import TextCalls
from .completion import Completion
from .engine_options import EngineOptions
from .engine_stats import EngineStats
from .generation_stream import GenerationStream
from .opening import open_parts
from .reply import Reply
from .request import Request
from .request_maker import RequestMaker
from .request_options import NO_OPTIONS, Message, RequestOptions
from .sampling_params import SamplingParams
from .vectors.calls import VectorCalls
from .vectors.prompts import VectorPrompts

if TYPE_CHECKING:
    from ..chat.grammars import Grammars

_ELSEWHERE = {
    **dict.fromkeys(("n_ctx", "max_model_len"), "context_length"),
    **dict.fromkeys(("threads", "n_threads"), "num_threads"),
    "kv_cache_gb": "kv_cache_bytes",
}
"""Names of options in other libraries and on the command line, and our names for them."""
CLEARS_WITHIN_S = 60.0  # on disk; clearing waits for pending writes


class Engine(TextCalls, VectorCalls):
    """A compiled model, ready to answer; close it, or use it as a context manager.

    >>> with Engine("smollm2.radixlm") as engine:  # doctest: +SKIP
    ...     print(engine.generate("The capital of France is", max_tokens=8).text)

    Args:
        model: the artifact, or its directory. Opening it runs its model.so: trust where it comes from. Or what
            `radixlm compile` takes, such as "model.gguf" or "hf:ORG/NAME:Q4_K_M": it is downloaded if need be, compiled
            once, and kept in the cache folder.
        more: the fields of `EngineOptions`: `Engine(model, num_threads=4)`.

    Attributes:
        prompts: turns texts and conversations into token ids.
        vector_prompts: the same for texts to embed, and for documents to score.
        default_params: sampling defaults recommended by the model; `dataclasses.replace` changes some of them.
        match: default policy for matching cached prefixes; a request can override it.
        context_length: tokens of prompt and reply together.
        reply_options: options that can change the reply to a request, by name.
        namespaces: makes the `namespace` of a client whose cache is not shared with others.
        adapters: the LoRA adapters that requests can name.
        queue: number of requests that run and wait, and room for more.
        encode, encode_chat, decode, render: the methods of `prompts`.

    Raises:
        ArtifactError: the artifact cannot be used.
        CompileError: the model cannot be downloaded or compiled.
        InvalidArgument: an option is unknown.
        InvalidParameter: an option is outside its range, or `kv_cache_bytes` holds no context worth having, or less
            than `context_length`.
        StoreError: the store cannot be used, or another process uses it.
    """

    @takes_fields_of(EngineOptions)
    def __init__(self, model: str | Path | Artifact, /, **more: Any) -> None:
        require_known(more, fields_of(EngineOptions), "Engine", _ELSEWHERE, help="help(EngineOptions)")
        self._options = options = EngineOptions(**more)
        artifact = Artifact.open(find_artifact(model)) if isinstance(model, str | Path) else model
        if not hasattr(artifact, "manifest"):
            raise InvalidArgument(f"model is {model!r:.60}; it must be a model, or an artifact", param="model")
        opened = open_parts(artifact, options)
        self.manifest, self.prompts, self.namespaces = artifact.manifest, opened.prompts, opened.namespaces
        self.tokenizer = self.prompts.tokenizer
        self.encode, self.encode_chat = self.prompts.encode, self.prompts.encode_chat
        self.decode, self.render = self.prompts.decode, self.prompts.render
        self.default_params = SamplingParams.recommended(self.manifest.sampling)
        self.match, self.context_length = options.match, opened.core.limits.context_length
        self.reply_options, self._memory_bytes = opened.reply_options, opened.memory_bytes
        self._opened_at, self._context_notice = options.clock(), opened.context_notice
        self._idle_thread: IdleThread | None = None
        self._core, self._loop, self.queue = opened.core, opened.loop, opened.loop.queue
        limits, self.adapters = opened.core.limits, opened.adapters
        self._requests = RequestMaker(self.prompts, self.manifest, options, limits, self.queue, opened.adapters)
        self.vector_prompts = VectorPrompts(self.tokenizer, self.manifest, max_tokens=limits.context_length)
        self._num_at_once = 2 * options.max_num_seqs  # so that the next ones are queued when some end
        # An engine that is never closed is closed when it is collected, or before the interpreter exits.
        self._finalizer = weakref.finalize(self, self._loop.close)

    def stream_prepared(self, prompt: PreparedPrompt, reply: Reply, params: SamplingParams) -> GenerationStream:
        """Like `stream`, with a prompt of token ids and the reply that `prompts.reply` made for it."""
        return self._start(self._requests.prepared(prompt, reply, params), None)

    @property
    def tool_format(self) -> ToolFormat:
        """The format in which the model writes tool calls."""
        return self.prompts.tool_format

    def read_reply(self, text: str, tools: Sequence[AnyTool]) -> ReadReply:
        """Return the parts of a reply, and which of these tools it calls."""
        return read_reply(text, self.tool_format, tools)

    @property
    def grammars(self) -> Grammars:
        """The compiler of grammars for replies; see `Prompts.grammars`."""
        return self.prompts.grammars

    def note_call(
        self, call: ToolCall, options: RequestOptions = NO_OPTIONS, stream: GenerationStream | None = None
    ) -> None:
        """Remember a tool call that a client received, so that the prompt matches the cache when it comes back.

        It is recognized however the client formats the arguments. With a store and the reply's `stream`, also after a
        restart.
        """
        namespace = self._requests.decided(options).calls_of
        if namespace is None:
            return
        self.prompts.call_history.note(namespace, call)
        if stream is not None and self._options.store is not None:
            with suppress(EngineError):  # it was closed, or died: the client has the reply anyway
                self._loop.post(lambda core: core.keep_call(namespace, call, stream.computed_ids))

    def as_generated(self, messages: Sequence[Message], options: RequestOptions = NO_OPTIONS) -> Sequence[Message]:
        """Return the conversation with the calls of `note_call` as the model wrote them."""
        return self._requests.as_generated(messages, options)

    def cache_tree(self, namespace: bytes = b"") -> CacheTree:
        """Return the cached prefixes of a namespace, after the running step.

        Raises:
            EngineError: the engine is closed, or died.
        """
        return self._loop.call(lambda core: core.cache_tree(namespace))

    def cached_text(self, namespace: bytes, node_id: int) -> CachedText | None:
        """Return the tokens of one run of `cache_tree`; None if it is gone.

        Raises:
            EngineError: the engine is closed, or died.
        """
        return self._loop.call(lambda core: core.cached_text(namespace, node_id))

    def clear_cache(self, namespace: bytes = b"") -> CacheCleared:
        """Forget a namespace's prefixes and texts; what running requests use is dropped later, when memory is needed.

        Returns when they are removed from disk, too.

        Raises:
            EngineError: the engine is closed, or died.
            StoreOff: memory has forgotten them, but the disk failed or hangs, and may still have some.
        """
        parts = [namespace, *(adapted_namespace(namespace, digest) for digest in self.adapters.digests)]
        forgotten = self._loop.call(lambda core: sum(map(core.forget, parts), ForgetResult()))
        deadline = time.monotonic() + CLEARS_WITHIN_S
        try:
            for done in forgotten.pending:
                done.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            message = f"memory has forgotten them, and the disk not in {CLEARS_WITHIN_S:.0f} s; ask again to be sure"
            raise StoreOff(message) from None
        return CacheCleared(
            forgotten.num_freed_pages, forgotten.num_kept_pages, num_discarded_pages=forgotten.num_discarded_pages
        )

    def num_cached_elsewhere(self, prompt_ids: Sequence[int], namespace: bytes = b"") -> int:
        """Return how many of a prompt's tokens other namespaces have cached: for the server's owner, never for clients.

        Raises:
            EngineError: the engine is closed, or died.
        """
        return self._loop.call(lambda core: core.cache.num_elsewhere(prompt_ids, namespace))

    @property
    def store_directory(self) -> Path | None:
        """The directory of the disk store; None if there is none, or it cannot be used."""
        return None if self._core.tier is None else self._core.tier.store.directory

    def remember(self, memory: Memory) -> None:
        """Add a memory of the server: it forgets what this engine forgets, a namespace or unused entries."""
        self._loop.call(lambda core: core.memories.add(memory))

    def warm_up(self) -> None:
        """Do the work that any first request would wait for. Raises EngineError like `check`."""
        self._loop.call(lambda core: core.warm_up())

    def expect_grammars(self) -> None:
        """Load the grammar compiler once there was no request for a second, so that the first grammar is fast.

        Later calls do nothing. With a vocabulary of 150,000 tokens it takes 90 MB. An error is raised again by the
        first grammar.
        """
        if self._idle_thread is None:
            self._idle_thread = IdleThread(self._grammars_in_pieces(), quiet_s=lambda: self.queue.quiet_s)

    def check(self) -> None:
        """Raise AssertionError unless requests, sequences, pages and prefixes agree, after the running step; slow.

        Raises:
            EngineError: the engine is closed, or died.
        """
        self._loop.call(lambda core: core.check())

    def stats(self) -> EngineStats:
        """Return counters and the current state; never waits for a step.

        Raises:
            EngineClosed: the engine belongs to another process.
        """
        self._require_usable()
        uptime_s = self._options.clock() - self._opened_at
        return EngineStats.of(
            self._core,
            self._loop,
            uptime_s=uptime_s,
            memory_bytes=self._memory_bytes,
            context_notice=self._context_notice,
        )

    def close(self) -> None:
        """Cancel all requests, stop the thread and free the model; later requests raise EngineClosed. Can be called
        twice. Does nothing in a forked child."""
        if not self._loop.is_own:
            return
        if self._idle_thread is not None:
            self._idle_thread.stop()
        self._finalizer()
        self.prompts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        state = "open" if self._loop.is_alive else "closed"
        pages = self._core.cache.pool.num_pages
        return f"<Engine {self.manifest.name}: {state}, context of {self.context_length} tokens, {pages} pages>"

    def _require_usable(self) -> None:
        self._loop.require_own_process()

    def _grammars_in_pieces(self) -> Iterator[None]:
        yield from self.grammars.pieces_of_warm_up()  # the first piece also loads a native library

    def _answer(self, request: Request) -> Completion:
        """Submit a request, and return its completion; an interrupt of the wait cancels it."""
        # entered first: no interrupt comes between it and the request
        with GenerationStream.of(request, self._loop.cancel) as stream:
            self._submit(request, stream)
            return stream.result()

    def _start(self, request: Request, on_ready: Callable[[], None] | None) -> GenerationStream:
        """Submit a request, and return the stream of its outputs.

        `on_ready` is called in the engine's thread after each output.
        """
        stream = GenerationStream.of(request, self._loop.cancel, on_ready)
        self._submit(request, stream)
        return stream

    def _submit(self, request: Request, stream: GenerationStream) -> None:
        recorder = self._options.recorder
        self._loop.submit(request, stream.deliver if recorder is None else recorder.watch(request, stream.deliver))
