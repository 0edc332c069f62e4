"""Grammars that clients can request replies to follow: JSON, a schema, a regular expression, choices or a grammar.

Knows kinds and sizes; `grammars.py` finds out whether a grammar can be followed.
"""

from __future__ import annotations

import json
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
_NAMED: Final = frozenset(("properties", "patternProperties", "$defs", "definitions"))  # of schemas by name
_INNER: Final = frozenset(("items", "prefixItems", "additionalItems", "additionalProperties", "anyOf", "oneOf"))
_ALTERNATIVES: Final = frozenset(("$ref", "anyOf", "oneOf"))  # that describe the same object
_OF_OBJECTS: Final = frozenset(("properties", "patternProperties", "required", "minProperties"))
_COMBINED: Final = ("allOf", "not", "if", "dependentSchemas", "unevaluatedProperties")  # schemas of one object
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

    By the standard they may have any other members, and small models add members until `max_tokens` ends the reply.
    llama.cpp, Ollama and vLLM allow none. Schemas that are combined to describe one object stay as they are: a member
    that one names would be forbidden by the other.

    Raises:
        RecursionError, ValueError: it cannot be written as JSON.
    """
    text = json.dumps(schema, separators=(",", ":"))
    if '"properties"' not in text or any(f'"{keyword}"' in text for keyword in _COMBINED):
        return text
    root = json.loads(text)
    waiting, named = [root], list[dict[str, Any]]()
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict):
            continue
        properties = each.get("properties")
        if isinstance(properties, dict) and properties:
            named.append(each)
        describing = _ALTERNATIVES & each.keys()
        if len(describing) > 1 or (describing and _OF_OBJECTS & each.keys()):
            return text
        for keyword, value in each.items():
            if keyword in _NAMED and isinstance(value, dict):
                waiting += value.values()
            elif keyword in _INNER:
                waiting += value if isinstance(value, list) else [value]
    for each in named:
        required = each.get("required", [])
        is_said = any(keyword in each for keyword in ("additionalProperties", "minProperties"))
        if not is_said and isinstance(required, list) and all(name in each["properties"] for name in required):
            each["additionalProperties"] = False
    return json.dumps(root, separators=(",", ":"))
