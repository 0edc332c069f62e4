"""A model that a server answers with, and all that belongs to it alone: names, lanes, namespaces, texts of tokens.

Knows no API's shapes and no other model; `models.py` has the table of them.
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
from ..engine.generation_stream import Ask
from ..engine.request_options import NO_OPTIONS, RequestOptions
from ..engine.sampling_params import SamplingParams
from ..errors import InvalidGrammar, InvalidParameter
from ..version import VERSION
from .choices import Choices, Waker
from .http.connection import while_connected
from .http.door import api_key_of, client_of
from .lanes import Lanes
from .request_log import record_of
from .server_options import ServerOptions
from .stored.stored import Stored
from .truncation import Message, Truncated, Truncation, drop_middle
from .unknown_fields import SURROGATES
from .unread_parts import require_none

if TYPE_CHECKING:
    from ..engine.engine import Engine

T = TypeVar("T")

MAX_PARTS_AT_ONCE = 1024  # tokens and logprobs of an answer that is made on the event loop: some milliseconds
ANY = "*"


class OptionFields(Protocol):
    """The fields of a request's body that are options of the engine."""

    cache_salt: str | None
    prompt_cache_key: str | None
    cache_match: MatchPolicy | None
    kv_budget: float | None
    speculate: bool | None
    return_progress: bool | None


