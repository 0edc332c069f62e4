"""Convert tools, tool calls and tool choices from the format of any API. Knows JSON, not what is done with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from .json_values import MISSING, Object, each

_TOOL: Final = ("name", "description", "parameters", "strict")


def calls(value: Any, message: Object) -> Any:
    """Convert tool calls that have `name` and `arguments` themselves instead of in `function`."""
    if not isinstance(value, list):
        return value
    nested = [_nested(each, ("name", "arguments")) for each in value]
    return nested if any(new is not old for new, old in zip(nested, value, strict=True)) else value


def _nested(value: Any, names: Sequence[str]) -> Any:
    """Move the named fields of an object into `function`, if it has a name and no function."""
    if not isinstance(value, dict) or "function" in value or not isinstance(value.get("name"), str):
        return value
    function = {name: value[name] for name in names if name in value}
    return {
        **{name: each for name, each in value.items() if name not in names},
        "type": "function",
        "function": function,
    }


def chat_tools(value: Any, body: Object) -> Any:
    """Convert tools of other APIs to those of Chat Completions."""
    return each(value, lambda tool: _nested(_with_parameters(tool), _TOOL) if _is_function(tool) else tool)


def flat_tool(tool: Any) -> Any:
    """Convert a tool to a flat object with OpenAI's names: the fields of `function` move up into the tool."""
    tool = _with_parameters(tool)
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        return tool
    return {"type": "function", **{name: each for name, each in tool.items() if name != "function"}, **tool["function"]}


def _is_function(tool: Any) -> bool:
    """Return whether a tool is a function, and not one that a provider runs."""
    return isinstance(tool, dict) and tool.get("type") in (None, "", "function", "custom")


def _with_parameters(tool: Any) -> Any:
    """Convert Anthropic's `input_schema` of a tool to `parameters`."""
    if (
        not isinstance(tool, dict)
        or "input_schema" not in tool
        or tool.get("type") not in (None, "", "custom", "function")
    ):
        return tool
    named = {name: each for name, each in tool.items() if name not in ("input_schema", "type")}
    return {"type": "function", **named, "parameters": tool["input_schema"]}


def response_tools(value: Any, body: Object) -> Any:
    """Convert tools of other APIs to those of Responses."""

    def read(tool: Any) -> Any:
        flat = flat_tool(tool) if _is_function(tool) else tool
        has_type = not isinstance(flat, dict) or flat.get("type") or not isinstance(flat.get("name"), str)
        return flat if has_type else {**flat, "type": "function"}

    return each(value, read)


def message_tools(value: Any, body: Object) -> Any:
    """Convert tools of other APIs to Anthropic's."""

    def read(tool: Any) -> Any:
        if isinstance(tool, dict) and "input_schema" in tool:
            return tool
        flat = flat_tool(tool) if _is_function(tool) else tool
        if not isinstance(flat, dict) or "input_schema" in flat or flat.get("type") not in (None, "", "function"):
            return tool
        schema = flat.get("parameters") or {"type": "object", "properties": {}}
        named = {name: each for name, each in flat.items() if name not in ("parameters", "type")}
        return {**named, "input_schema": schema}

    return each(value, read)


def one_tool(value: Any, body: Object) -> Any:
    """Convert a single tool to a list of it."""
    return [value] if isinstance(value, dict) and value else value


def no_parameters(value: Any, tool: Object) -> Any:
    """Convert an empty schema to that of a tool without arguments, except for the server tools of other APIs."""
    is_own = tool.get("type") in (None, "", "custom", "function") and "function" not in tool
    return {"type": "object", "properties": {}} if is_own and value in (None, "", []) else value


def no_choice(value: Any, body: Object) -> Any:
    """Remove an empty tool choice."""
    return MISSING if value in ("", {}) else value


def choice_of(value: Any) -> Any:
    """Return any API's tool choice as `auto`, `none`, `required` or a list with the tool's name; None if invalid.

    >>> choice_of({"type": "any"}), choice_of({"type": "tool", "name": "now"}), choice_of({"type": "x"})
    ('required', ['now'], None)
    """
    if isinstance(value, dict) and not value.keys() <= {"type", "name", "function", "disable_parallel_tool_use"}:
        return None
    kind = value.get("type") if isinstance(value, dict) else value
    words = {"any": "required", "auto": "auto", "none": "none", "required": "required"}
    if isinstance(kind, str) and kind in words:
        return words[kind]
    if not isinstance(value, dict) or kind not in (None, "function", "tool"):
        return None
    function = value.get("function")
    if isinstance(function, dict):
        name = function.get("name") if function.keys() == {"name"} else None
    else:
        name = value.get("name", function)
    return [name] if isinstance(name, str) else None


def chat_choice(value: Any, body: Object) -> Any:
    """Convert a tool choice of any API to that of Chat Completions; see `_convert_choice`."""
    if isinstance(value, dict) and value.get("type") == "allowed_tools" and "allowed_tools" not in value:
        return {
            "type": "allowed_tools",
            "allowed_tools": {name: value[name] for name in ("mode", "tools") if name in value},
        }
    return _convert_choice(value, lambda name: {"type": "function", "function": {"name": name}})


def message_choice(value: Any, body: Object) -> Any:
    """Convert a tool choice of any API to Anthropic's."""

    def named(name: str) -> Object:
        return {**_parallel(value), "type": "tool", "name": name}

    meant = _convert_choice(value, named)
    word = {"required": "any"}.get(meant, meant) if isinstance(meant, str) else None
    if word not in ("any", "auto", "none"):
        return meant
    return value if isinstance(value, dict) and value["type"] == word else {**_parallel(value), "type": word}


def _parallel(value: Any) -> Object:
    """Return the part of an Anthropic choice that forbids parallel calls; {} if it has none."""
    name = "disable_parallel_tool_use"
    return {name: value[name]} if isinstance(value, dict) and name in value else {}


def response_choice(value: Any, body: Object) -> Any:
    """Convert a tool choice of any API to that of Responses."""
    return _convert_choice(value, lambda name: {"type": "function", "name": name})


def _convert_choice(value: Any, named: Callable[[str], Object]) -> Any:
    """Convert a tool choice of any API; a choice that is invalid, or has the right form already, is returned as it is.

    `named` returns the choice of the tool with a name.
    """
    meant = None if value is MISSING else choice_of(value)
    if meant is None or (isinstance(value, str) and meant == value):
        return value
    new = named(meant[0]) if isinstance(meant, list) else meant
    return value if new == value else new
