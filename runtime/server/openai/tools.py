"""The tools that a client offers a model, and how it is to choose among them: OpenAI's fields as types.

Knows fields; how a model writes a call is `tool_format.py`'s, and `tool_calls.py` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from ...chat.grammar import Grammar
from ...chat.tool_format import Tool, ToolChoice, ToolFormat, tool_at
from ...errors import InvalidGrammar, InvalidParameter
from ..limits import require_at_most
from .tool_calls import ToolCallReader

MAX_TOOLS = 128
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

FunctionName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$(?!\n)")]  # as `SchemaName`


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


class NamedChoice(msgspec.Struct, forbid_unknown_fields=True):
    function: NamedFunction
    type: Literal["function"] = "function"


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: FunctionName
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


@dataclass(frozen=True)
class ToolUse:
    """Tools that the model is told of, and those of them that it may call."""

    tools: tuple[Tool, ...]
    callable: tuple[Tool, ...]
    choice: ToolChoice
    is_parallel: bool

    def grammar(self, format: ToolFormat, content: Grammar | None) -> Grammar | None:
        """What the reply must keep to, where what is no call must keep to `content`.

        Raises:
            InvalidParameter: `content` is of another kind than a JSON schema, and there are tools.
            InvalidGrammar: `content` is not a JSON object, and there are tools.
        """
        if not self.tools:
            return content
        if content is not None and content.kind != "json_schema":
            raise InvalidParameter(f"tools and a {content.noun} for the reply are both set; send one of them")
        return format.grammar(self.callable, self.choice, is_parallel=self.is_parallel, content=content)

    @contextmanager
    def naming(self, grammar: Grammar | None) -> Iterator[None]:
        """Say of an error of what `grammar` returned in which field it is.

        Raises:
            InvalidParameter: a tool's parameters cannot be used.
        """
        try:
            yield
        except InvalidGrammar as error:
            if grammar is None or grammar.kind != "lark":
                raise
            number = None if error.line is None else tool_at(grammar, error.line)
            if number is not None:
                param = _parameters_of(self.tools.index(self.callable[number]))
                raise InvalidParameter(f"{param}: {error}", param=param) from error
            if error.line is not None:  # the reply's own
                raise
            raise InvalidParameter(f"tools: {error}", param="tools") from error

    def reader(self, format: ToolFormat) -> ToolCallReader | None:
        """Finds the calls in a reply; None where none can be."""
        return ToolCallReader(format, [tool.name for tool in self.callable]) if self.callable else None


def tool_use(
    asked: Sequence[FunctionTool] | None, tool_choice: ToolChoice | NamedChoice | None, *, is_parallel: bool
) -> ToolUse:
    """What the model is told, and what it may do.

    Raises:
        InvalidParameter: a tool is there twice or wants no object, the chosen one is not there, or there are too many,
            or none.
    """
    require_at_most("tools", asked, MAX_TOOLS)
    tools = tuple(tool.function.tool() for tool in asked or ())
    for index, tool in enumerate(tools):
        kind = tool.parameters.get("type", "object")
        if kind not in ("object", ["object"]):
            param = _parameters_of(index)
            message = f'{param} has the type {json.dumps(kind):.80}; arguments are an object: send "object", or no type'
            raise InvalidParameter(message, param=param)
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidParameter(f"tools has {twice!r} twice; give each function a name of its own")
    choice = tool_choice or "auto"
    if not tools and choice not in ("auto", "none"):
        raise InvalidParameter("tool_choice is set, tools is not; send tools, or leave tool_choice out")
    if not isinstance(choice, NamedChoice):
        return ToolUse(tools, tools if choice != "none" else (), choice, is_parallel)
    chosen = tuple(tool for tool in tools if tool.name == choice.function.name)
    if not chosen:
        raise InvalidParameter(f"tool_choice names {choice.function.name!r:.80}; tools has {', '.join(names)}")
    return ToolUse(tools, chosen, "required", is_parallel=False)


def _parameters_of(index: int) -> str:
    return f"tools[{index}].function.parameters"
