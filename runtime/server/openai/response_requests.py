"""What clients send to `/v1/responses`, as types: OpenAI's newer way to ask for a reply.

Validation is strict, as in `requests.py`. What OpenAI's clients send along and what has no meaning here may be there
as long as it asks for nothing: `"tools": []`, `"reasoning": {"effort": null}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from ...cache.why_not_more import MatchPolicy
from ...chat.grammar import Grammar
from ...engine.sampling_params import SamplingParams
from ...errors import InvalidParameter
from ..field_policy import is_near
from ..request_fields import MAX_MESSAGES, KVShare, MaxTokens, NumLogprobs, sampling_params, with_sampling_of
from .requests import CacheText, ReasoningEffort, ReturnProgress, effort_kwargs, require_stream, thinking_kwargs
from .response_format import Schema, SchemaName
from .response_items import History, InputItem
from .response_tools import RawChoice, RawTool

LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
MAX_INCLUDE = 64


class AnyText(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True, frozen=True):
    """Any text: the default."""


class AnyJson(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True, frozen=True):
    """Any JSON object."""


class JsonBySchema(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True, frozen=True):
    """JSON that a schema describes; `strict` refuses one that cannot be enforced whole."""

    name: SchemaName
    schema: Schema
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    format: AnyText | AnyJson | JsonBySchema | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    effort: ReasoningEffort | None = None  # for the chat template
    summary: str | None = None  # thoughts come as they are, whatever is asked
    generate_summary: str | None = None  # likewise


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None  # as in `StreamOptions`


class ConversationID(msgspec.Struct, forbid_unknown_fields=True):
    id: str


@with_sampling_of("responses")
class ResponseRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/responses`. None, or a missing field, is the model's default."""

    ACTS_ON: ClassVar = frozenset({"store"})

    input: str | Annotated[list[InputItem], msgspec.Meta(max_length=MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None  # the system message before the input
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: MaxTokens | None = None
    top_logprobs: NumLogprobs | None = None
    include: Annotated[list[str], msgspec.Meta(max_length=MAX_INCLUDE)] | None = None  # what else is to be told
    text: TextOptions | None = None
    cache_match: MatchPolicy | None = None  # ours: how cached prefixes may be found, instead of the server's way
    kv_budget: KVShare | None = None  # ours: of a prefix on disk, the share of keys and values that is enough
    cache_salt: CacheText | None = None  # what only requests with the same salt may reuse
    prompt_cache_key: CacheText | None = None  # likewise
    speculate: bool | None = None  # ours: false: nothing is guessed; the reply is the same bytes
    return_progress: ReturnProgress | None = None
    prompt_cache_retention: str | None = None  # prefixes stay as long as there is room, whatever is asked
    metadata: dict[str, str] | None = None  # for the client's own books: sent back, nothing is done with it
    user: str | None = None  # likewise
    safety_identifier: str | None = None  # likewise
    client_metadata: dict[str, Any] | None = None  # likewise
    service_tier: str | None = None  # all requests are served alike
    store: bool | None = None  # None: true, unless nothing may be reused
    previous_response_id: str | None = None  # the response that the input goes on from
    conversation: str | ConversationID | None = None  # likewise, a conversation that both are added to
    prompt: None = None
    background: Literal[False] | None = None  # a reply is waited for, or streamed
    truncation: Literal["auto", "disabled"] | None = None  # auto: turns of the middle go where there is no room
    reasoning: ReasoningOptions | None = None
    enable_thinking: bool | None = None  # as in chats
    chat_template_kwargs: dict[str, Any] | None = None  # ours, as in chats
    tools: list[RawTool] | None = None  # of OpenAI's own, those that cannot be run here are left out, and named
    tool_choice: RawChoice | None = None  # None: auto
    parallel_tool_calls: bool | None = None  # None: true
    max_tool_calls: Annotated[int, msgspec.Meta(ge=0)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the reply's text comes with logprobs."""
        return LOGPROBS in (self.include or ())

    @property
    def seals_thoughts(self) -> bool:
        """Whether thoughts come in a form that clients send back unread."""
        return SEALED in (self.include or ())

    @property
    def left_out(self) -> set[str]:
        """Names of what is asked to be told and is not there.

        Raises:
            InvalidParameter: one is nearly the name of what is.
        """
        asked = set(self.include or ()) - {LOGPROBS, SEALED}
        for name in asked:
            near = next((known for known in (LOGPROBS, SEALED) if is_near(name, known)), None)
            if near is not None:
                raise InvalidParameter(f"include has {name!r:.80}; did you mean {near!r}?", param="include")
        return {f"include.{name}" for name in asked}

    @property
    def template_kwargs(self) -> Mapping[str, object] | None:
        """More variables of the chat template."""
        effort = None if self.reasoning is None else self.reasoning.effort
        return thinking_kwargs(self.enable_thinking, effort_kwargs(effort, self.chat_template_kwargs))

    def grammar(self) -> Grammar | None:
        """What the reply must keep to; None for any text.

        Raises:
            InvalidGrammar: it is too long.
        """
        match self.text and self.text.format:
            case AnyJson():
                return Grammar.json_object()
            case JsonBySchema(schema=schema, strict=strict):
                return Grammar.json_schema(schema, is_strict=bool(strict))
        return None

    @property
    def items(self) -> list[InputItem]:
        """The input; a text is the user's."""
        if isinstance(self.input, str):
            return [InputItem(role="user", content=self.input)] if self.input else []
        return self.input

    @property
    def conversation_id(self) -> str | None:
        """The conversation that the input goes on from; None: there is none."""
        return self.conversation.id if isinstance(self.conversation, ConversationID) else self.conversation or None

    @property
    def is_kept(self) -> bool:
        """Whether a server that keeps responses keeps this one."""
        return self.cache_match != "off" if self.store is None else self.store

    def history(self, earlier: Sequence[InputItem] = ()) -> History:
        """The conversation as chat templates know it; the instructions before it have no place.

        Args:
            earlier: the items that the input goes on from. Their places are below 0.

        Raises:
            InvalidParameter: there is no input, or a message has an image or a file.
        """
        said = History.of([*earlier, *self.items], first=-len(earlier))
        if not self.items or not said.messages:
            raise InvalidParameter("input is empty; send a text, or at least one message", param="input")
        if self.instructions is None:
            return said
        system: dict[str, object] = {"role": "system", "content": self.instructions}
        return History([system, *said.messages], [[], *said.places], said.unread)

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """`defaults` with what the request says instead.

        Raises:
            InvalidParameter: a value is outside its range.
        """
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidParameter(f'top_logprobs is set; set include to ["{LOGPROBS}"] as well', param="top_logprobs")
        require_stream(self.stream, "return_progress", self.return_progress)
        own = {"logprobs": (self.top_logprobs or 0) if self.wants_logprobs else None}
        return sampling_params("responses", self, defaults, own, {"logprobs": "top_logprobs"})
