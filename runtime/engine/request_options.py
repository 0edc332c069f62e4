"""The options of one request, its full specification, and the limits that it must satisfy.

Knows ranges, not engines: the engine fills in unset options. Knows no sequence, pages or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, get_args

from ..cache.cache_namespace import is_adapted
from ..cache.reply_alias import ReplyAlias
from ..cache.why_not_more import MatchPolicy, WhyNotMore
from ..chat.chat_template import checked_kwargs
from ..chat.grammar import Grammar
from ..chat.token_constraint import ConstraintSource
from ..chat.tools.tool_format import AnyTool, Tool, tools_of
from ..errors import ContextLengthExceeded, EmptyPrompt, InvalidArgument, InvalidParameter
from ..fields import brief, documented, option
from ..lora.adapters import Adapter
from ..model.batch import NO_ADAPTER
from ..optional import extra_of
from ..prefix.expected_prompts import ExpectedPrompt
from ..store.page_key import MAX_NAMESPACE_BYTES
from .generated_turns import GeneratedTurns
from .reply import Reply
from .sampling_params import MAX_PROMPT_LOGPROBS, MAX_REPLY_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from radixlm.tokenizer_fix import PreparedPrompt, SpelledPrompt

    from .step.readers import Reader

Client = str | bytes
"""A participant in fair scheduling: a client's name, or a namespace."""
Prompt = str | Sequence[int]
Message = Mapping[str, object]  # {"role": ..., "content": ...}

MAX_ID_LENGTH = 256  # characters of a caller's own id of a request


class OptionKeywords(TypedDict, total=False):
    """The fields of `RequestOptions`, for callers that write them as keywords."""

    namespace: bytes
    client: str | None
    cache_match: MatchPolicy | None
    kv_budget: float | None
    lora: str | Adapter | None
    constraint: Grammar | ConstraintSource | None
    request_id: str | None
    strip_suffix: bool | None
    token_healing: bool
    tools: Sequence[AnyTool]
    template_kwargs: Mapping[str, object] | None
    earlier: GeneratedTurns | None
    speculate: bool
    with_progress: bool
    idle: bool


