"""Shapes that clients send in place of what an endpoint documents, where they can only mean one thing.

A conversation is sent again with every request: to refuse one of its messages would end it. So what is in this table is
read as what it means, and its path is listed with the fields that are ignored. It is looked at only where a body is not
as documented, and a strict server refuses it. `docs/agents.md` has the table. Knows JSON, not what is done with it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from .field_policy import IgnoredFields
from .unknown_fields import LeaveOut

MISSING: Final = object()
"""In place of a value that is not there, and of one that is to be left out."""

Object = dict[str, Any]
Read = Callable[[Any, Object], Any]
"""Returns what a value of an object means, which may be the value itself."""


@dataclass(frozen=True)
class Shape:
    """A shape that is read.

    Args:
        path: where it stands; arrays have no part in it.
        sent: what clients send there.
        meaning: what it is read as.
    """

    path: str
    sent: str
    meaning: str
    read: Read


def relax(body: Any, shapes: Sequence[Shape]) -> set[str]:
    """Replace such shapes in a body, and return the paths of those that were there.

    >>> body = {"tool_choice": "any"}
    >>> relax(body, CHAT), body
    ({'tool_choice'}, {'tool_choice': 'required'})
    """
    found = set[str]()
    for shape in shapes if isinstance(body, dict) else ():
        *parents, name = shape.path.split(".")
        for parent in _objects(body, parents):
            value = parent.get(name, MISSING)
            meant = shape.read(value, parent)
            if meant is not value:
                found.add(shape.path)
                if meant is MISSING:
                    del parent[name]
                else:
                    parent[name] = meant
    return found


def relaxing(shapes: Sequence[Shape], *then: LeaveOut) -> LeaveOut:
    """What `decode_body` does with a body that is not as documented: it reads these shapes, and goes on."""

    def leave_out(body: Any, ignored: IgnoredFields, *, is_strict: bool) -> None:
        if not is_strict:
            ignored.harmless |= relax(body, shapes)
        for each in then:
            each(body, ignored, is_strict=is_strict)

    return leave_out


def _objects(value: Any, path: Sequence[str]) -> Iterator[Object]:
    """The objects at a path, through arrays."""
    if isinstance(value, list):
        for each in value:
            yield from _objects(each, path)
    elif isinstance(value, dict):
        if not path:
            yield value
        elif path[0] in value:
            yield from _objects(value[path[0]], path[1:])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _null_content(value: Any, message: Object) -> Any:
    """Of a user, nothing said is a mistake; null is not."""
    if value is None:
        return "" if not _says_more(message) else value
    is_optional = message.get("role") in ("assistant", "tool", "function", "system")
    return "" if value is MISSING and is_optional and not _says_more(message) else value


def _null_content_of_item(value: Any, item: Object) -> Any:
    if value is None:
        return "" if "role" in item else value
    return "" if value is MISSING and item.get("role") in ("assistant", "system", "developer") else value


def _message_type(value: Any, item: Object) -> Any:
    return "message" if value is None and "role" in item else value


def _says_more(message: Object) -> bool:
    return any(message.get(name) for name in ("tool_calls", "function_call", "reasoning_content", "refusal", "audio"))


def _is_parts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict) and isinstance(each.get("type"), str) for each in value
    )


def _result(value: Any, message: Object) -> Any:
    """The content of a message with the result of a call."""
    return _as_text(value, message) if message.get("role") in ("tool", "function") else value


def _as_text(value: Any, parent: Object) -> Any:
    if value is None or value is MISSING:
        return ""
    return value if isinstance(value, str) or _is_parts(value) else _json(value)


def _result_output(value: Any, item: Object) -> Any:
    return _as_text(value, item) if str(item.get("type")).endswith("_output") else value


def _result_block(value: Any, block: Object) -> Any:
    is_result = block.get("type") == "tool_result" and value is not MISSING
    return _as_text(value, block) if is_result else value


def _one_part(value: Any, message: Object) -> Any:
    is_part = isinstance(value, dict) and isinstance(value.get("type"), str) and message.get("role") != "tool"
    return [value] if is_part else value


def _strings(value: Any, message: Object) -> Any:
    if not isinstance(value, list) or not value or message.get("role") in ("tool", "function"):
        return value
    if not any(isinstance(each, str) for each in value):
        return value
    return [{"type": "text", "text": each} if isinstance(each, str) else each for each in value]


def _strings_of_item(value: Any, item: Object) -> Any:
    """The same, where parts of the assistant have a type of their own."""
    read = _strings(value, item)
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    return value if read is value else [{"type": kind, "text": old} if isinstance(old, str) else old for old in value]


def _arguments(value: Any, parent: Object) -> Any:
    if value is None:
        return "{}"
    return _json(value) if isinstance(value, dict) else value


def _arguments_of_item(value: Any, item: Object) -> Any:
    if item.get("type") != "function_call":
        return value
    return "{}" if value is MISSING else _arguments(value, item)


def _input(value: Any, block: Object) -> Any:
    if block.get("type") != "tool_use":
        return value
    if value is None or value is MISSING or value == "":
        return {}
    if isinstance(value, str):
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return read if isinstance(read, dict) else value
    return value


def _null(meaning: str) -> Read:
    return lambda value, parent: meaning if value is None else value


def _calls(value: Any, message: Object) -> Any:
    """Calls whose function stands in them without a name of its own."""
    if not isinstance(value, list):
        return value
    nested = [_nested(each, ("name", "arguments")) for each in value]
    return nested if any(new is not old for new, old in zip(nested, value, strict=True)) else value


def _nested(value: Any, names: Sequence[str]) -> Any:
    """`{"function": {"name": ...}}` for what has the name itself."""
    if not isinstance(value, dict) or "function" in value or not isinstance(value.get("name"), str):
        return value
    function = {name: value[name] for name in names if name in value}
    return {
        **{name: each for name, each in value.items() if name not in names},
        "type": "function",
        "function": function,
    }


_TOOL: Final = ("name", "description", "parameters", "strict")


def _chat_tools(value: Any, body: Object) -> Any:
    return _each(value, lambda tool: _nested(_with_parameters(tool), _TOOL) if _kind(tool) else tool)


def flat_tool(tool: Any) -> Any:
    """A tool as Responses and Anthropic have it, by OpenAI's names: what stands in `function` stands beside it."""
    tool = _with_parameters(tool)
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        return tool
    return {"type": "function", **{name: each for name, each in tool.items() if name != "function"}, **tool["function"]}


