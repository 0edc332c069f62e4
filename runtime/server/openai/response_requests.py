"""Types of the requests to `/v1/responses`.

Validation is strict, as in `requests.py`. Fields of OpenAI's clients that are not supported are accepted with values
that have no effect: `"prompt": null`.
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
    """JSON that matches a schema. `strict` refuses a schema that cannot be enforced completely."""

    name: SchemaName
    schema: Schema
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    format: AnyText | AnyJson | JsonBySchema | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    effort: ReasoningEffort | None = None  # for the chat template
    summary: str | None = None  # ignored: reasoning is returned in full
    generate_summary: str | None = None  # ignored


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None  # as in `StreamOptions`


class ConversationID(msgspec.Struct, forbid_unknown_fields=True):
    id: str


@with_sampling_of("responses")
class ResponseRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/responses`. None or a missing field means the model's default."""

    ACTS_ON: ClassVar = frozenset({"store"})

    input: str | Annotated[list[InputItem], msgspec.Meta(max_length=MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None  # the system message before the input
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: MaxTokens | None = None
    top_logprobs: NumLogprobs | None = None
    include: Annotated[list[str], msgspec.Meta(max_length=MAX_INCLUDE)] | None = (
        None  # additional fields of the response
    )
    text: TextOptions | None = None
    cache_match: MatchPolicy | None = None  # radixlm's: match policy of the prefix cache; None: the server's default
    kv_budget: KVShare | None = None  # radixlm's: share of a stored prefix's KV rows to load
    cache_salt: CacheText | None = None  # isolates the cache: only requests with the same salt share prefixes
    prompt_cache_key: CacheText | None = None  # likewise
    speculate: bool | None = None  # radixlm's: false: no speculative decoding; the reply is the same bytes
    return_progress: ReturnProgress | None = None
    prompt_cache_retention: str | None = None  # ignored: prefixes stay cached as long as there is room
    metadata: dict[str, str] | None = None  # for the client's own records: returned in the response
    user: str | None = None  # likewise
    safety_identifier: str | None = None  # likewise
    client_metadata: dict[str, Any] | None = None  # ignored
    service_tier: str | None = None  # all requests are served alike
    store: bool | None = None  # None: true, unless cache_match is off
    previous_response_id: str | None = None  # the response that this one continues
    conversation: str | ConversationID | None = None  # the conversation to continue, and to add to
    prompt: None = None
    background: bool | None = None  # true: return at once; the response is made without a connection
    truncation: Literal["auto", "disabled"] | None = None  # auto: drop old turns that do not fit into the context
    reasoning: ReasoningOptions | None = None
    enable_thinking: bool | None = None  # as in chats
    chat_template_kwargs: dict[str, Any] | None = None  # radixlm's, as in chats
    tools: list[RawTool] | None = None  # tools of OpenAI's servers are ignored and listed
    tool_choice: RawChoice | None = None  # None: auto
    parallel_tool_calls: bool | None = None  # None: true
    max_tool_calls: Annotated[int, msgspec.Meta(ge=0)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Return whether the reply's text has logprobs."""
        return LOGPROBS in (self.include or ())

    @property
    def seals_reasoning(self) -> bool:
        """Return whether reasoning comes as `encrypted_content`, too, which clients send back unread."""
        return SEALED in (self.include or ())

    @property
    def left_out(self) -> set[str]:
        """Names in `include` that are not supported, for the header of ignored fields.

        Raises:
            InvalidParameter: a name looks like a mistyped supported one.
        """
        asked = set(self.include or ()) - {LOGPROBS, SEALED}
        for name in asked:
            near = next((known for known in (LOGPROBS, SEALED) if is_near(name, known)), None)
            if near is not None:
                raise InvalidParameter(f"include has {name!r:.80}; did you mean {near!r}?", param="include")
        return {f"include.{name}" for name in asked}

    @property
    def template_kwargs(self) -> Mapping[str, object] | None:
        """Additional variables for the chat template."""
        effort = None if self.reasoning is None else self.reasoning.effort
        return thinking_kwargs(self.enable_thinking, effort_kwargs(effort, self.chat_template_kwargs))

    def grammar(self) -> Grammar | None:
        """Return the grammar of the reply; None for any text.

        Raises:
            InvalidGrammar: the schema is too long.
        """
        match self.text and self.text.format:
            case AnyJson():
                return Grammar.json_object()
            case JsonBySchema(schema=schema, strict=strict):
                return Grammar.json_schema(schema, is_strict=bool(strict))
        return None

    @property
    def items(self) -> list[InputItem]:
        """The input as items; a plain text is a user message."""
        if isinstance(self.input, str):
            return [InputItem(role="user", content=self.input)] if self.input else []
        return self.input

    @property
    def conversation_id(self) -> str | None:
        """Id of the conversation that the input continues, or None."""
        return self.conversation.id if isinstance(self.conversation, ConversationID) else self.conversation or None

    @property
    def is_kept(self) -> bool:
        """Return whether the response is stored, if the server stores responses."""
        return self.cache_match != "off" if self.store is None else self.store

    def history(self, earlier: Sequence[InputItem] = ()) -> History:
        """Return the conversation as messages for chat templates. The instructions before it have no index.

        Args:
            earlier: stored items that the input continues. Their indices are negative.

        Raises:
            InvalidParameter: there is no input, or a message has an image or a file.
        """
        history = History.of([*earlier, *self.items], first=-len(earlier))
        if not self.items or not history.messages:
            raise InvalidParameter("input is empty; send a text, or at least one message", param="input")
        if self.instructions is None:
            return history
        system: dict[str, object] = {"role": "system", "content": self.instructions}
        return History([system, *history.messages], [[], *history.places], history.unread)

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """Return `defaults` with the parameters that the request sets.

        Raises:
            InvalidParameter: a value is outside its range.
        """
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidParameter(f'top_logprobs is set; set include to ["{LOGPROBS}"] as well', param="top_logprobs")
        require_stream(self.stream, "return_progress", self.return_progress)
        own = {"logprobs": (self.top_logprobs or 0) if self.wants_logprobs else None}
        return sampling_params("responses", self, defaults, own, {"logprobs": "top_logprobs"})
