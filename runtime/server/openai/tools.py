"""OpenAI's types for tools, tool choices and tool calls.

Knows fields. `chat/tools/tool_format.py` knows how a model writes a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec

from ...chat.tools.tool_format import Tool, ToolChoice
from ...chat.tools.tool_use import ToolUse
from ..request_fields import require_at_most

MAX_TOOLS = 512  # several MCP servers of an agent have more than OpenAI's 128
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

# As `SchemaName`. Clients join the names of servers, plugins and tools, which may exceed OpenAI's 64 characters.
FunctionName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_.-]{1,256}$(?!\n)")]


class FunctionDefinition(msgspec.Struct, forbid_unknown_fields=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; None if there are none
    strict: bool | None = None

    def tool(self) -> Tool:
        """Return the function as a tool for the engine."""
        parameters = _NO_PARAMETERS if self.parameters is None else self.parameters
        return Tool(self.name, parameters, self.description, bool(self.strict))


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedChoice(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """A choice of one tool, which must be called."""

    function: NamedFunction


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    tools: list[dict[str, Any]]
    mode: Literal["auto", "required"] = "auto"

    @property
    def names(self) -> set[str]:
        """Names of the tools that may be called."""
        named = [each["function"] if isinstance(each.get("function"), dict) else each for each in self.tools]
        return {str(each.get("name")) for each in named}


class AllowedChoice(msgspec.Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    """A choice of some tools. The prompt lists all tools, so that it stays cached."""

    allowed_tools: AllowedTools


AnyChoice = ToolChoice | NamedChoice | AllowedChoice


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str  # not checked: the tool of an earlier reply may be gone
    arguments: str = "{}"
    parsed_arguments: Any = None  # added by OpenAI's client; ignored


class CallOfMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call of an earlier reply, as a client sends it back."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None  # from clients that join the pieces of a stream

    def to_template(self) -> dict[str, object]:
        """Return the call for chat templates, with its arguments as text."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


def tool_use(asked: Sequence[FunctionTool] | None, tool_choice: AnyChoice | None, *, is_parallel: bool) -> ToolUse:
    """Return the tools for the model, and how it may use them.

    Raises:
        InvalidParameter: a name occurs twice, a schema is not an object's, the chosen tool is missing, or there are too
            many tools, or none.
    """
    require_at_most("tools", asked, MAX_TOOLS)
    tools = [tool.function.tool() for tool in asked or ()]
    of = partial(ToolUse.of, tools, is_parallel=is_parallel, parameters_field=parameters_field)
    if isinstance(tool_choice, NamedChoice):
        return of("required", tool_choice.function.name)
    if isinstance(tool_choice, AllowedChoice):
        return of(tool_choice.allowed_tools.mode).limited_to(tool_choice.allowed_tools.names)
    return of(tool_choice or "auto")


def id_of_call(name: str) -> str:
    """Return an id for a `function_call`, which has none. Its result has the function's name only."""
    return f"call_{name}"


def parameters_field(index: int) -> str:
    """Return the request field with the schema of the n-th tool."""
    return f"tools[{index}].function.parameters"