def _kind(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") in (None, "function", "custom")


def _with_parameters(tool: Any) -> Any:
    if not isinstance(tool, dict) or "input_schema" not in tool or tool.get("type") not in (None, "custom", "function"):
        return tool
    named = {name: each for name, each in tool.items() if name not in ("input_schema", "type")}
    return {"type": "function", **named, "parameters": tool["input_schema"]}


def _response_tools(value: Any, body: Object) -> Any:
    return _each(value, lambda tool: flat_tool(tool) if _kind(tool) else tool)


def _message_tools(value: Any, body: Object) -> Any:
    def read(tool: Any) -> Any:
        if isinstance(tool, dict) and "input_schema" in tool:
            return tool
        flat = flat_tool(tool) if _kind(tool) else tool
        if not isinstance(flat, dict) or "input_schema" in flat or flat.get("type") not in (None, "function"):
            return tool
        schema = flat.get("parameters") or {"type": "object", "properties": {}}
        named = {name: each for name, each in flat.items() if name not in ("parameters", "type")}
        return {**named, "input_schema": schema}

    return _each(value, read)


def _each(value: Any, read: Callable[[Any], Any]) -> Any:
    if not isinstance(value, list):
        return value
    new = [read(each) for each in value]
    return new if any(mine is not theirs for mine, theirs in zip(new, value, strict=True)) else value


def choice_of(value: Any) -> Any:
    """`auto`, `none`, `required`, or the name of a tool in a list; None if a choice of a tool is anything else.

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


def _chat_choice(value: Any, body: Object) -> Any:
    if isinstance(value, dict) and value.get("type") == "allowed_tools" and "allowed_tools" not in value:
        return {
            "type": "allowed_tools",
            "allowed_tools": {name: value[name] for name in ("mode", "tools") if name in value},
        }
    return _chosen(value, lambda name: {"type": "function", "function": {"name": name}})


def _message_choice(value: Any, body: Object) -> Any:
    def named(name: str) -> Object:
        return {**_parallel(value), "type": "tool", "name": name}

    meant = _chosen(value, named)
    word = {"required": "any"}.get(meant, meant) if isinstance(meant, str) else None
    if word not in ("any", "auto", "none"):
        return meant
    return value if isinstance(value, dict) and value["type"] == word else {**_parallel(value), "type": word}


def _parallel(value: Any) -> Object:
    name = "disable_parallel_tool_use"
    return {name: value[name]} if isinstance(value, dict) and name in value else {}


def _response_choice(value: Any, body: Object) -> Any:
    return _chosen(value, lambda name: {"type": "function", "name": name})


def _chosen(value: Any, named: Callable[[str], Object]) -> Any:
    meant = None if value is MISSING else choice_of(value)
    if meant is None or (isinstance(value, str) and meant == value):
        return value
    new = named(meant[0]) if isinstance(meant, list) else meant
    return value if new == value else new


@dataclass
class _Pairs:
    """Gives calls ids that have none, and their results the ids of the calls that they follow, in their order."""

    num_calls: int = 0
    waiting: deque[str] = field(default_factory=deque)

    def call(self, call_id: Any) -> str:
        """The id of a call."""
        self.num_calls += 1
        known = call_id if isinstance(call_id, str) else f"call_{self.num_calls}"
        self.waiting.append(known)
        return known

    def result(self, call_id: Any) -> str:
        """The id of the call that a result belongs to."""
        if isinstance(call_id, str):
            if call_id in self.waiting:
                self.waiting.remove(call_id)
            return call_id
        return self.waiting.popleft() if self.waiting else f"call_{self.num_calls + 1}"


def _chat_ids(value: Any, body: Object) -> Any:
    """Messages whose calls and results have ids."""
    pairs = _Pairs()

    def read(message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        if message.get("role") == "tool":
            return _with(message, "tool_call_id", pairs.result(message.get("tool_call_id")))
        if not isinstance(message.get("tool_calls"), list) or not message["tool_calls"]:
            return message
        pairs.waiting.clear()
        calls = _each(
            message["tool_calls"],
            lambda call: _with(call, "id", pairs.call(call.get("id"))) if isinstance(call, dict) else call,
        )
        return _with(message, "tool_calls", calls)

    return _each(value, read)


def _response_ids(value: Any, body: Object) -> Any:
    pairs = _Pairs()

    def read(item: Any) -> Any:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind in ("function_call", "custom_tool_call"):
            return _with(item, "call_id", pairs.call(item.get("call_id")))
        if kind in ("function_call_output", "custom_tool_call_output"):
            return _with(item, "call_id", pairs.result(item.get("call_id")))
        return item

    return _each(value, read)


def _message_ids(value: Any, body: Object) -> Any:
    pairs = _Pairs()

    def read_block(block: Any) -> Any:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            return _with(block, "id", pairs.call(block.get("id")))
        return _with(block, "tool_use_id", pairs.result(block.get("tool_use_id"))) if kind == "tool_result" else block

    def read(message: Any) -> Any:
        content = message.get("content") if isinstance(message, dict) else None
        return _with(message, "content", _each(content, read_block)) if isinstance(content, list) else message

    return _each(value, read)


def _with(parent: Object, name: str, value: Any) -> Object:
    """The object with this value; itself where it has it."""
    return parent if parent.get(name) is value else {**parent, name: value}


_IDS: Final = "no id, or null", "ids by order: a result without one belongs to the first call without a result"
_RESULT: Final = "null, a number, an object or a list", 'nothing is `""`, anything else is its JSON'
_TOOLS: Final = "tools in the shape of another API", "the same tools"
_CHOICE: Final = "`any`, or any API's object", "`auto`, `none`, `required` or the one tool"

CHAT: Final = (
    Shape("messages.tool_calls", "`name` and `arguments` without `function`", "a function", _calls),
    Shape("messages.tool_calls.type", "null", "`function`", _null("function")),
    Shape("messages.tool_calls.function.arguments", "an object, or null", "its JSON; null is `{}`", _arguments),
    Shape("messages", *_IDS, _chat_ids),
    Shape("messages.content", *_RESULT, _result),
    Shape("messages.content", "null, or none of the assistant and the system", '`""`', _null_content),
    Shape("messages.content", "one part without a list", "a list of it", _one_part),
    Shape("messages.content", "texts in a list", "parts of text", _strings),
    Shape("messages.content.text", "null", '`""`', _null("")),
    Shape("tools", *_TOOLS, _chat_tools),
    Shape("tool_choice", *_CHOICE, _chat_choice),
)
"""`/v1/chat/completions`."""

RESPONSES: Final = (
    Shape("input.arguments", "an object, or null", "its JSON; null is `{}`", _arguments_of_item),
    Shape("input", *_IDS, _response_ids),
    Shape("input.output", *_RESULT, _result_output),
    Shape("input.type", "null, of what has a role", "a message", _message_type),
    Shape("input.content", "null, or none of the assistant and the system", '`""`', _null_content_of_item),
    Shape("input.content", "one part without a list", "a list of it", _one_part),
    Shape("input.content", "texts in a list", "parts of text", _strings_of_item),
    Shape("input.output.text", "null", '`""`', _null("")),
    Shape("input.content.text", "null", '`""`', _null("")),
    Shape("tools", *_TOOLS, _response_tools),
    Shape("tool_choice", *_CHOICE, _response_choice),
)
"""`/v1/responses`."""

MESSAGES: Final = (
    Shape("messages.content.input", "null, or JSON in a text", "an object", _input),
    Shape("messages", *_IDS, _message_ids),
    Shape("messages.content.content", *_RESULT, _result_block),
    Shape("messages.content", "null", '`""`', _null("")),
    Shape("messages.content", "one part without a list", "a list of it", _one_part),
    Shape("messages.content", "texts in a list", "parts of text", _strings),
    Shape("messages.content.text", "null", '`""`', _null("")),
    Shape("messages.content.thinking", "null", '`""`', _null("")),
    Shape("system.text", "null", '`""`', _null("")),
    Shape("messages.content.content.text", "null", '`""`', _null("")),
    Shape("tools", *_TOOLS, _message_tools),
    Shape("tool_choice", *_CHOICE, _message_choice),
)
"""`/v1/messages`."""
