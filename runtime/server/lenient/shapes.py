"""The table of malformed requests that can only mean one thing, by endpoint, and their conversion.

Clients send a conversation again with every request, so refusing one of its messages would end it. Forms in this table
are converted instead, and their path is listed with the ignored fields. The table is used only if a body does not match
its type, and a strict server refuses such bodies. `docs/agents.md` has this table and that of `values.py`. Knows JSON,
not what is done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ..field_policy import IgnoredFields
from ..unknown_fields import LeaveOut
from . import call_ids, contents, foreign_messages, tools
from .json_values import MISSING, Object, Read
from .values import relax_values


@dataclass(frozen=True)
class Shape:
    """One malformed form and its conversion.

    Args:
        path: names of the fields that lead to it; arrays are passed through.
        sent: description of what clients send there.
        meaning: description of what it is converted to.
        read: converts a value.
    """

    path: str
    sent: str
    meaning: str
    read: Read


def relax(body: Any, shapes: Sequence[Shape]) -> set[str]:
    """Convert malformed forms in a body in place, and return the paths of those that occurred.

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


def relaxing(shapes: Sequence[Shape], type: type[msgspec.Struct], *then: LeaveOut) -> LeaveOut:
    """Return the `leave_out` of `decode_body` that converts these forms, and malformed values of any field.

    Args:
        type: the type of the body, which has the type of each field.
        then: applied afterwards.
    """

    def leave_out(body: Any, ignored: IgnoredFields, *, is_strict: bool) -> None:
        if not is_strict:
            ignored.harmless |= relax(body, shapes) | relax_values(body, type)
        for each in then:
            each(body, ignored, is_strict=is_strict)

    return leave_out


def _objects(value: Any, path: Sequence[str]) -> Iterator[Object]:
    """Yield the objects at a path, also within arrays."""
    if isinstance(value, list):
        for each in value:
            yield from _objects(each, path)
    elif isinstance(value, dict):
        if not path:
            yield value
        elif path[0] in value:
            yield from _objects(value[path[0]], path[1:])


def _foreign(read: Callable[[Any], Any]) -> Read:
    """Return a conversion that does not look at the rest of the body."""
    return lambda value, body: read(value)


_IDS: Final = "missing or null id", "ids by order: a result without one gets that of the first call without a result"
_STOPS: Final = tuple(
    Shape(name, '`""`, alone or in a list', "none", contents.no_empty_texts)
    for name in ("stop", "stop_sequences", "stop_regex", "banned_strings")
)
_FOREIGN: Final = "calls and results in the format of another API", "the same calls and results"
_PART_TYPE: Final = "no type, but a text", "`text`"
_OTHER_TYPE: Final = "`input_text` or `output_text`", "`text`"
_NO_CHOICE: Final = '`""` or `{}`', "none"
_NO_PARAMETERS: Final = 'null, `""` or `[]`', "no arguments"
_ROLE: Final = "in capitals", "in lower case"
_ONE_TOOL: Final = "a single tool", "a list of it"
_NO_TEXT: Final = "null, or a text part without text", '`""`'
_ARGUMENTS: Final = "an object, null or `[]`", "its JSON; null or `[]` is `{}`"
_RESULT: Final = "null, a number, an object or a list", 'its JSON; null is `""`'
_TOOLS: Final = "tools in the format of another API", "the same tools"
_CHOICE: Final = "`any`, or any API's object", "`auto`, `none`, `required` or the one tool"

CHAT: Final = (
    Shape("messages", "a text", "a user message", contents.user),
    Shape("messages.role", *_ROLE, contents.role),
    Shape("messages", *_FOREIGN, _foreign(foreign_messages.for_chat)),
    Shape("messages.tool_calls", "`name` and `arguments` without `function`", "a function", tools.calls),
    Shape("messages.tool_calls.type", "null", "`function`", contents.null("function")),
    Shape(
        "messages.tool_calls.function.arguments",
        "an object, null or `[]`",
        "its JSON; null or `[]` is `{}`",
        contents.arguments,
    ),
    Shape("messages", *_IDS, call_ids.chat_ids),
    Shape("messages.content", *_RESULT, contents.result),
    Shape("messages.content", "null, or missing in an assistant or system message", '`""`', contents.null_content),
    Shape("messages.content", "a single part", "a list of it", contents.one_part),
    Shape("messages.content", "texts in a list", "text parts", contents.strings),
    Shape("messages.content.type", *_OTHER_TYPE, contents.other_type),
    Shape("messages.content.text", *_NO_TEXT, contents.no_text),
    Shape("tools", *_ONE_TOOL, tools.one_tool),
    Shape("tools", *_TOOLS, tools.chat_tools),
    Shape("tool_choice", *_NO_CHOICE, tools.no_choice),
    Shape("tool_choice", *_CHOICE, tools.chat_choice),
    *_STOPS,
)
"""`/v1/chat/completions`."""

