"""How a model writes the call of a tool, recognised by its chat template.

A format is a few literal texts around the arguments. Knows texts and grammars, not requests; `tool_calls.py` reads
replies back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import InvalidRequest
from ..chat_template import ChatTemplate
from ..grammar import Grammar

ToolChoice = Literal["auto", "none", "required"]
MAX_CALLS = 64  # of one reply

# The white space that templates write when they render a call of an earlier turn: a call that is made in it stands in
# the next prompt as it was said, and its KV is reused.
_AS_TEMPLATES_WRITE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Tool:
    """A function that a model may ask for. `is_strict`: a schema that cannot be enforced whole is refused."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema
    description: str | None = None
    is_strict: bool = False

    def for_template(self) -> dict[str, object]:
        """The tool as chat templates know it."""
        function: dict[str, object] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": self.parameters}}


@dataclass(frozen=True)
class ToolFormat:
    """The texts around a call's arguments, which are a JSON object::

        begin {"name": "get_weather", "<arguments_key>": {"city": "Paris"}} end

    Args:
        trigger: the beginning of a call. No other text of a reply contains it; if it is `{`, none begins with it.
        separator: between two calls; None: a reply has one call at most.
        is_native: the template renders tools and calls itself.
    """

    begin: str
    arguments_key: str
    end: str
    trigger: str
    separator: str | None
    is_native: bool = True

    def head(self, name: str) -> str:
        """All of a call before its arguments."""
        return f'{self.begin}{{"name": {json.dumps(name)}, "{self.arguments_key}": '

    @property
    def tail(self) -> str:
        """All of a call behind its arguments."""
        return "}" + self.end

    @property
    def is_tagged(self) -> bool:
        """True if text may stand before a call, because no text looks like one."""
        return self.trigger != "{"

    def text_of(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, each a name and its arguments as JSON, as the model would write them."""
        texts = [self.head(name) + arguments + self.tail for name, arguments in calls]
        return ("\n" if self.separator is None else self.separator).join(texts)

    def grammar(
        self, tools: Sequence[Tool], choice: ToolChoice, *, is_parallel: bool = True, content: Grammar | None = None
    ) -> Grammar | None:
        """What a reply must keep to; None for any text.

        Args:
            tools: of which those that are called are.
            content: a JSON schema for replies that are no call; None: any text.

        Raises:
            InvalidGrammar: `content` is not a JSON object, or all of them together are too long.
        """
        rules: list[str] = []
        text = self._content_rules(content)
        if choice == "none":
            if content is not None or not self.is_tagged:
                return content
            return Grammar("lark", f"start: TEXT?\nTEXT: /(.|\\n)+/ & ~/(.|\\n)*{_escaped(self.trigger)}(.|\\n)*/\n")
        bodies = " | ".join(f"call_{number}" for number in range(len(tools)))
        more = ""
        if is_parallel and self.separator is not None:
            more = f"({_quoted(self.separator + self.trigger)} call){{0,{MAX_CALLS - 1}}}"
        first = _quoted(self.trigger)
        if choice == "auto":
            rules.append("start: calls | content")
            if self.is_tagged and content is None:
                first = "said"
                rules.append(f"said[lazy]: TEXT {_quoted(self.trigger)}")
            rules += text
        else:
            rules.append("start: calls")
        rules += [f"calls: {first} call {more}", f"call: {bodies}"]
        for number, tool in enumerate(tools):
            rules.append(f"call_{number}: {self._head_rule(tool.name)} arguments_{number} {_quoted(self.tail)}")
            rules.append(f"arguments_{number}: %json {_json_schema(tool)}")
        return Grammar("lark", "\n".join(rules) + "\n")

    def _head_rule(self, name: str) -> str:
        """The text between the trigger and the arguments, cut as the library cuts JSON.

        The library takes the longest lexeme. If the head were one, a reply that begins with `{"name": ` could only be a
        call.
        """
        opening = f"{self.begin}{{".removeprefix(self.trigger)
        lexemes = [opening, '"name"', ": ", json.dumps(name), ", ", json.dumps(self.arguments_key), ": "]
        return " ".join(_quoted(lexeme) for lexeme in lexemes if lexeme)

    def _content_rules(self, content: Grammar | None) -> list[str]:
        if content is not None:
            # Where a call begins as JSON does, white space that JSON may have behind its `{` would be allowed in the
            # call as well, and it would not be recognised.
            schema = _with_options(content.schema(), is_strict=content.is_strict, **_AS_TEMPLATES_WRITE)
            return [f"content: %json {schema}"]
        if self.is_tagged:
            return ["content: TEXT", "TEXT: /(.|\\n)*/"]
        return ["content: TEXT?", "TEXT: /[^{](.|\\n)*/"]


HERMES = ToolFormat("<tool_call>\n", "arguments", "\n</tool_call>", "<tool_call>", "\n")
"""Hermes 2 Pro's and Qwen's."""

LLAMA3 = ToolFormat("", "parameters", "", "{", None)
"""Llama 3.1's JSON, of which a reply has one."""

PLAIN = ToolFormat("", "arguments", "", "{", "\n", is_native=False)
"""Ours, for templates without tools, or with a format that is unknown here."""


def format_of(template: ChatTemplate) -> ToolFormat:
    """The format of the model with this chat template: the one that the template renders earlier calls in.

    >>> format_of(ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}")) is PLAIN
    True
    """
    function = {"name": "xyzzy", "arguments": {"plugh": 1}}
    messages: list[Mapping[str, object]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "b", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "b", "name": "xyzzy", "content": "c"},
    ]
    tool = Tool("quux", {"type": "object", "properties": {}}, description="d")
    try:
        rendered = template.render(messages, tools=[tool.for_template()])
    except InvalidRequest:
        return PLAIN
    knows_tools = tool.name in rendered
    for format in (HERMES, LLAMA3):
        if knows_tools and format.text_of([("xyzzy", '{"plugh": 1}')]) in rendered:
            return format
    return PLAIN


def tool_at(grammar: Grammar, line: int) -> int | None:
    """The place of the tool that a line of `ToolFormat.grammar` describes, from 0; None if it describes none."""
    found = re.match(r"arguments_(\d+): ", grammar.text.split("\n")[line - 1])
    return None if found is None else int(found[1])


def _json_schema(tool: Tool) -> str:
    """The schema of a tool's arguments, which are always an object."""
    return _with_options({"type": "object", **tool.parameters}, is_strict=tool.is_strict, **_AS_TEMPLATES_WRITE)


def _with_options(schema: dict[str, Any], *, is_strict: bool, **options: object) -> str:
    options |= {"lenient": not is_strict, "coerce_one_of": not is_strict}
    return json.dumps(schema | {"x-guidance": options}, separators=(",", ":"))


def _quoted(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """A text in a regular expression in Lark."""
    return "".join(char if char.isalnum() or char in "_<> " else f"\\{char}" for char in text)
