"""The engine as a library: text in, text out, from any number of threads.

Prepares requests in the caller's thread, and hands them to the one thread that owns the model. Knows nothing of HTTP;
text is `prompts.py`'s, the thread `engine_loop.py`'s, batching and pages `engine_core.py`'s.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack, cast, overload

from ..artifact import Artifact
from ..cache.cache_tree import CacheCleared, CacheTree
from ..chat.tools.tool_calls import ToolCall
from ..chat.tools.tool_format import ToolFormat
from ..errors import EngineError, StoreOff
from ..fields import takes_fields_of
from .completion import Completion
from .engine_options import EngineOptions
from .engine_stats import EngineStats
from .generation_stream import GenerationStream, complete_all
from .opening import open_parts
from .request import Request
from .request_maker import RequestMaker
from .request_options import (
    NO_OPTIONS,
    Message,
    Prompt,
    RequestKeywords,
    RequestOptions,
    are_conversations,
    are_prompts,
    options_of,
)
from .sampling_params import SamplingParams
from .upkeep import IdleThread

if TYPE_CHECKING:
    from ..chat.grammars import Grammars

CLEARS_WITHIN_S = 60.0  # the disk; what is to be forgotten waits for what is to be written


class Engine:
    """A compiled model, ready to answer; close it, or use it as a context manager.

    >>> with Engine("smollm2.radixlm") as engine:  # doctest: +SKIP
    ...     print(engine.generate("The capital of France is", SamplingParams(max_tokens=8)).text)

    Args:
        model: the artifact, or its directory. Opening it runs its model.so: trust where it comes from.
        more: how it is opened; the fields of `EngineOptions`: `Engine(model, num_threads=4)`.

    Attributes:
        prompts: makes of texts and conversations what the model is fed.
        default_params: what the model's makers recommend; `dataclasses.replace` changes some of it.
        match: how cached prefixes may be found, unless a request says otherwise.
        context_length: tokens of prompt and reply together.
        reply_options: all options with which the same request may have another reply, by name.
        namespaces: makes the `namespace` of a client that is not to share with others.
        queue: how many requests run and wait, and how many more may come.
        encode, encode_chat, decode, render: those of `prompts`.

    Raises:
        ArtifactError: the artifact cannot be used.
        InvalidParameter: an option is outside its range, or `kv_cache_bytes` holds no context worth having, or less
            than `context_length`.
        StoreError: the store cannot be used, or another process uses it.
    """

    @takes_fields_of(EngineOptions)
    def __init__(self, model: str | Path | Artifact, /, **more: Any) -> None:
        self._options = options = EngineOptions(**more)
        artifact = Artifact.open(model) if isinstance(model, str | Path) else model
        opened = open_parts(artifact, options)
        self.manifest, self.prompts, self.namespaces = artifact.manifest, opened.prompts, opened.namespaces
        self.tokenizer = self.prompts.tokenizer
        self.encode, self.encode_chat = self.prompts.encode, self.prompts.encode_chat
        self.decode, self.render = self.prompts.decode, self.prompts.render
        self.default_params = SamplingParams.recommended(self.manifest.sampling)
        self.match, self.context_length = options.match, opened.core.limits.context_length
        self.reply_options = opened.reply_options
        self._opened_at, self._context_notice = options.clock(), opened.context_notice
        self._idle_thread: IdleThread | None = None
        self._core, self._loop, self.queue = opened.core, opened.loop, opened.loop.queue
        self._requests = RequestMaker(self.prompts, self.manifest, options, opened.core.limits, self.queue)
        # An engine that nobody closes is closed when it is collected, or before the interpreter ends.
        self._finalizer = weakref.finalize(self, self._loop.close)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestKeywords]
    ) -> Completion: ...

    @overload
    def generate(
        self, prompt: Sequence[Prompt], params: SamplingParams | None = None, **options: Unpack[RequestKeywords]
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        **options: Unpack[RequestKeywords],
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
        asked = options_of(**options)
        if are_prompts(prompt):
            return complete_all(partial(self.stream, each, params, options=asked) for each in prompt)
        return self._answer(self._requests.completion(cast(Prompt, prompt), params, asked))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        on_ready: Callable[[], None] | None = None,
        **options: Unpack[RequestKeywords],
    ) -> GenerationStream:
        """Like `generate`, but returns at once; the deltas come while they are computed, to `for` and `async for`.

        `options` are the fields of `RequestOptions`, or one such value: `stream(prompt, cache_match="off")` is
        `stream(prompt, options=RequestOptions(cache_match="off"))`. `on_ready` is called on the engine's thread when
        `poll` has something new (a delta or an error): an event loop passes
        `lambda: loop.call_soon_threadsafe(event.set)`. It must neither block nor raise.
        """
        return self._start(self._requests.completion(prompt, params, options_of(**options)), on_ready)

    @overload
    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Unpack[RequestKeywords]
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        **options: Unpack[RequestKeywords],
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Completion | list[Completion]:
        """Answer a conversation of `{"role": ..., "content": ...}` messages, rendered by the model's template.

        Several conversations in a list are computed together, as `generate` does it with prompts. An exception that
        interrupts the wait ends the request.

        Raises:
            InvalidRequest: the artifact has no chat template, or the template refuses the messages.
            EmptyPrompt, ContextLengthExceeded, InvalidParameter, EngineError: as `generate`.
        """
        asked = options_of(**options)
        if are_conversations(messages):
            return complete_all(partial(self.stream_chat, each, params, options=asked) for each in messages)
        return self._answer(self._requests.chat(cast("Sequence[Message]", messages), params, asked))

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        on_ready: Callable[[], None] | None = None,
        **options: Unpack[RequestKeywords],
    ) -> GenerationStream:
        """Like `chat`, but returns at once; see `stream`."""
        return self._start(self._requests.chat(messages, params, options_of(**options)), on_ready)

    @property
    def tool_format(self) -> ToolFormat:
        """How the model writes that it calls a tool."""
        return self.prompts.tool_format

    @property
    def grammars(self) -> Grammars:
        """Compiles what replies are to keep to; see `Prompts.grammars`."""
        return self.prompts.grammars

    def note_call(
        self, call: ToolCall, options: RequestOptions = NO_OPTIONS, stream: GenerationStream | None = None
    ) -> None:
        """A client was given this call in a reply to a request with these options: it is known when it comes back,
        however the client writes its arguments; where there is a store and the reply's `stream`, after a restart, too.
        """
        namespace = self._requests.decided(options).calls_of
        if namespace is None:
            return
        self.prompts.call_history.note(namespace, call)
        if stream is not None and self._options.store is not None:
            with suppress(EngineError):  # it was closed, or died: the client has the reply all the same
                self._loop.post(lambda core: core.keep_call(namespace, call, stream.computed_ids))

    def as_generated(self, messages: Sequence[Message], options: RequestOptions = NO_OPTIONS) -> Sequence[Message]:
        """A conversation in which the calls of `note_call` have their arguments as the model wrote them."""
        return self._requests.as_generated(messages, options)

    def cache_tree(self, namespace: bytes = b"") -> CacheTree:
        """What is cached for a namespace, after the step that runs.

        Raises:
            EngineError: the engine is closed, or died.
        """
        return self._loop.call(lambda core: core.cache_tree(namespace))

    def clear_cache(self, namespace: bytes = b"") -> CacheCleared:
        """Forget a namespace's prefixes and texts, but for what live requests use: that stays until it makes room.
        Returns when they are off the disk, too.

        Raises:
            EngineError: the engine is closed, or died.
            StoreOff: memory has forgotten them, and the disk, which failed or hangs, may still have some.
        """
        forgotten = self._loop.call(lambda core: core.forget(namespace))
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
        """How many of a prompt's tokens another namespace than this one has: for the owner of all, never for clients.

        Raises:
            EngineError: the engine is closed, or died.
        """
        return self._loop.call(lambda core: core.cache.num_elsewhere(prompt_ids, namespace))

    def warm_up(self) -> None:
        """Do what the first request would wait for, but not what only some ask for; raises as `check`."""
        self._loop.call(lambda core: core.warm_up())

    def expect_grammars(self) -> None:
        """Have ready, once there was no request for a second, what the first grammar would wait for; later calls do
        nothing. Where there are 150,000 tokens it takes 90 MB. An error comes again with the first grammar.
        """
        if self._idle_thread is None:
            self._idle_thread = IdleThread(self._grammars_in_pieces(), quiet_s=lambda: self.queue.quiet_s)

    def check(self) -> None:
        """Raise AssertionError unless requests, sequences, pages and prefixes agree, after the step that runs; slow.

        Raises:
            EngineError: the engine is closed, or died.
        """
        self._loop.call(lambda core: core.check())

    def stats(self) -> EngineStats:
        """Counters and the state now; never waits for a step."""
        uptime_s = self._options.clock() - self._opened_at
        return EngineStats.of(self._core, self._loop, uptime_s=uptime_s, context_notice=self._context_notice)

    def close(self) -> None:
        """Cancel what runs, stop the thread and free the model; later requests raise EngineClosed. May be called
        twice."""
        if self._idle_thread is not None:
            self._idle_thread.stop()
        self._finalizer()
        self.prompts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _grammars_in_pieces(self) -> Iterator[None]:
        yield from self.grammars.pieces_of_warm_up()  # the first piece loads a native library, too

    def _answer(self, request: Request) -> Completion:
        """Wait for the end of a request, which ends with the wait."""
        # entered first: no interrupt comes between it and the request
        with GenerationStream.of(request, self._loop.cancel) as stream:
            self._loop.submit(request, stream.deliver)
            return stream.result()

    def _start(self, request: Request, on_ready: Callable[[], None] | None) -> GenerationStream:
        stream = GenerationStream.of(request, self._loop.cancel, on_ready)
        self._loop.submit(request, stream.deliver)
        return stream
