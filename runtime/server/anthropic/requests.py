"""What clients send to `/v1/messages`, as types: Anthropic's requests, and the fields that are ours.

Knows shapes and defaults, not the engine's work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec

from ...cache.why_not_more import MatchPolicy
from ...chat.grammar import Grammar
from ...chat.tools.tool_format import Tool
from ...chat.tools.tool_use import ToolUse
from ...engine.sampling_params import SamplingParams
from ...errors import InvalidParameter
from ..field_policy import IgnoredFields, asks_for_nothing
from ..openai.requests import CacheText, ReturnProgress, require_stream
from ..openai.tools import MAX_TOOLS, FunctionName
from ..request_fields import KVShare, MaxTokens, require_at_most, sampling_params, with_sampling_of
from ..truncation import Truncation
from .blocks import InputMessages, System


class ToolDefinition(msgspec.Struct, forbid_unknown_fields=True):
    """A tool of the client's. One of another type is Anthropic's own, and nothing here runs it or knows its schema."""

    name: FunctionName
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if self.is_custom and self.input_schema is None:
            raise ValueError("input_schema is missing or null; send the JSON schema of the tool's arguments")

    @property
    def is_custom(self) -> bool:
        """Whether it is the client's own."""
        return self.type in (None, "custom")


class AutoChoice(msgspec.Struct, tag_field="type", tag="auto", forbid_unknown_fields=True):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(msgspec.Struct, tag_field="type", tag="any", forbid_unknown_fields=True):
    disable_parallel_tool_use: bool | None = None


class NamedToolChoice(msgspec.Struct, tag_field="type", tag="tool", forbid_unknown_fields=True):
    name: str
    disable_parallel_tool_use: bool | None = None


class NoneChoice(msgspec.Struct, tag_field="type", tag="none", forbid_unknown_fields=True):
    pass


class EnabledThinking(msgspec.Struct, tag_field="type", tag="enabled", forbid_unknown_fields=True):
    budget_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None  # nothing cuts a thought short


class AdaptiveThinking(msgspec.Struct, tag_field="type", tag="adaptive", forbid_unknown_fields=True):
    pass


class BetweenTools(msgspec.Struct, tag_field="type", tag="between_tools", forbid_unknown_fields=True):
    pass


class DisabledThinking(msgspec.Struct, tag_field="type", tag="disabled", forbid_unknown_fields=True):
    pass


class JsonFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]  # a field, no tag: msgspec does not miss a tag where no other could stand
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None  # for the chat template
    format: JsonFormat | None = None


class CountTokensRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`: what a prompt is made of."""

    messages: InputMessages
    model: str | None = None
    system: System | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedToolChoice | NoneChoice | None = None  # None: auto
    thinking: EnabledThinking | AdaptiveThinking | BetweenTools | DisabledThinking | None = (
        None  # None: as the model has it
    )
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # as `output_config.format`, which came later

    @property
    def ignored(self) -> set[str]:
        """Names of what nothing is done with, as the header of ignored fields lists them."""
        names = {f"tools.{tool.type}" for tool in self.tools or () if not tool.is_custom}
        if isinstance(self.thinking, EnabledThinking) and self.thinking.budget_tokens is not None:
            names.add("thinking.budget_tokens")
        return names

    def tool_use(self) -> ToolUse:
        """What the model is told of tools, and what it may do with them.

        Raises:
            InvalidParameter: the fields do not fit each other.
        """
        require_at_most("tools", self.tools, MAX_TOOLS)
        tools = [_tool(tool, number) for number, tool in enumerate(self.tools or ()) if tool.is_custom]
        chosen = None
        match self.tool_choice:
            case NoneChoice():
                choice: Literal["auto", "none", "required"] = "none"
            case AnyChoice():
                choice = "required"
            case NamedToolChoice(name):
                choice, chosen = "required", name
            case _:
                choice = "auto"
        is_parallel = not getattr(self.tool_choice, "disable_parallel_tool_use", False)
        return ToolUse.of(tools, choice, chosen, is_parallel=is_parallel, parameters_field=self.parameters_field)

    @property
    def parameters_field(self) -> Callable[[int], str]:
        """Names the field that has the parameters of a tool that the model is told of."""
        places = [number for number, tool in enumerate(self.tools or ()) if tool.is_custom]
        return lambda index: _parameters_field(places[index])

    def grammar(self) -> Grammar | None:
        """What a reply that is no call must keep to; None for any text.

        Raises:
            InvalidGrammar: it is too long.
        """
        asked = self.output_format or (self.output_config and self.output_config.format)
        return None if not asked else Grammar.json_schema(asked.schema, is_strict=False)

    @property
    def template_kwargs(self) -> Mapping[str, object] | None:
        """More variables of the chat template."""
        kwargs: dict[str, object] = {}
        if self.thinking is not None:
            kwargs["enable_thinking"] = not isinstance(self.thinking, DisabledThinking)
        if self.output_config is not None and self.output_config.effort is not None:
            kwargs["reasoning_effort"] = self.output_config.effort
        return kwargs or None


@with_sampling_of("messages")
class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of `POST /v1/messages`."""

    max_tokens: MaxTokens
    stream: bool | None = None
    metadata: dict[str, Any] | None = None  # for the client's own books: nothing is done with it
    service_tier: str | None = None  # likewise
    cache_match: MatchPolicy | None = None  # how cached prefixes may be found, instead of the server's way
    kv_budget: KVShare | None = None  # of a prefix on disk, the share of keys and values that is enough
    cache_salt: CacheText | None = None  # what only requests with the same salt may reuse
    prompt_cache_key: CacheText | None = None  # likewise
    speculate: bool | None = None  # false: nothing is guessed; the reply is the same bytes
    return_progress: ReturnProgress | None = None
    truncation: Truncation | None = None  # what becomes of what does not fit; None: as the server has it

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """`defaults` with what the request says instead.

        Raises:
            InvalidParameter: a value is outside its range.
        """
        require_stream(self.stream, "return_progress", self.return_progress)
        return sampling_params("messages", self, defaults, {}, {})


def leave_out_of_counting(body: Any, ignored: IgnoredFields, *, is_strict: bool) -> None:
    """Take what is about the reply out of a body for `/v1/messages/count_tokens`, and list it: clients send what they
    will send to `/v1/messages`.
    """
    if isinstance(body, dict) and not is_strict:
        for name in _OF_REPLIES & body.keys():
            if not asks_for_nothing(body.pop(name)):
                ignored.harmless.add(name)


_OF_REPLIES = frozenset(MessagesRequest.__struct_fields__) - frozenset(CountTokensRequest.__struct_fields__)


def _parameters_field(number: int) -> str:
    return f"tools[{number}].input_schema"


def _tool(tool: ToolDefinition, number: int) -> Tool:
    if tool.input_schema is None:
        param = _parameters_field(number)
        raise InvalidParameter(f"{param} is missing; send the JSON schema of the tool's arguments", param=param)
    return Tool(tool.name, tool.input_schema, tool.description, bool(tool.strict))
