"""Arguments as literals, in the style of Python (LFM) and of Gemma 4.

Knows one call: `(city='Oslo', days=3)`, or `{city:<|"|>Oslo<|"|>,days:3}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ...errors import InvalidGrammar
from .arguments import MAX_EXTRAS, ArgumentsReader, Schema
from .format_texts import Rules, Specials, json_expression, quoted
from .literal_reader import LiteralReader
from .raw_text import enumerated_values, length_quantifier, text_rules, unenforced_keywords
from .schema_types import (
    ANY,
    ELSEWHERE,
    STRING,
    Types,
    extra_properties,
    follow_reference,
    standalone,
    target,
    types_of,
)

_MAX_DEPTH: Final = 48  # of nested schemas that are enforced
_WORDS: Final = {"boolean": ("true", "false"), "null": ("None", "null")}
_PYTHON_WORDS: Final = {"boolean": ("True", "False"), "null": ("None",)}


@dataclass(frozen=True)
class LiteralArguments:
    """The texts that join arguments, names and values.

    Args:
        opener, closer: around all arguments.
        assign: between a name and its value.
        comma: between two arguments.
        quote: around strings, which are not escaped; None: Python's quotes and escapes.
        is_json: templates write values as JSON; models may also write Python's.
    """

    opener: str
    closer: str
    assign: str
    comma: str
    quote: str | None = None
    is_json: bool = False

    @property
    def texts(self) -> str:
        return self.opener + self.closer + (self.quote or "")

    def written(self, arguments: str) -> str:
        values = self.in_order(json.loads(arguments))
        return self.opener + self.comma.join(f"{k}{self.assign}{self._write_value(v)}" for k, v in values) + self.closer

    def reader(self, schema: Schema, ends: Sequence[str] = ()) -> ArgumentsReader:
        return LiteralReader(self.quote)

    def enforces(self, schema: Schema) -> bool:
        return ELSEWHERE.isdisjoint(schema)

    def rules(self, name: str, schema: Schema, *, is_strict: bool, specials: Specials) -> list[str]:
        found = _LiteralRules(name, self, schema, is_strict, specials)
        arguments = found.members_expression(name, schema, (self.opener, self.assign, self.comma, self.closer))
        return [f"{name}: {arguments}", *found.rules]

    def in_order(self, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Return names and values in the order of templates: Gemma's sorts them by name."""
        return _by_name(values) if self.quote is not None else list(values.items())

    def _write_value(self, value: object) -> str:
        """Return a value as the template writes it.

        That is JSON with `is_json`, a literal of Python without `quote`, else Gemma's form: strings in quotes, names
        without, sorted.
        """
        if self.is_json:
            return json.dumps(value, ensure_ascii=False)
        if self.quote is None:
            return _python_literal(value)
        match value:
            case str():
                return f"{self.quote}{value}{self.quote}"
            case bool():
                return "true" if value else "false"
            case dict():
                return "{" + ",".join(f"{key}:{self._write_value(each)}" for key, each in _by_name(value)) + "}"
            case list():
                return "[" + ",".join(map(self._write_value, value)) + "]"
        return str(value)


def _python_literal(value: object) -> str:
    """Return a value as LFM's template writes it: strings in single quotes, objects as JSON, others as Python."""
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else repr(value)


