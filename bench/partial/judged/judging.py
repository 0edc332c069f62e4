"""Judge whether a reply is right: words as SQuAD compares them, function calls as BFCL does, and program-made answers.

Knows texts, no tokens or models. Every judge takes a reply and the right answer, and returns scores by name between 0
and 1. The first name of a set in `questions.py` is the one that the requirement is about.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

Scores = dict[str, float]
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NOT_WORDS = re.compile(r"[\W_]+")


def words(reply: str, answers: Sequence[str]) -> Scores:
    """Score exact match and F1 of words with the nearest of some answers; ignores case, articles and punctuation.

    >>> words("The Eiffel Tower, Paris", ["Eiffel Tower"])
    {'exact': 0.0, 'f1': 0.8}
    """
    said = _normal(reply)
    exact = max(float(said == _normal(answer)) for answer in answers)
    return {"exact": exact, "f1": max(_f1(said.split(), _normal(answer).split()) for answer in answers)}


def beginning(reply: str, answer: str) -> Scores:
    """Score whether the reply begins with the answer, whose last word ends there.

    >>> beginning(" True, since", "True"), beginning(" ] ) }", "] )")
    ({'exact': 1.0}, {'exact': 1.0})
    """
    said = reply.strip().casefold()
    rest = said.removeprefix(answer.casefold())
    return {"exact": float(len(rest) < len(said) and not rest[:1].isalnum())}


def whole(reply: str, answer: str) -> Scores:
    """Score whether the reply is the answer, ignoring spaces.

    >>> whole(" ]) ", "] )"), whole("] ) }", "] )")
    ({'exact': 1.0}, {'exact': 0.0})
    """
    return {"exact": float("".join(reply.split()) == "".join(answer.split()))}


def call(reply: str, truth: Mapping[str, Mapping[str, Sequence[Any]]]) -> Scores:
    """Compare a call as JSON, `{"name": ..., "arguments": {...}}`, with one function's name and the right values by
    argument; an argument with "" among them may be omitted. `named`: whether the function alone is right.

    >>> call('{"name": "area", "arguments": {"base": 10}}', {"area": {"base": [10], "unit": ["cm", ""]}})
    {'exact': 1.0, 'named': 1.0}
    """
    [(name, arguments)] = truth.items()
    try:
        said, _ = json.JSONDecoder().raw_decode(reply.strip())
    except ValueError:
        return {"exact": 0.0, "named": float(f'"name": "{name}"' in reply)}
    if not isinstance(said, dict) or said.get("name") != name:
        return {"exact": 0.0, "named": 0.0}
    given = said.get("arguments")
    if not isinstance(given, dict) or not given.keys() <= arguments.keys():
        return {"exact": 0.0, "named": 1.0}
    return {"exact": float(all(_is_one_of(given, key, values) for key, values in arguments.items())), "named": 1.0}


def _is_one_of(given: Mapping[str, Any], key: str, values: Sequence[Any]) -> bool:
    return "" in values if key not in given else any(_same(given[key], value) for value in values)


def _same(said: Any, right: Any) -> bool:
    """Compare strings ignoring case, spaces and punctuation; numbers by value; lists in order; of a nested object, each
    of whose values is a list of right ones, every argument."""
    if isinstance(right, bool) or isinstance(said, bool):
        return said is right
    if isinstance(said, str) and isinstance(right, str):
        return _NOT_WORDS.sub("", said).casefold() == _NOT_WORDS.sub("", right).casefold()
    if isinstance(said, list) and isinstance(right, list):
        return len(said) == len(right) and all(map(_same, said, right))
    if isinstance(said, dict) and isinstance(right, dict):
        return said.keys() <= right.keys() and all(_is_one_of(said, key, values) for key, values in right.items())
    return bool(said == right)


def _normal(text: str) -> str:
    bare = "".join(" " if letter in string.punctuation else letter for letter in text.casefold())
    return " ".join(_ARTICLES.sub(" ", bare).split())


def _f1(said: Sequence[str], right: Sequence[str]) -> float:
    common = sum((Counter(said) & Counter(right)).values())
    return 2 * common / (len(said) + len(right)) if common else 0.0
