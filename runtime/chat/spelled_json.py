"""A JSON object that is written as somebody has spelled it already, in a template that writes values as JSON.

Knows values and texts, not templates or calls.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Self

_DEPTH = 6  # of lists and mappings in which one is looked for: a list of calls has a function's arguments at 4


class SpelledJson(dict[str, object]):
    """The object that `spelling` is: a template may go through its items, and writes the spelling where it writes JSON.

    >>> arguments = SpelledJson({"city": "Oslo"}, '{"city":"Oslo"}')
    >>> to_json({"name": "f", "arguments": arguments}), to_json({"city": "Oslo"})
    ('{"name": "f", "arguments": {"city":"Oslo"}}', '{"city": "Oslo"}')
    """

    def __init__(self, value: Mapping[str, object], spelling: str) -> None:
        super().__init__(value)
        self.spelling = spelling

    def respelled(self, value: Mapping[str, object], change: Callable[[str], str]) -> Self:
        """Another value, whose spelling is changed as its texts were."""
        return type(self)(value, change(self.spelling))


def to_json(value: object, encode: Callable[[object], str] = json.dumps) -> str:
    """A value as JSON, with what is spelled in it as it is spelled; the rest is what `encode` writes."""
    if isinstance(value, SpelledJson):
        return value.spelling
    if not _has_spelled(value, _DEPTH):
        return encode(value)
    name, spellings = secrets.token_hex(8), list[str]()  # a name that nobody can guess, so that no text has it
    text = encode(_named(value, name, spellings, _DEPTH))
    return re.sub(f'"{name}-([0-9]+)"', lambda found: spellings[int(found[1])], text)


def _has_spelled(value: Any, depth: int) -> bool:
    if isinstance(value, SpelledJson):
        return True
    if depth == 0 or not isinstance(value, dict | list | tuple):
        return False
    return any(_has_spelled(child, depth - 1) for child in (value.values() if isinstance(value, dict) else value))


def _named(value: Any, name: str, spellings: list[str], depth: int) -> object:
    """The value with a text in the place of each spelled object, which is put to `spellings`."""
    if isinstance(value, SpelledJson):
        spellings.append(value.spelling)
        return f"{name}-{len(spellings) - 1}"
    if depth and isinstance(value, dict):
        return {key: _named(child, name, spellings, depth - 1) for key, child in value.items()}
    if depth and isinstance(value, list | tuple):
        return [_named(child, name, spellings, depth - 1) for child in value]
    return value
