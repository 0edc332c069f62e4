"""The tools that a client offers a model, and how the model is to choose among them: OpenAI's fields as types.

Knows fields; `chat/tools/tool_format.py` knows how a model writes a call.
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

# As `SchemaName`; clients join the names of servers, plugins and tools, and OpenAI's 64 characters do not hold these.
FunctionName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_.-]{1,256}$(?!\n)")]


class FunctionDefinition(msgspec.Struct, forbid_unknown_fields=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; None: there are none
    strict: bool | None = None

    def tool(self) -> Tool:
        """The function as the engine knows it."""
        parameters = _NO_PARAMETERS if self.parameters is None else self.parameters
        return Tool(self.name, parameters, self.description, bool(self.strict))


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedChoice(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """The one tool that is called."""

    function: NamedFunction


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    tools: list[dict[str, Any]]
    mode: Literal["auto", "required"] = "auto"

    @property
    def names(self) -> set[str]:
        """Of the tools that may be called."""
        named = [each["function"] if isinstance(each.get("function"), dict) else each for each in self.tools]
        return {str(each.get("name")) for each in named}


class AllowedChoice(msgspec.Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    """Some of the tools, of which the model is told all."""

    allowed_tools: AllowedTools


AnyChoice = ToolChoice | NamedChoice | AllowedChoice


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str  # whatever an earlier reply called, and were it no tool's: the conversation goes on
    arguments: str = "{}"
    parsed_arguments: Any = None  # what OpenAI's client made of them, and sends back: nothing is done with it


class CallOfMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A call that an earlier reply made, sent back as it was got."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None  # where a client joined the pieces of a stream

    def to_template(self) -> dict[str, object]:
        """The call as chat templates know it, its arguments still text."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


def tool_use(asked: Sequence[FunctionTool] | None, tool_choice: AnyChoice | None, *, is_parallel: bool) -> ToolUse:
    """What the model is told, and what it may do.

    Raises:
        InvalidParameter: a tool is there twice or wants no object, the chosen one is not there, or there are too many,
            or none.
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
    """An id for a call that has none, as before there were tools: its result has the function's name only."""
    return f"call_{name}"


def parameters_field(index: int) -> str:
    """The name of the field that has a tool's parameters."""
    return f"tools[{index}].function.parameters"