def _by_name(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(values.items(), key=lambda item: item[0].lower())


@dataclass
class _LiteralRules:
    """A grammar for the arguments of one tool: the required ones in the order of its schema, or sorted, the others
    anywhere.

    Each schema has one rule for its values, wherever it occurs, because recursive ones would not end otherwise.

    Attributes:
        rules: all rules so far.
    """

    name: str
    style: LiteralArguments
    schema: Schema
    is_strict: bool
    specials: Specials
    rules: Rules = field(default_factory=Rules)
    _values: dict[int, str] = field(default_factory=dict)  # rules, by id of the schema
    _seen: dict[int, Types] = field(default_factory=dict)
    _depth: int = 0

    def members_expression(self, name: str, schema: Mapping[str, Any], marks: tuple[str, str, str, str]) -> str:
        """Return the right side of the rule `name`, for an object that fits a schema; add the rules that it uses.

        Required members are in order, others anywhere.

        Args:
            name: of the caller's rule; rules that only it uses have names that begin with it.
            marks: the object's opener, the texts between name and value and between members, and its closer.
        """
        opener, assign, comma, closer = marks
        properties = schema.get("properties")
        items = self.style.in_order(properties) if isinstance(properties, Mapping) else []
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        extra = extra_properties(schema, self.schema)
        needed, others = list[str](), list[str]()
        for number, (key, each) in enumerate(items):
            own = f"{name}_{number}"
            self.rules.add([f"{own}: {self._quoted(key)} {self._quoted(assign)} {self._add_value_rule(each)}"])
            (needed if key in required else others).append(own)
        most = len(others)
        if extra is not False:
            own, known = f"{name}_more", "".join(f" & ~/{_escaped(key)}/" for key, _ in items)
            key = f"{name.upper()}_KEY"
            value = f"{own}: {key} {self._quoted(assign)} {self._add_value_rule(extra)}"
            self.rules.add([f"{key}: /[a-zA-Z_][a-zA-Z0-9_]{{0,63}}/{known}", value])
            others.append(own)
            most += MAX_EXTRAS
        written = self._order_expression(f"{name}_other", needed, others, most, self._quoted(comma))
        return f"{self._quoted(opener)} {written} {self._quoted(closer)}"

    def _order_expression(self, name: str, needed: list[str], others: list[str], most: int, comma: str) -> str:
        """Return a grammar expression for the needed members in their order, and any others before, between and after.

        Args:
            name: of the rule for one other member, which is added if there are others.
            needed, others: names of the members' rules.
            most: others in one place; one more if no member is needed.
            comma: the expression between two members.
        """
        if not others:
            return f" {comma} ".join(needed) or '""'
        self.rules.add([f"{name}: {' | '.join(others)}"])
        more = f"({comma} {name}){{0,{most}}}"
        if not needed:
            return f"({name} {more})?"
        return f"({name} {comma}){{0,{most}}} " + f" {comma} ".join(f"{each} {more}" for each in needed)

    def _add_value_rule(self, schema: object) -> str:
        """Add the rule for values that fit a schema, unless there is one already, and return the name of the rule.

        If schemas are nested too deeply, the innermost ones allow any value.

        Raises:
            InvalidGrammar: `is_strict`, and they are nested too deeply.
        """
        schema = target(schema, self.schema)
        if self._depth == _MAX_DEPTH and self.is_strict:
            raise InvalidGrammar(f"an argument has objects or arrays in {_MAX_DEPTH} others; send a flatter schema")
        is_any = not (isinstance(schema, Mapping) and schema) or self._depth == _MAX_DEPTH
        key = 0 if is_any else id(schema)
        if key not in self._values:
            self._values[key] = f"{self.name}_value_{len(self._values)}"
            self._depth += 1
            ways = self._value_expression(self._values[key], {} if is_any else schema)
            self._depth -= 1
            self.rules.add([f"{self._values[key]}: {ways}"])
        return self._values[key]

    def _value_expression(self, name: str, schema: object) -> str:
        """Return the right side of the rule `name`, for a value that fits a schema; add the rules that it uses.

        Args:
            name: of the caller's rule; rules that only it uses have names that begin with it.
        """
        types, asked = types_of(schema, self.schema, self._seen) or ANY, follow_reference(schema, self.schema)
        if self.style.quote is None:
            return self._python_expression(types, asked)
        ways = []
        if "string" in types:
            ways.append(f"{self._quoted(self.style.quote)} {name}_text")
            text = text_rules(
                *(f"{name}_text", types & STRING, asked, self.style.quote),
                root=self.schema,
                is_strict=self.is_strict,
                specials=self.specials,
            )
            self.rules.add(text)
        if types & {"number", "integer"}:
            kind = "number" if "number" in types else "integer"
            ways.append(self._json({**_without_refs(asked), "type": kind} if types == {kind} else {"type": kind}))
        ways += [quoted(word) for kind, words in _WORDS.items() if kind in types for word in words]
        if "array" in types:
            item = self._add_value_rule(asked.get("items", True))
            ways.append(f'"[" ({item} ("," {item})*)? "]"')
        if "object" in types:
            ways.append(f"{name}_object")
            members = self.members_expression(f"{name}_object", asked if types != ANY else {}, ("{", ":", ",", "}"))
            self.rules.add([f"{name}_object: {members}"])
        return " | ".join(ways)

    def _python_expression(self, types: frozenset[str], asked: Mapping[str, Any]) -> str:
        """Return the right side of a rule for a value as Python writes it; no rule is added.

        Its alternatives are strings in either quotes, Python's words, and else JSON.

        Args:
            types: the types that the schema allows.
            asked: the schema, without a reference.
        """
        values = enumerated_values(asked, self.schema)
        if types == STRING and values is not None:
            texts = [value for value in values if isinstance(value, str)]
            return " | ".join(quoted(text) for value in texts for text in (_python_literal(value), json.dumps(value)))
        # A string with a pattern that must be enforced is JSON, which can.
        if types == STRING and not (self.is_strict and unenforced_keywords(asked, self.schema)):
            times = length_quantifier(asked)
            return " | ".join(rf"/{mark}([^{mark}\\]|\\[ntr\\'\"]){times}{mark}/" for mark in "'\"")
        is_words = types <= {"boolean", "null"} and not self.style.is_json
        ways = [] if is_words else [self._json(_without_refs(asked, self.schema))]
        return " | ".join([*ways, *(quoted(w) for kind, ws in _PYTHON_WORDS.items() if kind in types for w in ws)])

    def _json(self, schema: Mapping[str, Any]) -> str:
        return json_expression(schema, is_strict=self.is_strict)

    def _quoted(self, text: str) -> str:
        return quoted(text, self.specials)


def _without_refs(asked: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return dict(asked) if root is None else standalone(asked, root)


def _escaped(key: str) -> str:
    return "".join(char if char.isalnum() or char == "_" else f"\\{char}" for char in key)
