"""Grammars that clients can request replies to follow: JSON, a schema, a regular expression, choices or a grammar.

Knows kinds and sizes; `grammars.py` finds out whether a grammar can be followed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import InvalidGrammar

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "lark"]
"""`grammar` is llama.cpp's GBNF, or Lark; `lark` is our grammar around the JSON schemas of tools and replies."""

MAX_GRAMMAR_LENGTH = 1 << 17  # characters; OpenAI's schemas may have 120,000
MAX_CHOICES = 1000
OVER = "over"
"""The rule of a grammar at whose match a reply ends: the text after it is no part of the reply, and is dropped."""
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
        """Return the grammar of the JSON that a schema describes.

        Raises:
            InvalidGrammar: it is too long, or nested too deeply to be written as JSON.
        """
        try:
            return cls("json_schema", json.dumps(schema, separators=(",", ":")), is_strict)
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
