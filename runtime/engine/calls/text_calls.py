"""The calls that ask an engine for replies: one, several, streamed, awaited, or as they end.

Knows arguments and ways to wait. The engine makes and computes the requests.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Unpack, cast, overload

from ...errors import InvalidArgument
from ..completion import Completion
from ..generation_stream import GenerationStream
from ..request import Request
from ..request_maker import RequestMaker
from ..request_options import Message, Prompt
from ..sampling_params import SamplingParams
from .arguments import Params, RequestKeywords, are_conversations, are_prompts, is_conversation, parse_arguments
from .batch import ProgressLine, PromptResult, complete_all, results


class TextCalls(ABC):
    """The calls of an engine that take prompts and return replies; the engine makes and starts the requests.

    Every call takes sampling parameters and options in the same three ways, which can be mixed::

        engine.generate("x", SamplingParams(max_tokens=5))
        engine.generate("x", {"max_tokens": 5})
        engine.generate("x", max_tokens=5, response_format={"type": "object"}, cache_match="off")

    Keywords are the fields of `SamplingParams` and `RequestOptions`, `options`, which is a whole `RequestOptions`, and
    `response_format`: a JSON schema, OpenAI's `response_format`, a pydantic model, another type that pydantic knows, or
    a `Grammar`. Fields that are not given come from the positional value, else from the engine's `default_params`.
    """

    default_params: SamplingParams
    _requests: RequestMaker
    _num_at_once: int  # prompts that `generate_many` keeps in the engine at once

    @abstractmethod
    def _require_usable(self) -> None:
        """Raise EngineError if no request can be made."""

    @abstractmethod
    def _start(self, request: Request, on_ready: Callable[[], None] | None) -> GenerationStream:
        """Hand a request to the engine."""

    @abstractmethod
    def _answer(self, request: Request) -> Completion:
        """Wait for a request and return its completion; an interrupted wait cancels it."""

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self, prompt: Prompt, params: Params | None = None, **options: Unpack[RequestKeywords]
    ) -> Completion: ...

    @overload
    def generate(
        self, prompt: Sequence[Prompt], params: Params | None = None, **options: Unpack[RequestKeywords]
    ) -> list[Completion]: ...

    def generate(
        self, prompt: Prompt | Sequence[Prompt], params: Params | None = None, **options: Unpack[RequestKeywords]
    ) -> Completion | list[Completion]:
        """Continue `prompt` (text or token ids) and wait for the end.

        Several prompts in a list are batched, and their completions are in the order of the list. If one is refused or
        fails, the others are cancelled and the error names it; `generate_many` continues instead.
        An exception that interrupts the wait, such as Ctrl-C, cancels the request.

        Args:
            params: `SamplingParams`, or a mapping of the fields that differ from the engine's `default_params`.
            options: fields of `SamplingParams` and `RequestOptions`, which override `params` and `options`, a whole
                `RequestOptions`; and `response_format`, a JSON schema or a type that the reply must follow.

        Raises:
            InvalidArgument: an argument is unknown or of the wrong kind; also a TypeError.
            EmptyPrompt, ContextLengthExceeded, InvalidParameter, InvalidGrammar: before anything is computed.
            ConstraintFailed: no token can continue the reply by its grammar.
            EngineOverloaded: too many requests are waiting.
            EngineError: the request could not be computed, or the engine is closed or belongs to another process.
        """
        if are_prompts(prompt):
            return complete_all(partial(self.stream, each, params, **options) for each in prompt)
        return self._answer(self._completion_request(cast("Prompt", prompt), params, options))

    def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        on_ready: Callable[[], None] | None = None,
        **options: Unpack[RequestKeywords],
    ) -> GenerationStream:
        """Like `generate`, but return at once; iterate the stream with `for` or `async for` for the deltas.

        `on_ready` is called on the engine's thread when `poll` has something new (a delta or an error): an event loop
        passes `lambda: loop.call_soon_threadsafe(event.set)`. It must neither block nor raise.
        """
        return self._start(self._completion_request(prompt, params, options), on_ready)

    @overload
    def chat(
        self, messages: Sequence[Message], params: Params | None = None, **options: Unpack[RequestKeywords]
    ) -> Completion: ...

    @overload
    def chat(
        self, messages: Sequence[Sequence[Message]], params: Params | None = None, **options: Unpack[RequestKeywords]
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Completion | list[Completion]:
        """Answer a conversation of `{"role": ..., "content": ...}` messages, rendered by the model's template.

        Several conversations in a list are batched, like the prompts of `generate`. An exception that interrupts the
        wait cancels the request.

        Raises:
            InvalidRequest: the artifact has no chat template, a role is unknown, or the template refuses the messages.
            InvalidArgument, EmptyPrompt, ContextLengthExceeded, InvalidParameter, EngineError: as `generate`.
        """
        if are_conversations(messages):
            return complete_all(partial(self.stream_chat, each, params, **options) for each in messages)
        return self._answer(self._chat_request(cast("Sequence[Message]", messages), params, options))

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: Params | None = None,
        *,
        on_ready: Callable[[], None] | None = None,
        **options: Unpack[RequestKeywords],
    ) -> GenerationStream:
        """Like `chat`, but return at once; see `stream`."""
        return self._start(self._chat_request(messages, params, options), on_ready)

    async def agenerate(
        self, prompt: Prompt, params: Params | None = None, **options: Unpack[RequestKeywords]
    ) -> Completion:
        """Like `generate` of one prompt, without blocking the event loop; cancelling the task cancels the request."""
        request = await asyncio.to_thread(self._completion_request, prompt, params, options)
        return await self._start(request, None).aresult()

    async def achat(
        self, messages: Sequence[Message], params: Params | None = None, **options: Unpack[RequestKeywords]
    ) -> Completion:
        """Like `chat` of one conversation, without blocking the event loop; cancelling the task cancels the request."""
        request = await asyncio.to_thread(self._chat_request, messages, params, options)
        return await self._start(request, None).aresult()

    def generate_many(
        self,
        prompts: Iterable[Prompt | Sequence[Message]],
        params: Params | None = None,
        *,
        progress: bool = False,
        **options: Unpack[RequestKeywords],
    ) -> Iterator[PromptResult]:
        """Yield the result of each prompt when it ends, with its index; a prompt that fails yields its error.

        Prompts are texts, token ids or conversations. They are taken from the iterable as there is room, so it can be
        long. With `progress`, a line on standard error counts the finished prompts. Leaving the loop cancels the rest.

        Raises:
            InvalidArgument: an argument other than the prompts is unknown or of the wrong kind.
            EngineError: the engine is closed or belongs to another process.
        """
        if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
            raise InvalidArgument(
                f"prompts is {prompts!r:.60}; it must be a list or iterator of prompts", param="prompts"
            )
        parse_arguments(params, options, self.default_params)  # before a prompt is taken
        self._require_usable()
        return self._run_many(prompts, params, options, progress)

    def _run_many(
        self,
        prompts: Iterable[Prompt | Sequence[Message]],
        params: Params | None,
        options: RequestKeywords,
        progress: bool,
    ) -> Iterator[PromptResult]:
        """Yield the result of each prompt or conversation as it ends, with a progress line if wanted."""
        ended = results(prompts, lambda prompt: self._prepare(prompt, params, options), self._num_at_once)
        if not progress:
            yield from ended
            return
        with ProgressLine(len(prompts) if isinstance(prompts, Sized) else None) as line:
            for result in ended:
                line.count(result)
                yield result

    def _prepare(
        self, prompt: Prompt | Sequence[Message], params: Params | None, options: RequestKeywords
    ) -> Callable[..., GenerationStream]:
        """Return a function that starts a request for a prompt or a conversation; it takes `on_ready`."""
        if is_conversation(prompt):
            return partial(self.stream_chat, prompt, params, **options)
        return partial(self.stream, cast("Prompt", prompt), params, **options)

    def _completion_request(self, prompt: Prompt, params: Params | None, keywords: RequestKeywords) -> Request:
        """Return the request for one prompt; raise InvalidArgument if it is a list of prompts."""
        self._require_usable()
        if are_prompts(prompt):
            raise InvalidArgument(
                f"prompt is {prompt!r:.60}; it must be one prompt: pass several to generate() or generate_many(), or "
                "run agenerate() of each with asyncio.gather()",
                param="prompt",
            )
        return self._requests.completion(prompt, *parse_arguments(params, keywords, self.default_params))

    def _chat_request(self, messages: Sequence[Message], params: Params | None, keywords: RequestKeywords) -> Request:
        self._require_usable()
        are_conversations(messages)
        return self._requests.chat(messages, *parse_arguments(params, keywords, self.default_params))
