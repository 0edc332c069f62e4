"""How a model writes the call of a tool.

A format is a few literal texts around names and arguments; `arguments.py` has the ways to write these,
`known_formats.py` the formats of models. Knows texts and grammars, not requests; `tool_calls.py` reads replies back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from ..grammar import Grammar
from .arguments import JSON, ArgumentStyle
from .lark import AS_TEMPLATES_WRITE, Rules, Specials, escaped, quoted, with_options
from .slots import cut_at_slots, filled

ToolChoice = Literal["auto", "none", "required"]
MAX_CALLS = 64  # of one reply

_NO_ID = "a" * 9
_BARE = ("{", "[")  # what other replies begin with, too


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
    """The texts of a reply that calls tools::

        open  begin NAME middle ARGUMENTS end  separator  begin NAME middle ARGUMENTS end  close

    Hermes' `begin` is `<tool_call>\\n{"name": "`, its `middle` is `", "arguments": `, and its `end` `}\\n</tool_call>`.
    `begin`, `middle` and `end` may have slots, which are letters and digits: `{index}`, the number of the call from 0,
    and, not in `begin`, `{id}`, which the model thinks of.

    Args:
        trigger: the beginning of a call. No other text of a reply contains it; if it is `{`, none begins with it.
        separator: between two calls; None: a reply has one call at most.
        is_native: the template renders tools and calls itself.
        is_content: the template renders tools itself, and of calls what stands in a message's content.
        specials: the special tokens of the model that the format writes.
        id_text: the id of a call that the template may write as it is, with the slots `{name}` and `{number}`, which
            counts the calls of the conversation; empty: ids are in no prompt, or are `{id}`.
    """

    begin: str
    middle: str
    end: str
    trigger: str
    separator: str | None
    arguments: ArgumentStyle = JSON
    open: str = ""
    close: str = ""
    is_native: bool = True
    is_content: bool = False
    specials: Specials = ()
    id_text: str = ""

    @property
    def texts(self) -> str:
        """All that the format writes: special tokens in it are text of the reply."""
        return self.open + self.begin + self.middle + self.arguments.texts + self.end + self.close

    @property
    def is_tagged(self) -> bool:
        """True if text may stand before a call, because no text looks like one."""
        return self.trigger not in _BARE

    @property
    def writes_ids(self) -> bool:
        """Whether a call has an id that the model writes."""
        return "{id}" in self.middle + self.end

    def of_model(self, special_ids: Mapping[str, int]) -> ToolFormat:
        """The format where some of its texts are special tokens; itself where none is."""
        specials = tuple((text, token_id) for text, token_id in special_ids.items() if text in self.texts)
        return replace(self, specials=specials) if specials else self

    def head(self, name: str, index: int = 0, call_id: str = _NO_ID) -> str:
        """All of a call before its arguments."""
        lead = (self.open if index == 0 else "") + filled(self.begin, index, call_id)
        return lead + name + filled(self.middle, index, call_id)

    def tail(self, index: int = 0, call_id: str = _NO_ID) -> str:
        """All of a call behind its arguments."""
        return filled(self.end, index, call_id)

    def text_of(self, calls: Sequence[tuple[str, str]], ids: Sequence[str] = ()) -> str:
        """Calls, each a name and its arguments as JSON, as the model would write them."""
        texts = []
        for index, (name, arguments) in enumerate(calls):
            call_id = ids[index] if ids else _NO_ID
            head, tail = self.head(name, index, call_id), self.tail(index, call_id)
            texts.append(head + self.arguments.written(arguments) + tail)
        return ("\n" if self.separator is None else self.separator).join(texts) + self.close

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
        text = self._content_rules(content)
        if choice == "none":
            if content is not None or not self.is_tagged:
                return content
            return Grammar("lark", f"start: TEXT?\nTEXT: {self._no_trigger()}\n")
        first = quoted(self.trigger, self.specials)
        if choice == "auto":
            rules = Rules(["start: calls | content"])
            if self.is_tagged and content is None:
                rules.add([f"said: TEXT? {first}" if self._has_special_trigger else f"said[lazy]: TEXT {first}"])
                first = "said"
            rules.add(text)
        else:
            rules = Rules(["start: calls"])
        calls = "call: " + " | ".join(f"call_{number}" for number in range(len(tools)))
        rules.add([self._calls_rule(first, is_parallel=is_parallel), calls])
        end, arguments = self._slotted(self.end), self._arguments_rules(tools)
        for number, (tool, (own, more)) in enumerate(zip(tools, arguments, strict=True)):
            rules.add([f"call_{number}: {self._head_rule(tool.name)} {own} {end}".rstrip(), *more])
        return Grammar("lark", "\n".join(rules) + "\n")

    def length_of_arguments(self, tool: Tool) -> int:
        """The characters that the arguments of a tool take in a grammar, or a few more."""
        [(_, rules)] = self._arguments_rules([tool])
        return sum(len(rule) + 2 * rule.lower().count("arguments_0") + 1 for rule in rules)

    def _arguments_rules(self, tools: Sequence[Tool]) -> Iterator[tuple[str, list[str]]]:
        """For each tool the rule of its arguments, by name, and rules that are not there yet: those of one and the same
        schema are shared.
        """
        names: dict[tuple[int, bool], str] = {}
        for number, tool in enumerate(tools):
            own = f"arguments_{number}"
            name = names.setdefault((id(tool.parameters), tool.is_strict), own)
            rules = partial(self.arguments.rules, own, tool.parameters, specials=self.specials)
            yield name, rules(is_strict=tool.is_strict) if name == own else []

    @property
    def _has_special_trigger(self) -> bool:
        return self.trigger in dict(self.specials)

    def _no_trigger(self) -> str:
        """A regular expression for text that begins no call."""
        if self._has_special_trigger:
            return "/(.|\\n)+/"  # it has no special tokens at all
        return f"/(.|\\n)+/ & ~/(.|\\n)*{escaped(self.trigger)}(.|\\n)*/"

    def _calls_rule(self, first: str, *, is_parallel: bool) -> str:
        """All calls of a reply, the first of which begins with what the rule `first` has."""
        opening = self._quoted(self.open.removeprefix(self.trigger))
        again = "" if self.open else self.trigger
        more = ""
        if is_parallel and self.separator is not None:
            between = self._quoted(self.separator + again)
            more = f"({between} call){{0,{MAX_CALLS - 1}}}".replace("( ", "(")
        return " ".join(part for part in ("calls:", first, opening, "call", more, self._quoted(self.close)) if part)

    def _head_rule(self, name: str) -> str:
        """The text between the trigger and the arguments, cut as the library cuts JSON.

        The library takes the longest lexeme. If the head were one, a reply that begins with `{"name": ` could only be a
        call.
        """
        begin = self.begin if self.open else self.begin.removeprefix(self.trigger)
        if self.arguments is not JSON:
            return self._slotted(begin + name + self.middle)
        text = begin + name + self.middle
        pieces = re.findall(r'"[^"]*"|[^"]+', text)
        return " ".join(self._slotted(piece) for piece in pieces)

    def _slotted(self, text: str) -> str:
        rules = [(self._quoted(piece), f"/{slot}/" if slot else "") for piece, slot in cut_at_slots(text)]
        return " ".join(rule for pair in rules for rule in pair if rule)

    def _quoted(self, text: str) -> str:
        return quoted(text, self.specials) if text else ""

    def _content_rules(self, content: Grammar | None) -> list[str]:
        if content is not None:
            # Where a call begins as JSON does, white space that JSON may have behind its `{` would be allowed in the
            # call as well, and it would not be recognised.
            schema = with_options(content.schema(), is_strict=content.is_strict, **AS_TEMPLATES_WRITE)
            return [f"content: %json {schema}"]
        if self.is_tagged:
            return (
                ["content: TEXT?", "TEXT: /(.|\\n)+/"]
                if self._has_special_trigger
                else ["content: TEXT", "TEXT: /(.|\\n)*/"]
            )
        return ["content: TEXT?", f"TEXT: /[^{escaped(self.trigger)}](.|\\n)*/"]


def tool_at(grammar: Grammar, line: int) -> int | None:
    """The place of the tool that a line of `ToolFormat.grammar` describes, from 0; None if it describes none."""
    found = re.match(r"arguments_(\d+)(_\w+)?(\[lazy\])?: ", grammar.text.split("\n")[line - 1], re.IGNORECASE)
    return None if found is None else int(found[1])
