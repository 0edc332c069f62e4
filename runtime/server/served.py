"""One model of a server with everything that belongs to it: its engine, names, options, threads and namespaces.

Knows no API's format and no other model. `models.py` has the table of models.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import msgspec
from radixlm.tokenizer_fix import TokenizerError
from starlette.requests import Request
from starlette.responses import Response

from ..cache.cache_namespace import CacheScope
from ..cache.why_not_more import MatchPolicy
from ..chat.grammar import Grammar
from ..chat.token_constraint import ConstraintSource
from ..chat.tools.tool_enforcement import relaxed
from ..engine.completion import Completion
from ..engine.generation_stream import StartRequest
from ..engine.request_options import NO_OPTIONS, RequestOptions
from ..engine.sampling_params import SamplingParams
from ..errors import InvalidGrammar, InvalidParameter
from ..version import VERSION
from .choices import Choices, Waker
from .http.api_keys import api_key_of, client_of
from .http.connection import while_connected
from .request_log import record_of
from .server_options import ServerOptions
from .stored.stored import Stored
from .truncation import Message, TruncatedHistory, Truncation, drop_middle
from .unknown_fields import SURROGATES
from .unread_parts import refuse_unread
from .work_queues import WorkQueues

if TYPE_CHECKING:
    from ..engine.engine import Engine

T = TypeVar("T")

MAX_PARTS_AT_ONCE = 1024  # tokens and logprobs of a response encoded on the event loop: a few milliseconds
ANY = "*"


class OptionFields(Protocol):
    """The fields of a request body that set options of the engine."""

    cache_salt: str | None
    prompt_cache_key: str | None
    cache_match: MatchPolicy | None
    kv_budget: float | None
    speculate: bool | None
    return_progress: bool | None


@dataclass(frozen=True)
class Served:
    """One model of a server: a row of the table `Models`.

    Attributes:
        names: the listed names, at least one. The first is used if a request names none.
        takes_any: accept every name that no other model has.
        options: the server's options for this model.
        stored: responses, conversations, files and batches; None: nothing is stored.
        fingerprint: `system_fingerprint` of replies, see `fingerprint_of`.
        created: Unix time at which serving began.
        lora: the name of the LoRA adapter that all requests have; None: the model as it was compiled.
    """

    engine: Engine
    names: tuple[str, ...]
    takes_any: bool
    options: ServerOptions
    work_queues: WorkQueues
    fingerprint: str
    created: int
    stored: Stored | None = None
    lora: str | None = None
    _wakers: dict[asyncio.AbstractEventLoop, Waker] = field(default_factory=dict)

    @classmethod
    def of(cls, engine: Engine, options: ServerOptions, stored: Stored | None = None) -> Self:
        """Return the row of an engine. Its names are `options.model_ids`, or the artifact's own name; `*` accepts any
        name, and is not listed.
        """
        listed = listed_of(options.model_ids) or (engine.manifest.name,)
        fingerprint = fingerprint_of(engine, options.truncation)
        if stored is not None:
            engine.remember(stored)
        work_queues, now = WorkQueues.of(engine), int(time.time())
        return cls(
            engine, listed, ANY in options.model_ids, options, work_queues, fingerprint, created=now, stored=stored
        )

    @property
    def adapted(self) -> Sequence[Self]:
        """The same model with each LoRA adapter, called `MODEL:ADAPTER`, or by the adapter's name."""
        return [
            replace(
                self,
                names=(*(f"{name}:{adapter}" for name in self.names), adapter),
                takes_any=False,
                fingerprint=fingerprint_of(self.engine, self.options.truncation, adapter),
                lora=adapter,
            )
            for adapter in self.engine.adapters.names
        ]

    @property
    def parent(self) -> str:
        """The name of the model whose adapter this is."""
        return self.name.removesuffix(f":{self.lora}")

    @property
    def name(self) -> str:
        """The model's first name."""
        return self.names[0]

    def called(self, asked: str | None) -> str:
        """Return the model name in a reply: the one that the request has, or the first name."""
        return asked or self.name

    def truncates(self, asked: Truncation | None) -> bool:
        """Return whether a request with this `truncation`, or None, drops text that does not fit into the context."""
        return (asked or self.options.truncation) == "middle"

    def namespace(self, request: Request, cache_salt: str | None, prompt_cache_key: str | None) -> bytes:
        """Return the cache namespace of a request, made of its API key, salt and cache key. Lists an ignored cache key
        in the header.

        Raises:
            InvalidParameter: the salt or the cache key is too long, or has a lone surrogate.
        """
        ignored = record_of(request).ignored
        if ignored is not None and SURROGATES in ignored.harmless:
            for name, value in {"cache_salt": cache_salt, "prompt_cache_key": prompt_cache_key}.items():
                if value is not None and "\ufffd" in value:  # different keys could become the same text
                    raise InvalidParameter(f"{name} has a lone surrogate; send valid Unicode")
        if self.options.ignores_prompt_cache_key and prompt_cache_key is not None:
            prompt_cache_key = None
            if ignored is not None:
                ignored.harmless.add("prompt_cache_key")
        namespace = self.engine.namespaces.of(CacheScope(api_key_of(request), cache_salt, prompt_cache_key))
        record_of(request).namespace = namespace
        return namespace

    def request_options(self, request: Request, body: OptionFields) -> RequestOptions:
        """Return a request's options for the engine, apart from prompt, sampling parameters and grammar.

        Raises:
            InvalidParameter: a value is outside its range, or too long.
        """
        return RequestOptions(
            namespace=self.namespace(request, body.cache_salt, body.prompt_cache_key),
            client=client_of(request),
            cache_match=body.cache_match,
            kv_budget=body.kv_budget,
            lora=self.lora,
            request_id=record_of(request).request_id or None,
            speculate=body.speculate is not False,
            with_progress=bool(body.return_progress),
            idle=record_of(request).is_idle,
        )

    async def constraint(self, request: Request, grammar: Grammar | None) -> ConstraintSource | None:
        """Compile a grammar into a constraint of the reply; None if there is no grammar.

        Raises:
            InvalidGrammar: the grammar is invalid or too expensive.
            GrammarsOverloaded: too many grammars are being compiled.
            ClientGone: the client disconnected before the end.
        """
        if grammar is None:
            return None
        compiling = self.engine.grammars.compile_on_loop(grammar, client=client_of(request))
        return await while_connected(request.receive, compiling)

    async def as_far_as_followed(
        self,
        request: Request,
        content: Grammar,
        constrain: Callable[[Grammar], Awaitable[T]],
        *,
        field: str,
    ) -> T:
        """Return the result of `constrain` for a grammar, or for a relaxed version of it if it cannot be enforced.

        A relaxed grammar's field is listed in the header.

        Raises:
            InvalidGrammar: no version can be enforced.
        """
        first, *others = await self.work_queues.submission.run(request, partial(relaxed, content))
        try:
            constraint, is_whole = await constrain(first[0]), first[1]
        except InvalidGrammar:
            if not others:
                raise
            constraint, is_whole = await constrain(others[0][0]), False
        if not is_whole:
            self.leave_out(request, unread=(), others=[field])
        return constraint

    async def truncated(
        self,
        request: Request,
        messages: Sequence[Message],
        options: RequestOptions = NO_OPTIONS,
        *,
        max_tokens: int | None,
    ) -> TruncatedHistory:
        """Return a history without the turns that do not fit into the context; see `drop_middle`.

        Raises:
            ContextLengthExceeded: the turns that cannot be dropped do not fit.
            EngineOverloaded: too many histories wait.
            ClientGone: the client disconnected while its history waited.
        """

        def truncate() -> TruncatedHistory:
            return drop_middle(
                self.engine.as_generated(messages, options),
                options.tools,
                count=lambda messages, tools: len(self.engine.encode_chat(messages, tools, options.template_kwargs)),
                context_length=self.engine.context_length,
                max_tokens=max_tokens,
            )

        return await self.work_queues.truncation.run(request, truncate)

    async def open(self, request: Request, asks: Sequence[StartRequest], params: SamplingParams) -> Choices:
        """Submit one request per reply to the engine: all of them, or none.

        Args:
            params: sampling parameters of each, apart from their seeds.

        Raises:
            InvalidParameter: the prompts together have too many logprobs, or there are more replies than the engine's
                limit, so that retrying cannot help.
            InvalidRequest, EngineError: the engine refuses one; those before it are cancelled.
            ClientGone: the client disconnected while its request waited.
        """
        most = self.engine.queue.max_num_requests
        if most is not None and len(asks) > most:
            message = (
                f"the request asks for {len(asks)} replies, and this server computes {most} at once; ask for fewer"
            )
            raise InvalidParameter(message)  # from n, or from the number of prompts
        choices = Choices(self._waker(), record_of(request))
        may_hold_loop = len(asks) == 1 and not params.needs_token_texts
        try:
            for ask in asks:
                submit = partial(choices.submit, ask)
                await self.work_queues.submission.run(request, submit, may_hold_loop=may_hold_loop)
            if params.prompt_logprobs is not None:
                choices.require_few_logprobs(params.prompt_logprobs)
        except BaseException:  # a thread may have submitted a request whose client has disconnected
            await choices.leave()
            raise
        return choices

    def leave_out(self, request: Request, *, unread: Collection[str], others: Collection[str] = ()) -> None:
        """List ignored parts of a request's conversation in the header.

        Args:
            unread: names of parts that are replaced by a note to the model.

        Raises:
            HTTPError: 400 if there are replaced parts, and the server is strict.
        """
        if self.options.is_strict:
            refuse_unread(unread)
        ignored = record_of(request).ignored
        if ignored is not None:
            ignored.harmless.update(unread, others)

    def _waker(self) -> Waker:
        """Return the waker of the running event loop. A server has one loop, tests have many."""
        loop = asyncio.get_running_loop()
        waker = self._wakers.get(loop)
        if waker is None:
            for closed in [each for each in self._wakers if each.is_closed()]:
                del self._wakers[closed]
            waker = self._wakers[loop] = Waker()
        return waker

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, its leading space included; an incomplete character is U+FFFD."""
        return self.text([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; a character may take several tokens."""
        return self.engine.tokenizer.token_bytes(token_id)

    def begins_character(self, token_id: int) -> bool:
        """Return whether a token begins a character. True for an unknown id, which the engine refuses later."""
        try:
            spelled = self.token_bytes(token_id)
        except TokenizerError:
            return True
        return not spelled or spelled[0] & 0xC0 != 0x80

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids; an incomplete character is U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")