@documented
@dataclass(frozen=True)
class RequestOptions:
    """Options of one request; None leaves the choice to the engine.

    >>> options = RequestOptions(namespace=b"of a client").changed(cache_match="off")
    >>> options.namespace, options.cache_match
    (b'of a client', 'off')

    Raises:
        InvalidParameter: a value is outside its range.
        InvalidArgument: a value is of the wrong kind.
    """

    namespace: bytes = option(
        b"", f"Separates clients, which never share cached prefixes. At most {MAX_NAMESPACE_BYTES} bytes."
    )
    client: str | None = option(
        None,
        "Who takes turns with others when requests wait.",
        unset="the namespace does",
        secret=True,  # may be an API key
    )
    cache_match: MatchPolicy | None = option(
        None, "How cached prefixes may be found.", unset="as the engine's `match` says"
    )
    kv_budget: float | None = option(
        None,
        "The share of a stored prefix's KV that is enough.",
        unset="as the engine's `kv_budget` says",
        above=0,
        high=1,
    )
    lora: str | Adapter | None = option(
        None, "The name of a LoRA adapter, one of the engine's `loras`.", unset="the model as it was compiled"
    )
    constraint: Grammar | ConstraintSource | None = option(
        None,
        "What the reply keeps to: a `Grammar`, which is compiled for this request, or what `Engine.grammars.compile` "
        "made of one, for several requests. Calls take `response_format`, too.",
        unset="any text",
    )
    request_id: str | None = option(
        None,
        f"The caller's own name of the request, of 1 to {MAX_ID_LENGTH} characters. The stream, the completion and the "
        "log repeat it. Several requests may have the same name.",
        unset="the engine's",
    )
    strip_suffix: bool | None = option(
        None,
        "Of a prompt that is no conversation: whether it is fed without the token of a lone space at its end. One with "
        "a constraint is fed as it is.",
        unset="as the engine's `strip_suffix` says",
    )
    token_healing: bool = option(
        False,
        "Of a prompt that is no conversation: whether its last token is chosen anew, with the bytes that it has, so "
        "that the reply may go on within a word. It has no constraint and no logprobs of its own then.",
    )
    tools: Sequence[Tool] = option(
        (),
        'Of a conversation: what the chat template is told of. `Engine.tool_format.grammar(tools, "auto")` is a '
        "constraint by which the model calls them.",
    )
    template_kwargs: Mapping[str, object] | None = option(
        None,
        "Of a conversation: more variables of the chat template, such as `enable_thinking`.",
        unset="the engine's `template_kwargs`",
    )
    earlier: GeneratedTurns | None = option(
        None,
        "Of a conversation: the ids that its first messages were fed and generated as. They are used where the chat "
        "template would write these messages so.",
        unset="all of it is rendered and encoded",
    )
    speculate: bool = option(True, "Whether what the reply goes on with may be drafted; the reply is the same bytes.")
    with_progress: bool = option(
        False, "The stream has deltas without text that say when the request starts, and how far its prompt is."
    )
    idle: bool = option(
        False,
        "Whether the request is computed only while there is no other: it gives its place and its pages to any request "
        "that comes, and goes on afterwards.",
    )

    def __post_init__(self) -> None:
        if not isinstance(self.namespace, bytes) or len(self.namespace) > MAX_NAMESPACE_BYTES:
            raise InvalidParameter(
                f"namespace is {self.namespace!r:.60}; it must be at most {MAX_NAMESPACE_BYTES} bytes",
                param="namespace",
            )
        if is_adapted(self.namespace) != isinstance(self.lora, Adapter):  # only the engine sets them, both at once
            if isinstance(self.lora, Adapter):
                raise InvalidArgument(f"lora is {self.lora!r:.60}; it must be the name of an adapter", param="lora")
            raise InvalidParameter(
                f"namespace is {self.namespace!r:.60}, which begins like one of a LoRA adapter; choose another, and "
                "name the adapter in lora",
                param="namespace",
            )
        if self.cache_match is not None:
            checked_match(self.cache_match)
        if (extra := extra_of(self)) is not None:
            extra.check_request(self)
        if self.template_kwargs is not None:
            checked_kwargs(self.template_kwargs)
        if not isinstance(self.lora, str | Adapter | None):
            raise InvalidArgument(f"lora is {self.lora!r:.60}; it must be the name of an adapter", param="lora")
        if not (self.constraint is None or hasattr(self.constraint, "start") or isinstance(self.constraint, Grammar)):
            raise InvalidArgument(
                f"constraint is {self.constraint!r:.60}; it must be a Grammar; a JSON schema goes to response_format",
                param="constraint",
            )
        object.__setattr__(self, "tools", tools_of(self.tools))
        if self.request_id is None:
            return
        if not isinstance(self.request_id, str) or not 0 < len(self.request_id) <= MAX_ID_LENGTH:
            raise InvalidParameter(
                f"request_id is {self.request_id!r:.60}; it must be a string of 1 to {MAX_ID_LENGTH} characters",
                param="request_id",
            )

    __repr__ = brief

    @property
    def turn_of(self) -> Client:
        """The client that the request is scheduled for."""
        return self.namespace if self.client is None else self.client

    @property
    def adapter_index(self) -> int:
        """The place of its LoRA adapter, once the engine has decided; `NO_ADAPTER` if it has none."""
        return self.lora.index if isinstance(self.lora, Adapter) else NO_ADAPTER

    @property
    def seam_of(self) -> bytes | None:
        """The namespace whose earlier encodings a prompt can continue; None: it is encoded whole."""
        return self.namespace if self.cache_match in ("seam", "text") else None

    @property
    def calls_of(self) -> bytes | None:
        """The namespace whose tool calls are recognized when they come back; None: they are treated as text."""
        return self.namespace if self.cache_match == "text" else None

    def changed(self, **keywords: Unpack[OptionKeywords]) -> RequestOptions:
        """Return a copy with these options replaced."""
        changes: dict[str, Any] = {name: value for name, value in keywords.items() if getattr(self, name) is not value}
        return replace(self, **changes) if changes else self  # a replacement checks all values again


NO_OPTIONS = RequestOptions()


def checked_match(match: MatchPolicy) -> MatchPolicy:
    """Return `match` if it is a known policy.

    Raises:
        InvalidParameter: it is unknown.
    """
    if match not in get_args(MatchPolicy):
        raise InvalidParameter(f"match is {match!r}; use one of {', '.join(get_args(MatchPolicy))}")
    return match


