"""Prefixes, and what is asked of them: a fact that was put into the text and that no other question asks for, and how
the text goes on.

Knows texts and token ids, no model. `text.txt` is of Shakespeare's histories, which are free for any use.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ....errors import InvalidParameter

FACTS: Final = (
    ("colour of the miller's boat", "pale green"),
    ("name of the baker's daughter", "Rosalind Hart"),
    ("price of the silver bell", "forty crowns"),
    ("password of the east gate", "winter barley"),
)
DEPTHS: Final = (0.2, 0.45, 0.75)  # of a fact, in shares of the prefix
NUM_STRETCHES: Final = 3
_PREFIX, _MIN_PREFIX = 900, 160  # tokens
_QUERY, _CONTINUATION, _NUM_QUERIES = 16, 32, 5
_TEXT: Final = Path(__file__).resolve().parent / "text.txt"


@dataclass(frozen=True)
class Question:
    """Token ids of what is asked, and of what truly follows."""

    ids: list[int]
    continuation: list[int]

    @property
    def fed(self) -> list[int]:
        """What the model is given to say the continuation."""
        return [*self.ids, *self.continuation[:-1]]


@dataclass(frozen=True)
class Case:
    """A prefix and its questions: the first asks for a fact of it, the others are how the text goes on."""

    prefix: list[int]
    questions: list[Question]


def shipped_text() -> str:
    """The text that comes with the package."""
    return _TEXT.read_text(encoding="utf-8")


def cases(
    text: str, encode: Callable[[str], Sequence[int]], *, first_ids: Sequence[int], context_length: int
) -> list[Case]:
    """Every fact at every depth, in several stretches of the text.

    Args:
        encode: the ids of a text that goes on inside another.
        first_ids: that every prompt begins with.

    Raises:
        InvalidParameter: the text is too short, or the context is.
    """
    behind = _NUM_QUERIES * (_QUERY + _CONTINUATION)
    facts = [_Fact.of(thing, answer, encode) for thing, answer in FACTS]
    longest = max(len(fact.sentence) + len(fact.question.fed) for fact in facts)
    others = len(first_ids) + max(longest, _QUERY + _CONTINUATION)
    size = min(_PREFIX, context_length - others)
    if size < _MIN_PREFIX:
        raise InvalidParameter(
            f"a context of {context_length} tokens is too short to calibrate in; it takes {_MIN_PREFIX + others}"
        )
    ids = list(encode(text))
    least = size + behind
    if len(ids) < least:
        raise InvalidParameter(f"the text has {len(ids)} tokens, and one prefix takes {least}; give a longer one")
    starts = [at * (len(ids) - least) // (NUM_STRETCHES - 1) for at in range(NUM_STRETCHES)]
    placed = enumerate(itertools.product(facts, DEPTHS))
    return [
        _case(ids[start : start + least], size, fact, depth, first_ids)
        for number, (fact, depth) in placed
        for start in [starts[number % NUM_STRETCHES]]
    ]


@dataclass(frozen=True)
class _Fact:
    """A sentence, and a question that it answers."""

    sentence: list[int]
    question: Question

    @classmethod
    def of(cls, thing: str, answer: str, encode: Callable[[str], Sequence[int]]) -> _Fact:
        """That a thing is this."""
        asked = encode(f"\n\nQuestion: What is the {thing}?\nAnswer: The {thing} is")
        sentence = encode(f"\n\nThe {thing} is {answer}.\n\n")
        return cls(list(sentence), Question(list(asked), list(encode(f" {answer}"))))


def _case(ids: Sequence[int], size: int, fact: _Fact, depth: float, first_ids: Sequence[int]) -> Case:
    """A stretch of the text whose first `size` tokens are the prefix, with a fact in it."""
    place, later, step = int(depth * size), ids[size:], _QUERY + _CONTINUATION
    goes_on = [
        Question(list(later[at : at + _QUERY]), list(later[at + _QUERY : at + step]))
        for at in range(0, _NUM_QUERIES * step, step)
    ]
    return Case([*first_ids, *ids[:place], *fact.sentence, *ids[place:size]], [fact.question, *goes_on])
