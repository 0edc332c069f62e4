"""The formats of models, and which of them a chat template writes.

A format is recognised by what the template makes of a call, not by the model's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ...errors import InvalidRequest
from ..chat_template import ChatTemplate
from .tool_format import Tool, ToolFormat

HERMES: Final = ToolFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "<tool_call>", "\n")
"""Hermes 2 Pro's, Qwen's and Granite 4's."""

LLAMA3: Final = ToolFormat('{"name": "', '", "parameters": ', "}", "{", None)
"""Llama 3.1's JSON, of which a reply has one."""

PLAIN: Final = ToolFormat('{"name": "', '", "arguments": ', "}", "{", "\n", is_native=False)
"""Ours, for templates without tools, or with a format that is unknown here."""

KNOWN: Final = (HERMES, replace(HERMES, separator=""), LLAMA3)

_ID = "abcdefgh0"  # Mistral's templates want nine letters and digits
_ARGUMENTS = '{"fred": true, "plugh": 1, "waldo": "x y"}'


def format_of(template: ChatTemplate) -> ToolFormat:
    """The format of the model with this chat template: the one that the template renders earlier calls in.

    >>> format_of(ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}")) is PLAIN
    True
    """
    one, two = _rendered(template, 1), _rendered(template, 2)
    for num_calls, rendered in ((2, two), (1, one)):
        for format in KNOWN if rendered is not None else ():
            text = format.text_of([("xyzzy", _ARGUMENTS), ("corge", "{}")][:num_calls], [_ID, _ID])
            if text in str(rendered) and (num_calls == 2) <= (format.separator is not None):
                return format
    return PLAIN


def _rendered(template: ChatTemplate, num_calls: int) -> str | None:
    """A conversation with calls; None if the template takes none, or does not tell of tools."""
    values: list[tuple[str, dict[str, object]]] = [("xyzzy", {"fred": True, "plugh": 1, "waldo": "x y"}), ("corge", {})]
    calls = [
        {"id": _ID, "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in values[:num_calls]
    ]
    results = [{"role": "tool", "tool_call_id": _ID, "name": name, "content": "c"} for name, _ in values[:num_calls]]
    messages: list[Mapping[str, object]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *results,
    ]
    tool = Tool("quux", {"type": "object", "properties": {}}, description="d")
    try:
        rendered = template.render(messages, tools=[tool.for_template()])
    except InvalidRequest:
        return None
    return rendered if tool.name in rendered else None
