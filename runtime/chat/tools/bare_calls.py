"""Recognize replies that are only calls, in JSON without the format's tags: bare, in fences, or in other tags.

Models do this that were trained on other formats than their template's: `{"name": "now", "arguments": {}}`, with the
arguments under `parameters` or before the name, in OpenAI's format, in a list, or several calls in a row. JSON among
text is no call, and neither is an object with other fields. Knows JSON and the names of tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, Final

from .arguments import without_halves

_TAG: Final = r"""</?[^<>\s{}\[\]"'=]{1,40}>"""
_AROUND: Final = re.compile(rf"(?:[\s,;]|```[a-zA-Z_]*(?=\s|$)|{_TAG})*")  # around each call
_FENCE: Final = re.compile(r"\s*(?:```[a-zA-Z_]*[ \t]*\n\s*)?")
_LEAD: Final = re.compile(rf"{_FENCE.pattern}(?:{_TAG}\s*)?(?:\[\s*)?")
_CUT_TAG: Final = re.compile(_TAG.removesuffix(">").replace("{1,40}", "{0,40}"))
_KEY: Final = re.compile(r'\{\s*"(name|function|type|arguments|parameters)"\s*:\s*(?:"([^"]*)(")?|(\{))?')
_BEGINNINGS: Final = ('{"name":', '{"function":', '{"type":', '{"arguments":', '{"parameters":')
_BESIDE: Final = frozenset(("id", "type", "index"))
_MAX_CALLS: Final = 64


def length_of_fence(text: str) -> int:
    """Return how many characters of a reply are white space and the beginning of a fence."""
    found = _FENCE.match(text)
    return 0 if found is None else found.end()


def may_be_calls(text: str, names: Collection[str]) -> bool:
    """Return whether a reply that begins with this text may turn out to be nothing but calls of the tools `names`.

    >>> [may_be_calls(text, ["now"]) for text in ("```js", "<tools>", '{"name": "no', '{"name": "Al', "[1", "Hm")]
    [True, True, True, False, False, False]
    """
    lead = _LEAD.match(text)
    rest = text[lead.end() :] if lead is not None else text
    if rest.startswith("`") or not rest:
        return not rest or "```".startswith(rest) or re.fullmatch(r"```[a-zA-Z_]*[ \t]*", rest) is not None
    if rest.startswith("<"):
        return _CUT_TAG.fullmatch(rest) is not None
    found = _KEY.match(rest)
    if found is None:
        squeezed = "".join(rest.split())
        return any(beginning.startswith(squeezed) for beginning in _BEGINNINGS)
    key, value, is_whole, is_object = found.groups()
    if key in ("arguments", "parameters"):
        return True
    if is_object or value is None:
        return key == "function" or not is_object
    known = ("function",) if key == "type" else names
    return value in known if is_whole else any(each.startswith(value) for each in known)


def calls_in(text: str, names: Collection[str]) -> list[tuple[str, str]]:
    """Return the calls of a whole reply that is nothing but calls of the tools `names`: `(name, arguments as JSON)`.

    An empty list for any other reply.

    >>> calls_in('```json\\n{"name": "now", "arguments": {"a": 1}}\\n```', ["now"])
    [('now', '{"a": 1}')]
    """
    decoder, found = json.JSONDecoder(parse_constant=_refuse), list[Any]()
    at = _skip_wrapping(text, 0)
    while at < len(text):
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        found += value if isinstance(value, list) else [value]
        at = _skip_wrapping(text, end)
    calls = [_parse_call(each, names) for each in found]
    return [call for call in calls if call is not None] if None not in calls and len(calls) <= _MAX_CALLS else []


def _skip_wrapping(text: str, start: int) -> int:
    """Return the index after the white space, commas, fences and tags that begin at `start`; `start` if none do."""
    found = _AROUND.match(text, start)
    return start if found is None else found.end()


def _parse_call(value: Any, names: Collection[str]) -> tuple[str, str] | None:
    """Return the call that a decoded JSON value is, as `(name, arguments as JSON)`.

    None if it is no call of a tool in `names`.
    """
    if isinstance(value, dict) and isinstance(value.get("function"), dict) and value.keys() - _BESIDE == {"function"}:
        value = value["function"]
    if not isinstance(value, dict):
        return None
    name = value.get("name", value.get("function"))
    keys = value.keys() - _BESIDE - {"name", "function"}
    if name not in names or len(keys) != 1 or not keys <= {"arguments", "parameters"}:
        return None
    arguments = value[keys.pop()]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    try:
        return str(name), without_halves(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except ValueError:  # a number is too large
        return None


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")
