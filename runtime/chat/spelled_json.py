"""Write JSON objects in their original spelling, in templates that write values as JSON.

Knows values and texts, not templates or calls.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Self

_DEPTH = 6  # of lists and mappings in which one is searched: a list of calls has a function's arguments at 4


class SpelledJson(dict[str, object]):
    """A JSON object with its spelling: a template can iterate over its items, and writes the spelling as JSON.

    >>> arguments = SpelledJson({"city": "Oslo"}, '{"city":"Oslo"}')
    >>> to_json({"name": "f", "arguments": arguments}), to_json({"city": "Oslo"})
    ('{"name": "f", "arguments": {"city":"Oslo"}}', '{"city": "Oslo"}')
    """

    def __init__(self, value: Mapping[str, object], spelling: str) -> None:
        super().__init__(value)
        self.spelling = spelling

    def respelled(self, value: Mapping[str, object], change: Callable[[str], str]) -> Self:
        """Return another value, whose spelling is changed like its texts."""
        return type(self)(value, change(self.spelling))


def to_json(value: object, encode: Callable[[object], str] = json.dumps) -> str:
    """Return a value as JSON, with each `SpelledJson` in its spelling; `encode` writes the rest."""
    if isinstance(value, SpelledJson):
        return value.spelling
    if not _contains_spelled(value, _DEPTH):
        return encode(value)
    name, spellings = secrets.token_hex(8), list[str]()  # an unguessable name, so that no text contains it
    text = encode(_with_placeholders(value, name, spellings, _DEPTH))
    return re.sub(f'"{name}-([0-9]+)"', lambda found: spellings[int(found[1])], text)


def _contains_spelled(value: Any, depth: int) -> bool:
    """Return whether a value is or contains a SpelledJson, at most `depth` levels below it."""
    if isinstance(value, SpelledJson):
        return True
    if depth == 0 or not isinstance(value, dict | list | tuple):
        return False
    return any(_contains_spelled(child, depth - 1) for child in (value.values() if isinstance(value, dict) else value))


def _with_placeholders(value: Any, name: str, spellings: list[str], depth: int) -> object:
    """Return the value with a placeholder for each spelled object, which is appended to `spellings`."""
    if isinstance(value, SpelledJson):
        spellings.append(value.spelling)
        return f"{name}-{len(spellings) - 1}"
    if depth and isinstance(value, dict):
        return {key: _with_placeholders(child, name, spellings, depth - 1) for key, child in value.items()}
    if depth and isinstance(value, list | tuple):
        return [_with_placeholders(child, name, spellings, depth - 1) for child in value]
    return value