RESPONSES: Final = (
    Shape("input.role", *_ROLE, contents.role),
    Shape("input", *_FOREIGN, _foreign(foreign_messages.for_responses)),
    Shape("input.arguments", *_ARGUMENTS, contents.arguments_of_item),
    Shape("input", *_IDS, call_ids.response_ids),
    Shape("input.output", *_RESULT, contents.result_output),
    Shape("input.type", "null, with a role", "a message", contents.message_type),
    Shape("input.content", "null, or missing in an assistant or system message", '`""`', contents.null_content_of_item),
    Shape("input.content", "a single part", "a list of it", contents.one_part),
    Shape("input.content", "texts in a list", "text parts", contents.strings_of_item),
    Shape("input.content.type", *_PART_TYPE, contents.part_type("text")),
    Shape("input.output.type", *_PART_TYPE, contents.part_type("text")),
    Shape("input.output.text", *_NO_TEXT, contents.no_text),
    Shape("input.content.text", *_NO_TEXT, contents.no_text),
    Shape("tools", *_ONE_TOOL, tools.one_tool),
    Shape("tools", *_TOOLS, tools.response_tools),
    Shape("tools.parameters", *_NO_PARAMETERS, tools.no_parameters),
    Shape("tool_choice", *_NO_CHOICE, tools.no_choice),
    Shape("tool_choice", *_CHOICE, tools.response_choice),
    *_STOPS,
)
"""`/v1/responses`."""

MESSAGES: Final = (
    Shape("messages", "a text", "a user message", contents.user),
    Shape("messages.role", *_ROLE, contents.role),
    Shape("messages", *_FOREIGN, _foreign(foreign_messages.for_messages)),
    Shape("messages.role", "`developer`", "`system`", contents.system_role),
    Shape("messages.content", "calls that Anthropic's servers ran", "removed", contents.without_run_tools),
    Shape("messages.content.input", "null, `[]`, or JSON in a text", "an object", contents.input),
    Shape("messages", *_IDS, call_ids.message_ids),
    Shape("messages.content.content", *_RESULT, contents.result_block),
    Shape("messages.content", "null", '`""`', contents.null("")),
    Shape("messages.content", "a single part", "a list of it", contents.one_part),
    Shape("messages.content", "texts in a list", "text parts", contents.strings),
    Shape("messages.content.type", *_PART_TYPE, contents.part_type("text")),
    Shape("messages.content.type", *_OTHER_TYPE, contents.other_type),
    Shape("messages.content.content.type", *_PART_TYPE, contents.part_type("text")),
    Shape("messages.content.text", *_NO_TEXT, contents.no_text),
    Shape("messages.content.thinking", "null or missing", '`""`', contents.no_reasoning),
    Shape("messages.content.content.text", *_NO_TEXT, contents.no_text),
    Shape("system", "a single block, or texts in a list", "text blocks", contents.system_blocks),
    Shape("system.type", *_PART_TYPE, contents.part_type("text")),
    Shape("system.text", *_NO_TEXT, contents.no_text),
    Shape("tools", *_ONE_TOOL, tools.one_tool),
    Shape("tools", *_TOOLS, tools.message_tools),
    Shape("tools.input_schema", *_NO_PARAMETERS, tools.no_parameters),
    Shape("tool_choice", *_NO_CHOICE, tools.no_choice),
    Shape("tool_choice", *_CHOICE, tools.message_choice),
    *_STOPS,
)
"""`/v1/messages`."""

COMPLETIONS: Final = _STOPS
"""`/v1/completions`."""