@dataclass(frozen=True)
class RequestSpec:
    """A request in the engine's terms; it does not change while the request is served."""

    request_id: str  # the engine's own
    prompt: PreparedPrompt
    params: SamplingParams
    options: RequestOptions = NO_OPTIONS
    arrived_at: float = 0.0  # seconds on the engine's clock
    spelled: Callable[[], SpelledPrompt] | None = None  # the text of the prompt's ids, if it may be matched by text
    renderings: Callable[[str, str], Sequence[str]] | None = None  # of a reply and its reasoning, later
    expects: Callable[[str, str], ExpectedPrompt] | None = None  # the prompt after a reply and its reasoning
    explain: Callable[[WhyNotMore], WhyNotMore] = lambda why: why  # adds the texts of its ids
    reads: Callable[[], Reader] | None = None  # makes a reader of its rows besides the sampler

    @property
    def name(self) -> str:
        """The caller's own id of the request, or the engine's."""
        return self.options.request_id or self.request_id

    @property
    def namespace(self) -> bytes | None:
        """The namespace whose cache the request uses; None: nothing is reused, and nothing is cached."""
        return None if self.options.cache_match == "off" else self.options.namespace

    def aliases(self, reply: Reply) -> list[ReplyAlias]:
        """Return the ways in which later prompts may render a finished reply, if they are different texts."""
        renderings = self.renderings
        if renderings is None or reply.is_cut or not reply.token_ids:
            return []
        ids = tuple(reply.ids_without_end)
        text = self._spelled(ids) if reply.num_thought_tokens else reply.text
        if text is None or not self._spells(ids, text):
            return []
        found = (ReplyAlias.of(ids, text, each) for each in renderings(reply.text, reply.thought))
        return [alias for alias in found if alias is not None]

    def _spells(self, ids: Iterable[int], text: str) -> bool:
        """Return whether the ids spell `text`, apart from white space around it, special tokens and half characters."""
        spelled = self._spelled(ids)
        return spelled is not None and spelled.strip() == text.strip()

    def _spelled(self, ids: Iterable[int]) -> str | None:
        """Return the text of ids; None if it has special tokens or half characters, or if text is not matched."""
        if self.spelled is None:
            return None
        try:
            return b"".join(map(self.spelled().spell, ids)).decode()
        except UnicodeDecodeError:
            return None


@dataclass(frozen=True)
class RequestLimits:
    """The limits of every request, whatever the engine is doing: checked in the caller's thread, too."""

    vocab_size: int  # tokens that both the tokenizer and the model know
    context_length: int  # tokens of prompt and reply together
    vector_size: int | None = None  # of a model that writes no text: numbers per token

    @property
    def num_outputs(self) -> int:
        """Numbers that the model returns per token: logits, or a hidden state."""
        return self.vocab_size if self.vector_size is None else self.vector_size

    def validate(self, prompt: PreparedPrompt, params: SamplingParams) -> None:
        """Raise if the model can never serve this request.

        Raises:
            EmptyPrompt: no tokens.
            ContextLengthExceeded: the prompt leaves no room for one token of a reply, if it wants one.
            InvalidParameter: a token id is not in the vocabulary, or too many logprobs are requested.
        """
        if not prompt.ids:
            raise EmptyPrompt("the prompt has no tokens; it needs at least one")
        has_reply = params.max_tokens != 0
        if len(prompt.ids) + has_reply > self.context_length:
            raise ContextLengthExceeded.of_prompt(len(prompt.ids), self.context_length, has_reply=has_reply)
        self.require_known("the prompt", prompt.ids)
        if params.prompt_logprobs is not None:
            require_few_logprobs(len(prompt.ids), params.prompt_logprobs)
        self.require_known("stop_token_ids", params.stop_token_ids)
        self.require_known("logit_bias", params.logit_bias)

    def require_known(self, where: str, token_ids: Iterable[int]) -> None:
        """Raise InvalidParameter if a token id is not in the vocabulary; `where` names their source."""
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidParameter(f"{where} has token id {token_id}; the vocabulary is 0 to {self.vocab_size - 1}")


def require_few_reply_logprobs(num_replies: int, params: SamplingParams, context_length: int) -> None:
    """Raise InvalidParameter if several replies of the requested length have too many logprobs together."""
    if params.logprobs is None or num_replies == 1:
        return
    num_tokens = context_length if params.max_tokens is None else min(params.max_tokens, context_length)
    if (num := num_replies * num_tokens * (params.logprobs + 1)) > MAX_REPLY_LOGPROBS:
        raise InvalidParameter(
            f"{num_replies} replies of up to {num_tokens} tokens with {params.logprobs} logprobs beside each are {num} "
            f"logprobs; one request may ask for {MAX_REPLY_LOGPROBS}: lower max_tokens, or send several requests",
            param="logprobs",
        )


def require_few_logprobs(num_prompt_tokens: int, num_top: int) -> None:
    """Raise InvalidParameter if the prompts, with `num_top` most likely tokens per token, have too many logprobs."""
    if num_prompt_tokens * (num_top + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidParameter(
            f"{num_prompt_tokens} tokens of prompts with prompt_logprobs={num_top} are "
            f"{num_prompt_tokens * (num_top + 1)} logprobs; one request may ask for {MAX_PROMPT_LOGPROBS}: lower "
            f"prompt_logprobs, or send several requests",
            param="prompt_logprobs",
        )