def listed_of(model_ids: Sequence[str]) -> tuple[str, ...]:
    """Return the model names to list: each once, without `*`.

    >>> listed_of(["smollm2", "*", "small", "smollm2"])
    ('smollm2', 'small')
    """
    return tuple(dict.fromkeys(name for name in model_ids if name != ANY))


def fingerprint_of(engine: Engine, truncation: Truncation, lora: str | None = None) -> str:
    """Return the `system_fingerprint` of OpenAI's replies: a digest and the numeric class, `fma` or `no-fma`.

    The digest covers the version, the artifact (weights, module and target) and the options that can change a reply.

    The same fingerprint, seed and request give the same bytes, unless a prefix was matched by text, as a re-rendered
    reply or in part, a tool call was sent back, or the chat template writes the date.
    """
    options = {name: value for name, value in engine.reply_options.items() if value is not None}  # those of an extra
    means: tuple[object, ...] = (VERSION, engine.manifest.digest, truncation, options)
    if lora is not None:
        means = (*means, engine.adapters.named(lora).digest)
    digest = sha256(msgspec.json.encode(means)).hexdigest()[:16]
    return f"fp_{digest}_{engine.manifest.target.numeric_class}"


async def whole_answer(completions: Sequence[Completion], make: Callable[[], msgspec.Struct]) -> Response:
    """Return the result of `make` as a JSON response. Runs it in a thread if the completions are large."""
    num_parts = sum(
        len(reply.token_ids) + (len(reply.logprobs) * (1 + len(reply.logprobs[0].top)) if reply.logprobs else 0)
        for reply in completions
    )
    if num_parts <= MAX_PARTS_AT_ONCE:
        return json_response(make())
    return await asyncio.to_thread(lambda: json_response(make()))


def json_response(value: msgspec.Struct, status: int = 200) -> Response:
    """Return a struct as a JSON response."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