@dataclass(frozen=True)
class Served:
    """One row of the table of models.

    Attributes:
        names: those that are listed, at least one; the first is the server's own word for the model.
        takes_any: whether it is called by any name that no other model has.
        options: those of the server, as they are for this model.
        stored: what clients leave on the server; None: nothing is kept.
        fingerprint: with it, equal requests with equal seeds have equal replies: `fingerprint_of`.
        created: Unix time at which serving began.
        lora: the name of the LoRA adapter that all requests have; None: the model as it was compiled.
    """

    engine: Engine
    names: tuple[str, ...]
    takes_any: bool
    options: ServerOptions
    lanes: Lanes
    fingerprint: str
    created: int
    stored: Stored | None = None
    lora: str | None = None
    _wakers: dict[asyncio.AbstractEventLoop, Waker] = field(default_factory=dict)

    @classmethod
    def of(cls, engine: Engine, options: ServerOptions, stored: Stored | None = None) -> Self:
        """An engine by the names of `options.model_ids`, each once, or by its artifact's own; `*` among them is any
        name, and is not listed."""
        listed = listed_of(options.model_ids) or (engine.manifest.name,)
        fingerprint = fingerprint_of(engine, options.truncation)
        if stored is not None:
            engine.remember(stored)
        lanes, now = Lanes.of(engine), int(time.time())
        return cls(engine, listed, ANY in options.model_ids, options, lanes, fingerprint, created=now, stored=stored)

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
        """The first of its names."""
        return self.names[0]

    def called(self, asked: str | None) -> str:
        """The name that a reply to a request has: the one that was asked for."""
        return asked or self.name

    def truncates(self, asked: Truncation | None) -> bool:
        """Whether a request that asks for this, or for nothing, loses what does not fit."""
        return (asked or self.options.truncation) == "middle"

    def namespace(self, request: Request, cache_salt: str | None, prompt_cache_key: str | None) -> bytes:
        """The part of the cache that a request may use, by its API key, its salt and its cache key; if that is ignored,
        it is listed.

        Raises:
            InvalidParameter: the salt or the cache key is too long, or has half of a character.
        """
        ignored = record_of(request).ignored
        if ignored is not None and SURROGATES in ignored.harmless:
            for name, value in {"cache_salt": cache_salt, "prompt_cache_key": prompt_cache_key}.items():
                if value is not None and "\ufffd" in value:  # what others that are unlike would become, too
                    raise InvalidParameter(f"{name} has half of a character; send whole ones")
        if self.options.ignores_prompt_cache_key and prompt_cache_key is not None:
            prompt_cache_key = None
            if ignored is not None:
                ignored.harmless.add("prompt_cache_key")
        namespace = self.engine.namespaces.of(CacheScope(api_key_of(request), cache_salt, prompt_cache_key))
        record_of(request).namespace = namespace
        return namespace

    def request_options(self, request: Request, body: OptionFields) -> RequestOptions:
        """What a request asks of the engine beside its prompt, its parameters and its grammar.

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
        """What replies can follow; None for any text.

        Raises:
            InvalidGrammar: the grammar is wrong, or too much work.
            GrammarsOverloaded: too many are being tried.
            ClientGone: the client left before it was known.
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
        """What `constrain` makes of a grammar, or of what of it can be followed; then its field is listed.

        Raises:
            InvalidGrammar: nothing of it can be.
        """
        first, *others = await self.lanes.submission.run(request, partial(relaxed, content))
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
    ) -> Truncated:
        """A history without the turns that have no room; see `drop_middle`.

        Raises:
            ContextLengthExceeded: what cannot be dropped has no room, either.
            EngineOverloaded: too many histories wait.
            ClientGone: the client left while its history waited.
        """

        def truncate() -> Truncated:
            return drop_middle(
                self.engine.as_generated(messages, options),
                options.tools,
                count=lambda messages, tools: len(self.engine.encode_chat(messages, tools, options.template_kwargs)),
                context_length=self.engine.context_length,
                max_tokens=max_tokens,
            )

        return await self.lanes.truncation.run(request, truncate)

    async def open(self, request: Request, asks: Sequence[Ask], params: SamplingParams) -> Choices:
        """Hand the engine one request for each reply: all of them, or none.

        Args:
            params: of each, but for their seeds.

        Raises:
            InvalidParameter: the prompts together have too many logprobs, or there are more replies than the engine
                takes at once, so that sending the request again cannot help.
            InvalidRequest, EngineError: the engine refuses one; those before it are cancelled.
            ClientGone: the client left while its request waited.
        """
        most = self.engine.queue.max_num_requests
        if most is not None and len(asks) > most:
            message = f"{len(asks)} replies are asked for, and this server takes {most} at once; ask for fewer"
            raise InvalidParameter(message)  # of n, or of the prompts
        choices = Choices(self._waker(), record_of(request))
        may_hold_loop = len(asks) == 1 and not params.needs_token_texts
        try:
            for ask in asks:
                submit = partial(choices.submit, ask)
                await self.lanes.submission.run(request, submit, may_hold_loop=may_hold_loop)
            if params.prompt_logprobs is not None:
                choices.require_few_logprobs(params.prompt_logprobs)
        except BaseException:  # a thread may have handed over a request whose client left meanwhile
            await choices.leave()
            raise
        return choices

    def leave_out(self, request: Request, *, unread: Collection[str], others: Collection[str] = ()) -> None:
        """List what is left out of a request's conversation.

        Args:
            unread: names of parts in whose place a note stands.

        Raises:
            HTTPError: 400, there are such parts, and the server is strict.
        """
        if self.options.is_strict:
            require_none(unread)
        ignored = record_of(request).ignored
        if ignored is not None:
            ignored.harmless.update(unread, others)

    def _waker(self) -> Waker:
        """The running loop's, of which a server has one, and tests have many."""
        loop = asyncio.get_running_loop()
        waker = self._wakers.get(loop)
        if waker is None:
            for closed in [each for each in self._wakers if each.is_closed()]:
                del self._wakers[closed]
            waker = self._wakers[loop] = Waker()
        return waker

    def token_text(self, token_id: int) -> str:
        """The text of one token, its leading space included; half a character is U+FFFD."""
        return self.text([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; a character may need several tokens."""
        return self.engine.tokenizer.token_bytes(token_id)

    def begins_character(self, token_id: int) -> bool:
        """Whether a prompt may be cut before a token. It may before an unknown one, which the engine refuses later."""
        try:
            spelled = self.token_bytes(token_id)
        except TokenizerError:
            return True
        return not spelled or spelled[0] & 0xC0 != 0x80

    def text(self, token_ids: Sequence[int]) -> str:
        """The text that ids spell; a character that is cut is U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")


def listed_of(model_ids: Sequence[str]) -> tuple[str, ...]:
    """The names that are listed, each once.

    >>> listed_of(["smollm2", "*", "small", "smollm2"])
    ('smollm2', 'small')
    """
    return tuple(dict.fromkeys(name for name in model_ids if name != ANY))


def fingerprint_of(engine: Engine, truncation: Truncation, lora: str | None = None) -> str:
    """What OpenAI's replies say of the server: a digest of the version, of the artifact, with weights, module and
    target, of a LoRA adapter, and of the options with which the same request may have another reply; then the numeric
    class that computes, `fma` or `no-fma`.

    One fingerprint, seed and request are the same bytes, where no prefix was found by text or as an alias, nor in part,
    no call of a tool came back, and the chat template does not write the day.
    """
    options = {name: value for name, value in engine.reply_options.items() if value is not None}  # those of an extra
    means: tuple[object, ...] = (VERSION, engine.manifest.digest, truncation, options)
    if lora is not None:
        means = (*means, engine.adapters.named(lora).digest)
    digest = sha256(msgspec.json.encode(means)).hexdigest()[:16]
    return f"fp_{digest}_{engine.manifest.target.numeric_class}"


async def whole_answer(completions: Sequence[Completion], make: Callable[[], msgspec.Struct]) -> Response:
    """What `make` makes of whole replies, as JSON; in a thread where there is much of it."""
    num_parts = sum(
        len(reply.token_ids) + (len(reply.logprobs) * (1 + len(reply.logprobs[0].top)) if reply.logprobs else 0)
        for reply in completions
    )
    if num_parts <= MAX_PARTS_AT_ONCE:
        return json_response(make())
    return await asyncio.to_thread(lambda: json_response(make()))


def json_response(value: msgspec.Struct, status: int = 200) -> Response:
    """`value` as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
