"""Grammars that clients can request replies to follow: JSON, a schema, a regular expression, choices or a grammar.

Knows kinds and sizes; `grammars.py` finds out whether a grammar can be followed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from ..errors import InvalidGrammar

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "lark"]
"""`grammar` is llama.cpp's GBNF, or Lark; `lark` is our grammar around the JSON schemas of tools and replies."""

MAX_GRAMMAR_LENGTH = 1 << 17  # characters; OpenAI's schemas may have 120,000
MAX_CHOICES = 1000
OVER = "over"
"""The rule of a grammar at whose match a reply ends: the text after it is no part of the reply, and is dropped."""
_NAMED: Final = frozenset(("properties", "$defs", "definitions"))  # keywords of schemas by name
_INNER: Final = frozenset(("items", "prefixItems", "additionalProperties", "anyOf", "oneOf"))  # of one or several
_DESCRIBING: Final = frozenset(("$ref", "anyOf", "oneOf", "enum", "const"))  # that describe a value as a whole
_OF_MEMBERS: Final = frozenset(("properties", "required", "additionalProperties", "items", "prefixItems"))
_ANNOTATIONS: Final = (
    *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "$comment"),
    *("$schema", "discriminator", "nullable"),
)
_LIMITS: Final = (
    *("type", "format", "pattern", "minLength", "maxLength", "multipleOf", "minimum", "maximum", "exclusiveMinimum"),
    *("exclusiveMaximum", "minItems", "maxItems", "uniqueItems", "required"),
)
_PLAIN: Final = frozenset((*_NAMED, *_INNER, *_DESCRIBING, *_ANNOTATIONS, *_LIMITS))
_REFERENCE: Final = re.compile(r"#(/(\$defs|definitions)/[^/]+)?")
_NOUNS: dict[GrammarKind, str] = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "choice": "list of choices",
    "grammar": "grammar",
    "lark": "JSON schema",
}


@dataclass(frozen=True)
class Grammar:
    """A grammar as a client sent it, not validated yet. Equal ones are compiled once.

    Args:
        text: the schema or the list of choices as JSON, the expression, or the grammar.
        is_strict: a schema with a keyword that cannot be enforced is refused; else the keyword is ignored, and
            `oneOf` means `anyOf`.
        holds_reasoning: it applies to the whole reply, reasoning included; else only to what follows the reasoning.

    Raises:
        InvalidGrammar: it is longer than `MAX_GRAMMAR_LENGTH`, or of an unknown kind.

    >>> Grammar.json_object().kind
    'json_schema'
    """

    kind: GrammarKind
    text: str
    is_strict: bool = True
    holds_reasoning: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise InvalidGrammar(
                f"kind is {self.kind!r:.60}; use one of json_schema, regex, choice, or grammar, which is GBNF or Lark"
            )
        if len(self.text) > MAX_GRAMMAR_LENGTH:
            raise InvalidGrammar(
                f"the {self.noun} has {len(self.text)} characters, at most {MAX_GRAMMAR_LENGTH} are allowed; shorten it"
            )

    @property
    def noun(self) -> str:
        """The client's word for this kind of grammar."""
        return _NOUNS[self.kind]

    @classmethod
    def json_object(cls) -> Grammar:
        """Return the grammar of any JSON object."""
        return cls("json_schema", '{"type":"object"}')

    @classmethod
    def json_schema(cls, schema: Mapping[str, object], *, is_strict: bool = True) -> Grammar:
        """Return the grammar of the JSON that a schema describes, with the members that it names and no others.

        Objects may have others where `additionalProperties` allows them.

        Raises:
            InvalidGrammar: it is too long, or nested too deeply to be written as JSON.

        >>> Grammar.json_schema({"properties": {"a": {}}}).text
        '{"properties":{"a":{}},"additionalProperties":false}'
        """
        try:
            return cls("json_schema", closed_schema_json(schema), is_strict)
        except (RecursionError, ValueError) as error:
            raise InvalidGrammar(f"the JSON schema cannot be written as JSON: {error}; simplify it") from error

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of a grammar of that kind.

        Raises:
            InvalidGrammar: its text is not JSON, or not an object.
        """
        assert self.kind == "json_schema"
        try:
            schema = json.loads(self.text)
        except (RecursionError, ValueError) as error:  # json's own error is a ValueError
            raise InvalidGrammar(f"the JSON schema is not JSON: {error}; send an object") from error
        if not isinstance(schema, dict):
            raise InvalidGrammar(f"the JSON schema is not an object but {self.text:.80}; send an object")
        return schema

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """Return the grammar that allows one of some texts.

        Raises:
            InvalidGrammar: there are none, or more than `MAX_CHOICES`, or one is empty.
        """
        if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
            raise InvalidGrammar(f"there are {len(choices)} choices; give 1 to {MAX_CHOICES} that are not empty")
        return cls("choice", json.dumps(list(choices)))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return the grammar of the texts that a regular expression matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def gbnf(cls, text: str) -> Grammar:
        """Return the context-free grammar of a text in llama.cpp's GBNF, or in Lark."""
        return cls("grammar", text)


def closed_schema_json(schema: Mapping[str, object]) -> str:
    """Return a schema as JSON text, with `additionalProperties: false` where it has `properties` and says nothing.

    By the standard such objects may have any other members, and small models add some until `max_tokens` ends the
    reply; llama.cpp allows none. A schema is left as it is if several schemas in it describe one object, since a member
    that one names would be forbidden by another, or if it has keywords that are unknown here.

    It is for replies. Arguments of tools stay open: a model that is used to another client's tool may begin a member
    that this one lacks, and would be made to write a wrong one in its place.

    Raises:
        RecursionError, ValueError: it cannot be written as JSON.
    """
    text = json.dumps(schema, separators=(",", ":"))
    if '"properties"' not in text or len(text) > MAX_GRAMMAR_LENGTH:
        return text
    root = json.loads(text)
    waiting, named = [root], list[dict[str, Any]]()
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict):
            continue
        if not _is_plain(each):
            return text
        properties, required = each.get("properties"), each.get("required", [])
        if isinstance(properties, dict) and properties and _names_all(properties, required):
            named.append(each)
        for keyword in _NAMED & each.keys():
            waiting += each[keyword].values() if isinstance(each[keyword], dict) else []
        for keyword in _INNER & each.keys():
            waiting += each[keyword] if isinstance(each[keyword], list) else [each[keyword]]
    for each in named:
        each.setdefault("additionalProperties", False)
    closed = json.dumps(root, separators=(",", ":"))
    return closed if len(closed) <= MAX_GRAMMAR_LENGTH else text


def _names_all(properties: Mapping[str, Any], required: object) -> bool:
    """Return whether all required members are among the properties."""
    return isinstance(required, list) and all(isinstance(name, str) and name in properties for name in required)


def _is_plain(schema: dict[str, Any]) -> bool:
    """Return whether nothing but this schema, or one that it refers to in place of itself, describes its value."""
    if not schema.keys() <= _PLAIN or ("oneOf" in schema and "discriminator" not in schema):  # else may fit several
        return False
    reference = schema.get("$ref", "#")
    describing = _DESCRIBING & schema.keys()
    return (
        isinstance(reference, str)
        and _REFERENCE.fullmatch(reference) is not None
        and len(describing) <= 1
        and not (describing and _OF_MEMBERS & schema.keys())
    )
