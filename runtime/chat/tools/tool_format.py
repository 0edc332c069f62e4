"""How a model writes the call of a tool.

A format is a few literal texts around names and arguments; `arguments.py` has the ways to write these,
`known_formats.py` the formats of models. Knows texts, not requests; `tool_grammar.py` holds replies to a format, and
`tool_calls.py` reads them back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

from ..grammar import Grammar
from .arguments import JSON, LOOSE_JSON, ArgumentStyle
from .format_texts import Specials, escaped, filled
from .tool_grammar import ToolGrammar

ToolChoice = Literal["auto", "none", "required"]

_NO_ID = "a" * 9
_BARE = ("{", "[")  # what other replies begin with, too
_TAG = re.compile(r"<[^<>]*>")


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
        trigger: the beginning of a call; `{` if a call can only be a reply's beginning.
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

    @cached_property
    def openings(self) -> tuple[str, ...]:
        """What a reply's first call may have before its name: all of it, or what is left from the last tag on, for
        models leave out the tags before.

        >>> ToolFormat("<tool_call>\\n<function=", ">", "</function>\\n</tool_call>", "<tool_call>", "").openings
        ('<tool_call>\\n<function=', '<function=')
        """
        whole = self.open + self.begin
        core = whole[max(whole.rfind("<"), 0) :]
        return (whole,) if core == whole else (whole, core)

    @cached_property
    def later_openings(self) -> tuple[str, ...]:
        """What a later call may have there."""
        core = self.openings[-1]
        return tuple(dict.fromkeys([self.begin, *([core] if self.begin.endswith(core) else []), self.openings[0]]))

    @property
    def has_blank_before_name(self) -> bool:
        """Whether a name may have white space before it: behind a whole tag, or nothing."""
        return not self.begin.strip() or self.begin.endswith((">", "]"))

    @cached_property
    def end_tags(self) -> tuple[str, ...]:
        """The tags that end a call, if it ends with tags alone: models leave out one of several."""
        tags = _TAG.findall(self.end)
        return tuple(tags) if "".join(tags) == "".join(self.end.split()) else ()

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
        if choice == "none":
            if content is not None or not self.is_tagged:
                return content
            return Grammar("lark", f"start: TEXT?\nTEXT: {self._no_trigger()}\n")
        names = [tool.name for tool in tools]
        is_free = choice == "auto" and content is None
        style = LOOSE_JSON if is_free and not self.is_tagged else self.arguments
        rules = ToolGrammar(self, names, self.arguments_rules(tools, style), is_parallel=is_parallel)
        if is_free:
            return rules.or_text()
        return rules.required() if content is None or choice == "required" else rules.or_content(content)

    def length_of_arguments(self, tool: Tool) -> int:
        """The characters that the arguments of a tool take in a grammar, or a few more."""
        [(_, rules)] = self.arguments_rules([tool])
        return sum(len(rule) + 2 * rule.lower().count("arguments_0") + 1 for rule in rules)

    def arguments_rules(
        self, tools: Sequence[Tool], style: ArgumentStyle | None = None
    ) -> Iterator[tuple[str, list[str]]]:
        """For each tool the rule of its arguments, by name, and rules that are not there yet: those of one and the same
        schema are shared.

        Args:
            style: how they are written; None: as the format has it.
        """
        style = style or self.arguments
        names: dict[tuple[int, bool], str] = {}
        for number, tool in enumerate(tools):
            own = f"arguments_{number}"
            name = names.setdefault((id(tool.parameters), tool.is_strict), own)
            rules = partial(style.rules, own, tool.parameters, specials=self.specials)
            yield name, rules(is_strict=tool.is_strict) if name == own else []

    def _no_trigger(self) -> str:
        """A regular expression for text that begins no call."""
        if self.trigger in dict(self.specials):
            return "/(.|\\n)+/"  # it has no special tokens at all
        return f"/(.|\\n)+/ & ~/(.|\\n)*{escaped(self.trigger)}(.|\\n)*/"


def tool_at(grammar: Grammar, line: int) -> int | None:
    """The place of the tool that a line of `ToolFormat.grammar` describes, from 0; None if it describes none."""
    found = re.match(r"arguments_(\d+)(_\w+)?(\[lazy\])?: ", grammar.text.split("\n")[line - 1], re.IGNORECASE)
    return None if found is None else int(found[1])
