"""Arguments between tags, as written by Qwen's coders, GLM and MiniMax.

A string is written without quotes; other values are JSON, and the schema tells which. Knows one call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..scan import overlap
from .arguments import MAX_EXTRAS, ArgumentsReader, Schema, StepReader
from .format_texts import Rules, Specials, json_expression, lexeme_rule, loose, loose_after_white, match_pieces, quoted
from .raw_text import text_rules
from .schema_types import (
    ANY,
    ELSEWHERE,
    STRING,
    Types,
    as_json,
    cut_as_json,
    extra_properties,
    follow_reference,
    standalone,
    string,
    types_of,
    types_of_property,
)

_PYTHON: Final = {True: "True", False: "False", None: "None"}


@dataclass(frozen=True)
class TaggedArguments:
    """The texts around an argument: `open KEY between VALUE close`.

    Args:
        before_string: replaces `between` if the value is a string.
        is_python: the template writes `True`, `False` and `None` for JSON's words.
    """

    open: str
    between: str
    close: str
    before_string: str | None = None
    is_python: bool = False
    opener: str = "<"  # begins an argument, or the end of the call

    @property
    def texts(self) -> str:
        return self.open + self.between + self.close + (self.before_string or "")

    def written(self, arguments: str) -> str:
        return "".join(self._write_argument(key, value) for key, value in json.loads(arguments).items())

    def reader(self, schema: Schema, ends: Sequence[str] = ()) -> ArgumentsReader:
        return _TaggedReader(self, schema, [self.open, *ends])

    def enforces(self, schema: Schema) -> bool:
        return ELSEWHERE.isdisjoint(schema)

    def rules(self, name: str, schema: Schema, *, is_strict: bool, specials: Specials) -> list[str]:
        return _TaggedRules(self, schema, is_strict, specials).rules(name)

    def _write_argument(self, key: str, value: object) -> str:
        """Return an argument as the template writes it: between tags, strings without quotes, other values as JSON."""
        if isinstance(value, str):
            between = self.between if self.before_string is None else self.before_string
            return f"{self.open}{key}{between}{value}{self.close}"
        is_word = self.is_python and (value is None or isinstance(value, bool))
        written = _PYTHON[value] if is_word else json.dumps(value, ensure_ascii=False)  # type: ignore[index]
        return f"{self.open}{key}{self.between}{written}{self.close}"


class _TaggedReader(StepReader):
    """Converts one call's arguments to JSON.

    A value ends at its tag if the next argument or the end of the call follows, after white space. So a
    value can contain such a tag itself, and nothing is lost if the model leaves out the line feed before its tag. Of
    repeated arguments only the first is used, because clients of a stream already have it.

    Args:
        followers: texts that can follow an argument.
    """

    def __init__(self, style: TaggedArguments, schema: Schema, followers: Sequence[str]) -> None:
        super().__init__()
        self._style, self._schema = style, schema
        self._followers = [loose_after_white(follower) for follower in followers]
        self._close = style.close.strip()
        self._line = style.close[: style.close.index(self._close)]  # before the tag, as the template writes it
        self._read = self._read_boundary
        self._before = "{"  # JSON before the next argument
        self._types, self._seen = ANY, dict[int, Types]()
        self._keys, self._is_known = set[str](), False  # arguments so far; whether the current one is repeated

    def finish(self) -> str:
        """Return the JSON of the text that is held back at the end of a reply, without a partial tag.

        Incomplete arguments stay so: strings and the object are not closed.
        """
        held, self.rest = self.rest, ""
        if self._read == self._read_value:
            if self._is_known:
                return ""
            value = held[: self._end_of_value(held, is_cut=True)[0]]
            return string(value)[1:-1] if self._types == STRING else cut_as_json(value, self._types) if value else ""
        if self._read != self._read_key:
            return ""
        key = _without_cut(_without_cut(held, self._style.between), self._style.before_string or "")
        return self._before + string(key)[:-1] if key else ""

    # Each reads as much of `held` as it can. Returns its JSON and the number of characters read: 0 if it needs more.

    def _next(self, held: str) -> tuple[str, int]:
        return self._read(held)

    def _read_boundary(self, held: str) -> tuple[str, int]:
        """Read the tag before an argument's name, or find that none follows; return JSON and the characters read.

        For a tag there is no JSON, and 0 characters if it is incomplete. Other text completes the arguments: return
        their closing brace, or `{}`, and 0.
        """
        found = match_pieces(held, loose_after_white(self._style.open))
        if found is not None:
            if found.is_whole:
                self._read = self._read_key
            return "", found.length if found.is_whole else 0
        self.is_whole = True
        return ("{}" if self._before == "{" else "}"), 0

    def _read_key(self, held: str) -> tuple[str, int]:
        """Read an argument's name and the text before its value; return their JSON and the number of characters read.

        The JSON begins with a brace or comma, and ends with the quote of a string. It is empty for a repeated argument.
        0 characters if more text is needed.
        """
        marks = [mark for mark in (self._style.between, self._style.before_string) if mark is not None]
        found = [(held.find(loose(mark)[0].text), mark) for mark in marks]
        lengths = [(at, mark, _mark_length(mark, held[at:])) for at, mark in found if at >= 0]
        at, mark, length = next((each for each in lengths if each[2]), (0, "", 0))
        if not length:
            return "", 0
        key = held[:at]
        if self._style.before_string is not None:
            self._types = STRING if mark == self._style.before_string else ANY - STRING
        else:
            self._types = types_of_property(key, self._schema, self._schema, self._seen) or ANY
        self._is_known, self._read = key in self._keys, self._read_value
        if self._is_known:
            return "", at + length
        self._keys.add(key)
        before, self._before = self._before, ", "
        return f"{before}{string(key)}: " + ('"' if self._types == STRING else ""), at + length

    def _read_value(self, held: str) -> tuple[str, int]:
        """Read a value, and its tag if that is complete; return the value's JSON, and the number of characters read.

        A string is read piece by piece, any other value once its tag is complete. 0 characters if more text is needed.
        The JSON of a repeated argument is empty.
        """
        end, length = self._end_of_value(held)
        if length:
            self._read = self._read_boundary
            if self._is_known:
                return "", end + length
            value = string(held[:end])[1:] if self._types == STRING else as_json(held[:end], self._types)
            return value, end + length
        if self._types != STRING:
            return "", 0
        return "" if self._is_known else string(held[:end])[1:-1], end

    def _end_of_value(self, held: str, *, is_cut: bool = False) -> tuple[int, int]:
        """Return how many characters of `held` certainly belong to the value, and the length of its closing tag.

        The length includes a line feed before the tag. It is 0 if no tag is known to end the value yet.

        Args:
            is_cut: no more text comes.
        """
        at = held.find(self._close)
        while at >= 0:
            behind = at + len(self._close)
            found = [
                each
                for each in (match_pieces(held, follower, behind) for follower in self._followers)
                if each is not None
            ]
            is_over = any(each.is_whole for each in found)
            if found:
                end = at - len(self._line) if self._line and held.endswith(self._line, 0, at) else at
                return end, behind - end if is_over or is_cut else 0
            at = held.find(self._close, behind)
        end = len(held) - overlap(held, self._close)
        return (end - overlap(held[:end], self._line) if self._line else end), 0


@dataclass(frozen=True)
class _TaggedRules:
    """A grammar for the arguments of one tool: the required ones in the order of its schema, the others anywhere."""

    style: TaggedArguments
    schema: Schema
    is_strict: bool
    specials: Specials
    _seen: dict[int, Types] = field(default_factory=dict)

    def rules(self, name: str) -> list[str]:
        """Return whole grammar rules: `name` for all arguments of a call, followed by the rules that it uses."""
        properties = self.schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        required = self.schema.get("required")
        required = required if isinstance(required, list) else []
        extra = extra_properties(self.schema, self.schema)
        needed, others, rules = list[str](), list[str](), Rules()
        for number, (key, schema) in enumerate(properties.items()):
            (needed if key in required else others).append(f"{name}_{number}")
            rules.add(self._argument_rules(f"{name}_{number}", self._quoted(key), schema, f"{name}_open"))
        most = len(others)
        if extra is not False:
            others.append(f"{name}_more")
            most += MAX_EXTRAS
            known = "".join(f" & ~/{_escaped(key)}/" for key in properties)
            rules.append(f"{name.upper()}_KEY: /[a-zA-Z0-9_.\\-]{{1,64}}/{known}")
            rules.add(self._argument_rules(f"{name}_more", f"{name.upper()}_KEY", extra, f"{name}_open"))
        anywhere = [f"{name}_other{{0,{most}}}"] if others else []
        if others:
            rules.append(f"{name}_other: {' | '.join(others)}")
        parts = anywhere + [part for each in needed for part in (each, *anywhere)]
        own = f"{name}: " + (" ".join(parts) or quoted("", self.specials))
        return [own, *lexeme_rule(f"{name}_open", loose_after_white(self.style.open), self.specials), *rules]

    def _argument_rules(self, name: str, key_rule: str, schema: object, open: str) -> list[str]:
        """Return whole grammar rules: `name` for one argument with its tags, followed by the rules that it uses.

        Args:
            key_rule: the grammar expression for the argument's name.
            schema: the schema of its value.
            open: name of the rule for the tag before the name.
        """
        types = types_of(schema, self.schema, self._seen)
        marks = (self.style.between, self.style.before_string or self.style.between)
        other, text = (f"{open} {key_rule} {self._quoted(mark)}" for mark in marks)
        close = self.style.close.strip()
        ways, rules = [], []
        if "string" in types:
            ways.append(f"{text} {name}_text")
            asked = follow_reference(schema, self.schema)
            own = types if self.style.before_string is None else types & STRING
            rules += text_rules(
                *(f"{name}_text", own, asked, close),
                root=self.schema,
                is_strict=self.is_strict,
                specials=self.specials,
                line=self.style.close[: self.style.close.index(close)],
                goes_on=True,
            )
        if "string" not in types or (self.style.before_string is not None and types != STRING):
            ways.append(f"{other} {name}_value {name}_close")
            rules.append(f"{name}_value: {self._value_expression(types, schema)}")
            rules += lexeme_rule(f"{name}_close", loose_after_white(close), self.specials)
        return [f"{name}: {' | '.join(ways)}", *rules]

    def _value_expression(self, types: Types, schema: object) -> str:
        """Return the right side of a rule, without its name, for an argument's values that are no strings.

        They are JSON, or also Python's words if the template writes these.

        Args:
            types: the types that `schema` allows; if one is a string, all others are allowed, whatever else it says.
        """
        asked: dict[str, Any] = dict(schema) if isinstance(schema, Mapping) else {}
        if "string" in types:
            asked = {"type": sorted(types - STRING)}
        words = {"boolean": ("True", "False"), "null": ("None",)} if self.style.is_python else {}
        ways = [json_expression(standalone(asked, self.schema), is_strict=self.is_strict)]
        ways += [quoted(word) for kind in words if kind in types for word in words[kind]]
        return " | ".join(ways)

    def _quoted(self, text: str) -> str:
        return quoted(text, self.specials)


def _mark_length(mark: str, held: str) -> int:
    """Return how many characters the text `mark` before a value has at the start of `held`; 0 if missing or cut off."""
    found = match_pieces(held, loose(mark.rstrip()))
    line = mark[len(mark.rstrip()) :]
    if found is None or not found.is_whole or (line and found.length == len(held)):
        return 0
    return found.length + (len(line) if held.startswith(line, found.length) else 0)


def _without_cut(text: str, tag: str) -> str:
    return text[: len(text) - overlap(text, tag)]


def _escaped(key: str) -> str:
    return "".join(char if char.isalnum() or char == "_" else f"\\{char}" for char in key)
