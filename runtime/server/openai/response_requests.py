"""What clients send to `/v1/responses`, as types: OpenAI's newer way to ask for a reply.

Validation is strict, as in `requests.py`. What OpenAI's clients send along and what has no meaning here may be there
as long as it asks for nothing: `"tools": []`, `"reasoning": {"effort": null}`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ...cache.prefix_match import MatchPolicy
from ...chat.grammar import Grammar
from ...engine.sampling_params import SamplingParams
from ...errors import InvalidParameter
from ..limits import MAX_MESSAGES, KVShare, MaxTokens, MinP, MinTokens, NumLogprobs, Seed, Temperature, TopK, TopP
from .requests import CacheText, ReturnProgress, require_stream_for_progress, wished
from .response_format import Schema, SchemaName

Nothing = Annotated[list[None], msgspec.Meta(max_length=0)]
LOGPROBS = "message.output_text.logprobs"
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class InputPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message; that of a reply comes back with all that the reply had."""

    text: str
    type: Literal["input_text", "output_text"]
    annotations: list[None] | None = None
    logprobs: list[msgspec.Raw] | None = None
    parsed: Any = None  # OpenAI's client adds it to what it streamed


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message of the conversation; a reply may be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]
    type: Literal["message"] = "message"
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: str | None = None

    def to_template(self) -> dict[str, object]:
        """The message as chat templates know it; they know `developer` as `system`."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


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


class NoReasoning(msgspec.Struct, forbid_unknown_fields=True):
    effort: Literal["none"] | None = None
    summary: None = None
    generate_summary: None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None  # as in `StreamOptions`


class ResponseRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/responses`. None, or a missing field, is the model's default."""

    input: str | Annotated[list[InputMessage], msgspec.Meta(max_length=MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None  # the system message before the input
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None  # ours, as the next three
    min_tokens: MinTokens | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    top_logprobs: NumLogprobs | None = None
    include: list[Include] | None = None
    text: TextOptions | None = None
    cache_match: MatchPolicy | None = None  # ours: how cached prefixes may be found, instead of the server's way
    kv_budget: KVShare | None = None  # ours: of a prefix on disk, the share of keys and values that is enough
    cache_salt: CacheText | None = None  # what only requests with the same salt may reuse
    prompt_cache_key: CacheText | None = None  # likewise
    return_progress: ReturnProgress | None = None
    prompt_cache_retention: str | None = None  # prefixes stay as long as there is room, whatever is asked
    metadata: dict[str, str] | None = None  # for the client's own books: sent back, nothing is done with it
    user: str | None = None  # likewise
    safety_identifier: str | None = None  # likewise
    service_tier: Literal["auto", "default"] | None = None
    store: bool | None = None  # nothing is stored, and the reply says so
    previous_response_id: str | None = None
    conversation: None = None
    prompt: None = None
    background: Literal[False] | None = None
    truncation: Literal["auto", "disabled"] | None = None  # auto: turns of the middle go where there is no room
    reasoning: NoReasoning | None = None
    tools: Nothing | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, msgspec.Meta(ge=0)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the reply's text comes with logprobs."""
        return LOGPROBS in (self.include or ())

    @property
    def num_messages(self) -> int:
        """Messages of the input."""
        return 1 if isinstance(self.input, str) else len(self.input)

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

    def messages(self) -> list[dict[str, object]]:
        """The conversation as chat templates know it.

        Raises:
            InvalidParameter: there is none.
        """
        said: list[dict[str, object]]
        if isinstance(self.input, str):
            said = [{"role": "user", "content": self.input}] if self.input else []
        else:
            said = [message.to_template() for message in self.input]
        if not said:
            raise InvalidParameter("input is empty; send a text, or at least one message", param="input")
        return said if self.instructions is None else [{"role": "system", "content": self.instructions}, *said]

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """`defaults` with what the request says instead.

        Raises:
            InvalidParameter: a value is outside its range.
        """
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidParameter(f'top_logprobs is set; set include to ["{LOGPROBS}"] as well', param="top_logprobs")
        require_stream_for_progress(self.return_progress, self.stream)
        wishes: dict[str, Any] = {
            "max_tokens": self.max_output_tokens,
            "min_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "logprobs": (self.top_logprobs or 0) if self.wants_logprobs else None,
        }
        return wished(defaults, wishes, {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"})
