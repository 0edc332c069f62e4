"""Pieces of grammars in Lark, as llguidance reads it.

Knows texts, special tokens and schemas; not what a call looks like.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...errors import InvalidGrammar
from ..grammar import MAX_GRAMMAR_LENGTH

Specials = Sequence[tuple[str, int]]
"""Special tokens: the text of each, and its id."""

# The white space that templates write when they render a call of an earlier turn: a call that is made in it stands in
# the next prompt as it was said, and its KV is reused.
AS_TEMPLATES_WRITE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def quoted(text: str, specials: Specials = ()) -> str:
    """A text, whose special tokens are themselves; what no text is is `""`.

    >>> quoted("<call>now", [("<call>", 7)])
    '<[7]> "now"'
    """
    ids = dict(specials)
    return " ".join(
        f"<[{ids[piece]}]>" if piece in ids else json.dumps(piece, ensure_ascii=False)
        for piece in cut_at_specials(text, specials) or [""]
    )


def cut_at_specials(text: str, specials: Specials) -> list[str]:
    """The special tokens of a text, and the texts between them, none of which is empty."""
    texts = sorted((special for special, _ in specials), key=len, reverse=True)
    if not texts:
        return [text] if text else []
    return [piece for piece in re.split(f"({'|'.join(map(re.escape, texts))})", text) if piece]


def escaped(text: str) -> str:
    """A text in a regular expression."""
    return "".join(
        "\\n" if char == "\n" else char if char.isalnum() or char in "_<> " or not char.isascii() else f"\\{char}"
        for char in text
    )


class Rules(list[str]):
    """Rules of a grammar, no more than it has room for: schemas that refer to each other make more than memory has."""

    def __init__(self, rules: Iterable[str] = ()) -> None:
        super().__init__()
        self._num_characters = 0
        self.add(rules)

    def add(self, rules: Iterable[str]) -> None:
        """Put rules at the end.

        Raises:
            InvalidGrammar: there is no room.
        """
        for rule in rules:
            self.append(rule)
            self._num_characters += len(rule) + 1
            if self._num_characters > MAX_GRAMMAR_LENGTH:
                raise InvalidGrammar(
                    f"the schemas make a grammar of more than {MAX_GRAMMAR_LENGTH} characters; shorten them"
                )


def json_rule(schema: Mapping[str, Any], *, is_strict: bool, is_loose: bool = False) -> str:
    """JSON that a schema describes, written as templates write it, or with any white space."""
    return f"%json {with_options(schema, is_strict=is_strict, **({} if is_loose else AS_TEMPLATES_WRITE))}"


def with_options(schema: Mapping[str, Any], *, is_strict: bool, **options: object) -> str:
    """A schema that says how it is kept to."""
    options |= {"lenient": not is_strict, "coerce_one_of": not is_strict}
    return json.dumps({**schema, "x-guidance": options}, separators=(",", ":"))
