"""The formats in which models write tool calls.

A format is a few literal texts around names and arguments; replies of gpt-oss have parts with headers, too.
`arguments.py` has the styles of arguments, `known_formats.py` the formats of models. Knows texts, not requests;
`tool_grammar.py` constrains replies to a format, and `tool_calls.py` parses them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final, Literal, cast

from ...errors import InvalidArgument
from ..grammar import OVER, Grammar
from .arguments import JSON, LOOSE_JSON, ArgumentStyle
from .format_texts import BLANK, Rules, Specials, escaped, filled, quoted
from .tool_grammar import ToolGrammar, content_expression

ToolChoice = Literal["auto", "none", "required"]

_NO_ID = "a" * 9
_BARE = ("{", "[")  # other replies begin with these, too
_TAG = re.compile(r"<[^<>]*>")
_RECIPIENT: Final = re.compile(r" to=functions\.([a-zA-Z0-9_.-]+)")
_PART_END: Final = "<|end|><|start|>assistant"


@dataclass(frozen=True)
class Tool:
    """A function that a model can call. `is_strict`: a schema that cannot be enforced completely is refused."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema
    description: str | None = None
    is_strict: bool = False

    def for_template(self) -> dict[str, object]:
        """Return the tool in the form that chat templates expect."""
        function: dict[str, object] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": self.parameters}}


AnyTool = Tool | Mapping[str, Any]
"""A tool, or one as OpenAI's clients write it: `{"type": "function", "function": {"name": ...}}`."""


