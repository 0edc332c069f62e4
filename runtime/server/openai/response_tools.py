"""The tools of a Responses request: functions, functions in namespaces, and custom tools, which take a text.

A custom tool becomes a function with one argument, `input`. Tools that OpenAI's servers run themselves are not passed
to the model, and are listed in the header of ignored fields. Knows formats, not how a model writes a call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec

from ...chat.tools.tool_format import Tool
from ...chat.tools.tool_use import ToolUse
from ...errors import InvalidParameter
from ..field_policy import IgnoredFields
from ..hints.validation import explain
from ..request_fields import require_at_most
from .tools import MAX_TOOLS, FunctionDefinition, FunctionName

T = TypeVar("T")
RawTool = dict[str, Any]
RawChoice = Literal["auto", "none", "required"] | dict[str, Any]
_INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class FunctionOfResponses(FunctionDefinition, forbid_unknown_fields=True):
    type: Literal["function"] = "function"


class CustomFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "grammar"] = "text"
    syntax: str | None = None
    definition: str | None = None


class CustomTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool that takes a text. Its grammar is described to the model, and not enforced."""

    name: FunctionName
    type: Literal["custom"] = "custom"
    description: str | None = None
    format: CustomFormat | None = None

    def tool(self) -> Tool:
        """Return the tool as a function."""
        description = [self.description] if self.description else []
        if self.format is not None and self.format.definition:
            description.append(f"The input follows this {self.format.syntax or ''} grammar:\n{self.format.definition}")
        return Tool(self.name, _INPUT, "\n\n".join(description) or None)


class NamespaceTools(msgspec.Struct, forbid_unknown_fields=True):
    name: FunctionName
    tools: list[RawTool]
    type: Literal["namespace"] = "namespace"
    description: str | None = None


@dataclass(frozen=True)
class OfferedTool:
    """A tool with the client's name for it, which may differ from the model's."""

    tool: Tool
    field: str  # the request field with its schema
    name: str
    namespace: str | None = None
    is_custom: bool = False


def full_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model calls a tool."""
    return name if namespace is None else f"{namespace}.{name}"


def offered(raw: Sequence[RawTool] | None, ignored: IgnoredFields, *, is_strict: bool) -> list[OfferedTool]:
    """Return the tools for the model. Adds dropped tools and ignored fields to `ignored`.

    Raises:
        InvalidParameter: a tool has no type, or there are too many.
        HTTPError, msgspec.ValidationError: a field of a tool is refused.
    """
    num_tools = sum(1 for _ in _leaves(raw or ()))  # before converting any: a body has room for tens of thousands
    require_at_most("tools", range(num_tools), MAX_TOOLS)
    tools: list[OfferedTool] = []
    for number, tool in enumerate(raw or ()):
        tools += _offered(tool, f"tools[{number}]", ignored, is_strict)
    return tools


def response_tool_use(tools: Sequence[OfferedTool], choice: RawChoice | None, *, is_parallel: bool) -> ToolUse:
    """Return the tools for the model, and how it may use them.

    Raises:
        InvalidParameter: as `ToolUse.of` does, or the choice is not supported.
    """
    of = partial(
        ToolUse.of,
        [each.tool for each in tools],
        is_parallel=is_parallel,
        parameters_field=lambda place: tools[place].field,
    )
    if not isinstance(choice, dict):
        return of(choice or "auto")
    kind, name = choice.get("type"), choice.get("name")
    if kind in ("function", "custom") and isinstance(name, str):
        return of("required", full_name(name, choice.get("namespace")))
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        named = [each for each in choice["tools"] if isinstance(each, dict)]
        allowed = {full_name(str(each.get("name")), each.get("namespace")) for each in named}
        return of("required" if choice.get("mode") == "required" else "auto").limited_to(allowed)
    message = (
        f'tool_choice is {json.dumps(choice):.80}; send "auto", "none", "required", or the type and name of a tool'
    )
    raise InvalidParameter(message, param="tool_choice")


def _leaves(raw: Sequence[RawTool]) -> Iterator[object]:
    """Yield all tools, also those in namespaces, without checking them."""
    for tool in raw:
        inner = tool.get("tools") if tool.get("type") == "namespace" else None
        yield from inner if isinstance(inner, list) and inner else [tool]


def _offered(raw: RawTool, place: str, ignored: IgnoredFields, is_strict: bool) -> list[OfferedTool]:
    """Return the tools of one entry of `tools`: several for a namespace, none for a kind that is ignored.

    Args:
        place: the entry in errors, such as `tools[0]`.
        is_strict: unknown fields are errors.
    """
    if raw.get("type") != "namespace":
        return _offered_alone(raw, place, ignored, is_strict)
    space = _converted(raw, NamespaceTools, place, ignored, is_strict)
    return [
        replace(each, tool=replace(each.tool, name=full_name(each.name, space.name)), namespace=space.name)
        for at, inner in enumerate(space.tools)
        for each in _offered_alone(inner, f"{place}.tools[{at}]", ignored, is_strict)
    ]


def _offered_alone(raw: RawTool, place: str, ignored: IgnoredFields, is_strict: bool) -> list[OfferedTool]:
    """Return the one tool of an entry outside of namespaces; none for a kind that is ignored."""
    kind = raw.get("type")
    if not isinstance(kind, str):
        raise InvalidParameter(f'{place} has no type; send "function", "custom" or "namespace"', param=place)
    match kind:
        case "function":
            function = _converted(raw, FunctionOfResponses, place, ignored, is_strict)
            return [OfferedTool(function.tool(), f"{place}.parameters", function.name)]
        case "custom":
            custom = _converted(raw, CustomTool, place, ignored, is_strict)
            return [OfferedTool(custom.tool(), place, custom.name, is_custom=True)]
        case "namespace":
            message = f"{place} is a namespace in a namespace; send it at the top level"
            raise InvalidParameter(message, param=place)
    ignored.harmless.add(f"tools.{kind}")
    return []


def _converted(raw: RawTool, kind: type[T], place: str, ignored: IgnoredFields, is_strict: bool) -> T:
    """Convert a tool to its type, without unknown fields."""
    known: tuple[str, ...] = kind.__struct_fields__  # type: ignore[attr-defined]  # a struct
    if not is_strict:
        for name in raw.keys() - set(known):
            ignored.ignore(f"tools.{name}", raw[name], known)
        raw = {name: value for name, value in raw.items() if name in known}
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise InvalidParameter(explain(error, kind, within=place).message, param=place) from error
