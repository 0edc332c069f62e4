"""Types of the requests to `/v1/messages`: Anthropic's fields, and radixlm's own.

Knows formats and defaults, not the engine's work.
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
    """A tool of the client. Other types are tools of Anthropic's servers, which are ignored."""

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
        """Return whether it is a tool of the client."""
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
    budget_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None  # ignored: reasoning has no limit


class AdaptiveThinking(msgspec.Struct, tag_field="type", tag="adaptive", forbid_unknown_fields=True):
    pass


class BetweenTools(msgspec.Struct, tag_field="type", tag="between_tools", forbid_unknown_fields=True):
    pass


class DisabledThinking(msgspec.Struct, tag_field="type", tag="disabled", forbid_unknown_fields=True):
    pass


class JsonFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]  # a field, not a tag: msgspec does not require the tag of a single type
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None  # for the chat template
    format: JsonFormat | None = None


class CountTokensRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`: the parts of a prompt."""

    messages: InputMessages
    model: str | None = None
    system: System | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedToolChoice | NoneChoice | None = None  # None: auto
    thinking: EnabledThinking | AdaptiveThinking | BetweenTools | DisabledThinking | None = (
        None  # None: the model's default
    )
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # the older name of `output_config.format`

    @property
    def ignored(self) -> set[str]:
        """Names of ignored parts, for the header of ignored fields."""
        names = {f"tools.{tool.type}" for tool in self.tools or () if not tool.is_custom}
        if isinstance(self.thinking, EnabledThinking) and self.thinking.budget_tokens is not None:
            names.add("thinking.budget_tokens")
        return names

    def tool_use(self) -> ToolUse:
        """Return the tools for the model, and how it may use them.

        Raises:
            InvalidParameter: the fields contradict each other.
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
        """A function that returns the request field with the schema of the n-th tool, for errors."""
        places = [number for number, tool in enumerate(self.tools or ()) if tool.is_custom]
        return lambda index: _parameters_field(places[index])

    def grammar(self) -> Grammar | None:
        """Return the grammar of a reply that is not a tool call; None for any text.

        Raises:
            InvalidGrammar: the schema is too long.
        """
        asked = self.output_format or (self.output_config and self.output_config.format)
        return None if not asked else Grammar.json_schema(asked.schema, is_strict=False)

    @property
    def template_kwargs(self) -> Mapping[str, object] | None:
        """Additional variables for the chat template."""
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
    metadata: dict[str, Any] | None = None  # ignored: for the client's own records
    service_tier: str | None = None  # ignored
    cache_match: MatchPolicy | None = None  # match policy of the prefix cache; None: the server's default
    kv_budget: KVShare | None = None  # share of a stored prefix's KV rows to load
    cache_salt: CacheText | None = None  # isolates the cache: only requests with the same salt share prefixes
    prompt_cache_key: CacheText | None = None  # likewise
    speculate: bool | None = None  # false: no speculative decoding; the reply is the same bytes
    return_progress: ReturnProgress | None = None
    truncation: Truncation | None = None  # policy for prompts that exceed the context; None: the server's default

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """Return `defaults` with the parameters that the request sets.

        Raises:
            InvalidParameter: a value is outside its range.
        """
        require_stream(self.stream, "return_progress", self.return_progress)
        return sampling_params("messages", self, defaults, {}, {})


def leave_out_of_counting(body: Any, ignored: IgnoredFields, *, is_strict: bool) -> None:
    """Remove fields about the reply from a body for `/v1/messages/count_tokens`, and list them as ignored.

    Clients send the same body that they will send to `/v1/messages`.
    """
    if isinstance(body, dict) and not is_strict:
        for name in _OF_REPLIES & body.keys():
            if not asks_for_nothing(body.pop(name)):
                ignored.harmless.add(name)


_OF_REPLIES = frozenset(MessagesRequest.__struct_fields__) - frozenset(CountTokensRequest.__struct_fields__)


def _parameters_field(number: int) -> str:
    return f"tools[{number}].input_schema"


def _tool(tool: ToolDefinition, number: int) -> Tool:
    """Return the definition of a tool as the engine takes it.

    Raises:
        InvalidParameter: it has no schema.
    """
    if tool.input_schema is None:
        param = _parameters_field(number)
        raise InvalidParameter(f"{param} is missing; send the JSON schema of the tool's arguments", param=param)
    return Tool(tool.name, tool.input_schema, tool.description, bool(tool.strict))