def tools_of(tools: Sequence[AnyTool]) -> tuple[Tool, ...]:
    """Return tools as `Tool`s.

    Raises:
        InvalidArgument: they are no list, or one is no tool.

    >>> tools_of([{"type": "function", "function": {"name": "now"}}])
    (Tool(name='now', parameters={'type': 'object', 'properties': {}}, description=None, is_strict=False),)
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise InvalidArgument(f"tools is {tools!r:.60}; it must be a list of Tool", param="tools")
    return tuple(each if isinstance(each, Tool) else _parse_tool(each) for each in tools)


@dataclass(frozen=True)
class ToolFormat:
    """The texts of a reply that calls tools::

        open  begin NAME middle ARGUMENTS end  separator  begin NAME middle ARGUMENTS end  close

    Hermes' `begin` is `<tool_call>\\n{"name": "`, its `middle` is `", "arguments": `, and its `end` `}\\n</tool_call>`.
    `begin`, `middle` and `end` can have slots, which are letters and digits: `{index}`, the number of the call from 0,
    and, not in `begin`, `{id}`, which the model makes up.

    Args:
        trigger: the beginning of a call; `{` if a call can only be at a reply's beginning.
        separator: between two calls; None: a reply has one call at most.
        is_native: the template renders tools and calls itself.
        is_content: the template renders tools itself, but calls only as part of a message's content.
        specials: the special tokens of the model that the format writes.
        id_text: the id of a call that the template may write unchanged, with the slots `{name}` and `{number}`, which
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
        """All texts that the format writes: special tokens in them are text of the reply."""
        return self.open + self.begin + self.middle + self.arguments.texts + self.end + self.close

    @property
    def is_tagged(self) -> bool:
        """Return whether text can precede a call, because no text looks like one."""
        return self.trigger not in _BARE

    @property
    def writes_ids(self) -> bool:
        """Return whether a call has an id that the model writes."""
        return "{id}" in self.middle + self.end

    @cached_property
    def openings(self) -> tuple[str, ...]:
        """The possible texts of a reply's first call before its name.

        All of it, or the rest from the last tag on, because models leave out the tags before.

        >>> ToolFormat("<tool_call>\\n<function=", ">", "</function>\\n</tool_call>", "<tool_call>", "").openings
        ('<tool_call>\\n<function=', '<function=')
        """
        whole = self.open + self.begin
        core = whole[max(whole.rfind("<"), 0) :]
        return (whole,) if core == whole else (whole, core)

    @cached_property
    def later_openings(self) -> tuple[str, ...]:
        """The possible texts of a later call before its name."""
        core = self.openings[-1]
        return tuple(dict.fromkeys([self.begin, *([core] if self.begin.endswith(core) else []), self.openings[0]]))

    @property
    def has_blank_before_name(self) -> bool:
        """Return whether a name can have white space before it: after a whole tag, or nothing."""
        return not self.begin.strip() or self.begin.endswith((">", "]"))

    @cached_property
    def end_tags(self) -> tuple[str, ...]:
        """The tags that end a call, if it ends with tags only: models leave out one of several."""
        tags = _TAG.findall(self.end)
        return tuple(tags) if "".join(tags) == "".join(self.end.split()) else ()

    def of_model(self, special_ids: Mapping[str, int]) -> ToolFormat:
        """Return the format for a model, with those of its special tokens that the format's texts contain.

        Args:
            special_ids: ids of the model's special tokens, by their text.
        """
        specials = tuple((text, token_id) for text, token_id in special_ids.items() if text in self.texts)
        return replace(self, specials=specials) if specials else self

    def head(self, name: str, index: int = 0, call_id: str = _NO_ID) -> str:
        """Return the part of a call before its arguments."""
        lead = (self.open if index == 0 else "") + filled(self.begin, index, call_id)
        return lead + name + filled(self.middle, index, call_id)

    def head_in(self, header: str) -> str | None:
        """Return the head of the call that a part with this header makes; None if there is none, or no headers."""
        return None

    def tail(self, index: int = 0, call_id: str = _NO_ID) -> str:
        """Return the part of a call after its arguments."""
        return filled(self.end, index, call_id)

    def text_of(self, calls: Sequence[tuple[str, str]], ids: Sequence[str] = ()) -> str:
        """Return one text with all calls, as the model would write them.

        Args:
            calls: of each, the name and the arguments as JSON.
            ids: of the calls; empty: a made-up id.
        """
        texts = []
        for index, (name, arguments) in enumerate(calls):
            call_id = ids[index] if ids else _NO_ID
            head, tail = self.head(name, index, call_id), self.tail(index, call_id)
            texts.append(head + self.arguments.written(arguments) + tail)
        return ("\n" if self.separator is None else self.separator).join(texts) + self.close

    def grammar(
        self, tools: Sequence[AnyTool], choice: ToolChoice, *, is_parallel: bool = True, content: Grammar | None = None
    ) -> Grammar | None:
        """Return the grammar that a reply must follow; None for any text.

        Args:
            tools: the tools that can be called.
            choice: whether the reply can, must not, or must call one.
            is_parallel: whether it can have several calls.
            content: a JSON schema for replies without calls; None: any text.

        Raises:
            InvalidGrammar: `content` is not a JSON object, or the grammar is too long.
        """
        if choice == "none":
            if content is not None or not self.is_tagged:
                return content
            return Grammar("lark", f"start: TEXT?\nTEXT: {self._no_call_expression()}\n")
        known = tools_of(tools)
        names = [tool.name for tool in known]
        is_free = choice == "auto" and content is None
        style = LOOSE_JSON if is_free and not self.is_tagged else self.arguments
        rules = ToolGrammar(self, names, self.arguments_rules(known, style), is_parallel=is_parallel)
        if is_free:
            return rules.or_text()
        return rules.required() if content is None or choice == "required" else rules.or_content(content)

    def length_of_arguments(self, tool: Tool) -> int:
        """Return the number of characters that the rules of a tool's arguments take in a grammar, or a few more."""
        [(_, rules)] = self.arguments_rules([tool])
        return sum(len(rule) + 2 * rule.lower().count("arguments_0") + 1 for rule in rules)

    def arguments_rules(
        self, tools: Sequence[Tool], style: ArgumentStyle | None = None
    ) -> Iterator[tuple[str, list[str]]]:
        """Yield for each tool the name of the rule for its arguments, and the whole rules to add to the grammar.

        Tools with the same schema object share a rule: only the first of them has rules to add.

        Args:
            style: the style of arguments; None: the format's own.
        """
        style = style or self.arguments
        names: dict[tuple[int, bool], str] = {}
        for number, tool in enumerate(tools):
            own = f"arguments_{number}"
            name = names.setdefault((id(tool.parameters), tool.is_strict), own)
            rules = partial(style.rules, own, tool.parameters, specials=self.specials)
            yield name, rules(is_strict=tool.is_strict) if name == own else []

    def _no_call_expression(self) -> str:
        """Return the right side of a grammar's terminal for a text without the beginning of a call."""
        if self.trigger in dict(self.specials):
            return "/(.|\\n)+/"  # the text has no special tokens at all
        return f"/(.|\\n)+/ & ~/(.|\\n)*{escaped(self.trigger)}(.|\\n)*/"


@dataclass(frozen=True)
class HeadedFormat(ToolFormat):
    """A format whose grammars cover whole replies, reasoning included. The begin of a call can also follow the name
    of its channel::

        <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.now <|constrain|>
        json<|message|>{}
    """

    @property
    def texts(self) -> str:
        """All texts that the format writes; see `ToolFormat.texts`."""
        return super().texts + _PART_END + "<|constrain|><|channel|><|message|>"

    def head_in(self, header: str) -> str | None:
        """Return the head of the call that a part with this header makes, as the template writes it; None if none."""
        found = _RECIPIENT.search(header)
        return None if found is None else self.head(found[1])

    def grammar(
        self, tools: Sequence[AnyTool], choice: ToolChoice, *, is_parallel: bool = True, content: Grammar | None = None
    ) -> Grammar | None:
        """Return the grammar of a whole reply: parts with headers, reasoning included, then an answer or a call.

        A part that calls an unknown function is text. Never None; for the arguments see `ToolFormat.grammar`.
        """
        functions = tools_of(tools)
        start = {"none": "final", "required": "call tail", "auto": "(final | unknown | call tail)"}[choice]
        end, message = quoted(_PART_END, self.specials), quoted("<|message|>", self.specials)
        rules = Rules(
            [
                f"start: part* {start}",
                f"part: ({self._part('analysis')} | {self._part('commentary')}) TEXT? {end}",
                f"final: {self._part('final')} {'TEXT?' if content is None else content_expression(content)}",
                "TEXT: /(.|\\n)+/",
            ]
        )
        if choice != "none":
            kind = f'(" "? {quoted("<|constrain|>", self.specials)} "json" | " json")? {message}'
            rules.add([f"channel: {quoted('<|channel|>commentary', self.specials)}", f"kind: {kind}"])
            rules.add(["call: " + " | ".join(f"call_{number}" for number in range(len(functions)))])
            rules.add([f"tail: /{BLANK}/? | {OVER} TEXT?", f"{OVER}[capture, lazy]: TEXT & ~/{BLANK}/"])
            for number, (tool, (own, more)) in enumerate(zip(functions, self.arguments_rules(functions), strict=True)):
                name = f"to_{number}"
                rules.add([f"{name}: {quoted(self.begin + tool.name)}"])
                rules.add([f"call_{number}: ({name} channel | channel {name}) kind {own}", *more])
        if choice == "auto":
            known = "|".join(escaped(tool.name) for tool in functions)
            rules.add(
                [
                    f"unknown: (RECIPIENT channel | channel RECIPIENT) (WORDS? {message}) TEXT?",
                    "WORDS: /[^\\n]{1,32}/",
                    f"RECIPIENT: / to=[^\\n]{{1,200}}/ & ~/{escaped(self.begin)}({known})( [^\\n]*)?/",
                ]
            )
        return Grammar("lark", "\n".join(rules) + "\n", holds_reasoning=True)

    def _part(self, channel: str) -> str:
        return quoted(f"<|channel|>{channel}<|message|>", self.specials)


def tool_at(grammar: Grammar, line: int) -> int | None:
    """Return the index of the tool whose arguments a line of `ToolFormat.grammar` describes; None if it describes none.

    Args:
        line: its number, from 1.
    """
    found = re.match(r"arguments_(\d+)(_\w+)?(\[lazy\])?: ", grammar.text.split("\n")[line - 1], re.IGNORECASE)
    return None if found is None else int(found[1])


def _parse_tool(tool: object) -> Tool:
    """Return a tool in OpenAI's form as a `Tool`.

    Raises:
        InvalidArgument: it has another form.
    """
    match tool:
        case {"type": "function", "function": {"name": str() as name, **about}}:
            parameters = cast("Mapping[str, Any]", about.get("parameters") or {"type": "object", "properties": {}})
            return Tool(name, parameters, cast("str | None", about.get("description")), bool(about.get("strict")))
    wanted = 'Tool, or {"type": "function", "function": {"name": ..., "parameters": ...}}'
    raise InvalidArgument(f"tools has {tool!r:.60}; it must be {wanted}", param="tools")
