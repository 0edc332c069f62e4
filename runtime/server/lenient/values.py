"""Convert values of the wrong type that can only mean one thing, in any field.

A form sends numbers as texts, a language with one kind of container sends an empty object as a list, and a client that
fills in every field sends empty ones. The request's type says what each field accepts. Used only if a body does not
match its type. Knows types of msgspec and values of JSON, not what any field means.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal

import msgspec
from msgspec import inspect

from ..field_policy import asks_for_nothing
from .json_values import MISSING

Kind = Literal["null", "text", "word", "number", "integer", "switch", "list", "object", "empty object"]
"""Kinds of values that a field may accept. A word is one of a few fixed texts."""

_NEVER_CHANGED: Final = ("cache_salt", "prompt_cache_key")  # a wrong conversion could share a cache

_INTEGER: Final = re.compile(r"\s*[-+]?\d{1,20}\s*", re.ASCII)
_NUMBER: Final = re.compile(r"\s*[-+]?(\d{1,20}\.?\d{0,40}|\.\d{1,40})([eE][-+]?\d{1,3})?\s*", re.ASCII)
_SWITCHES: Final = {"true": True, "false": False}


@dataclass(frozen=True)
class Taken:
    """The values that a field accepts.

    Args:
        kinds: the accepted kinds; empty if any.
        is_required: the field cannot be left out.
        items: the accepted entries of its lists; None if it accepts no lists.
        objects: the fields of its objects, by the value of `tag_field`; the key None for untagged objects.
    """

    kinds: frozenset[Kind]
    is_required: bool = False
    items: Taken | None = None
    objects: Mapping[object, Mapping[str, Taken]] = field(default_factory=dict)
    tag_field: str | None = None


@dataclass(frozen=True)
class ReadValue:
    """One kind of wrong value and its conversion.

    Args:
        sent: description of what clients send.
        meaning: description of what it is converted to.
        read: converts a value that the field does not accept; returns the same value if it cannot, `MISSING` to remove
            the field.
    """

    sent: str
    meaning: str
    read: Callable[[Any, Taken], Any]


def relax_values(body: Any, type: type[msgspec.Struct]) -> set[str]:
    """Convert wrong values in a request's body in place, and return the paths of those that occurred.

    >>> from radixlm.runtime.server.openai.requests import CompletionRequest
    >>> body = {"prompt": "a", "max_tokens": "5", "stream": "False", "tools": "", "stop": {}}
    >>> sorted(relax_values(body, CompletionRequest)), body
    (['max_tokens', 'stop', 'stream'], {'prompt': 'a', 'max_tokens': 5, 'stream': False, 'tools': ''})
    """
    found = set[str]()
    _convert_fields(body, _accepted_by(type), "", found)
    return found


def _convert_fields(value: Any, taken: Taken, path: str, found: set[str]) -> None:
    """Convert the wrong fields of an object in place, also in objects within; add their paths to `found`."""
    if isinstance(value, list) and taken.items is not None:
        for each in value:
            _convert_fields(each, taken.items, path, found)
    if not isinstance(value, dict):
        return
    tag = None if taken.tag_field is None else value.get(taken.tag_field)
    fields = taken.objects.get(tag if isinstance(tag, str) else None, {})
    for name in [name for name in value if name in fields and name not in _NEVER_CHANGED]:
        name_with_path = f"{path}.{name}" if path else name
        meant = _convert_value(value[name], fields[name])
        if meant is not value[name]:
            found.add(name_with_path)
            value[name] = meant
        if meant is MISSING:
            del value[name]
        else:
            _convert_fields(meant, fields[name], name_with_path, found)


def _convert_value(value: Any, taken: Taken) -> Any:
    """Convert a value of the wrong type by the first of `VALUES` that applies.

    Returns the same value if its type is right or none applies, and MISSING if the field is to be removed.
    """
    if not taken.kinds or _kinds_of(value) & taken.kinds:
        return _without_nulls(value, taken)
    for each in VALUES:
        meant = each.read(value, taken)
        if meant is not value:
            return meant
    return value


def _kinds_of(value: Any) -> set[Kind]:
    """Return the kinds that a JSON value counts as: an integer is also a number, a text that is not empty a word."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"switch"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"text", "word"} if value else {"text"}
    if isinstance(value, list):
        return {"list"}
    return {"object"} if value else {"empty object"}


def _drop_empty(value: Any, taken: Taken) -> Any:
    """Remove an empty value from an optional field. False is kept for numbers, because it might mean 0."""
    is_zero = value is False and taken.kinds & {"number", "integer"}
    return MISSING if asks_for_nothing(value) and not taken.is_required and not is_zero else value


def _read_number(value: Any, taken: Taken) -> Any:
    """Convert a text, or a float without fraction, to the number that a field accepts."""
    if isinstance(value, float) and "integer" in taken.kinds and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value
    if "integer" in taken.kinds and _INTEGER.fullmatch(value):
        return int(value)
    return float(value) if "number" in taken.kinds and _NUMBER.fullmatch(value) else value


def _read_switch(value: Any, taken: Taken) -> Any:
    """Convert a text, 0 or 1 to the true or false that a field accepts."""
    if "switch" not in taken.kinds:
        return value
    if isinstance(value, str):
        return _SWITCHES.get(value.strip().lower(), value)
    return bool(value) if type(value) is int and value in (0, 1) else value


def _write_digits(value: Any, taken: Taken) -> Any:
    """Convert a number to text in a field for one text. In a field for several, it might be a token id."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return json.dumps(value) if is_number and "text" in taken.kinds and "list" not in taken.kinds else value


def _wrap_entry(value: Any, taken: Taken) -> Any:
    """Put a value into a list if a field accepts lists of it, except a number where text is accepted."""
    is_entry = taken.items is not None and _kinds_of(value) & taken.items.kinds
    is_other = isinstance(value, int | float) and "text" in taken.kinds
    return [value] if is_entry and not is_other else value


def _without_nulls(value: Any, taken: Taken) -> Any:
    """Return a list without its nulls, if a field accepts none in it."""
    takes_none = taken.items is not None and taken.items.kinds and "null" not in taken.items.kinds
    is_changed = isinstance(value, list) and takes_none and None in value
    return [each for each in value if each is not None] if is_changed else value


VALUES: Final = (
    ReadValue('null, `""`, `[]`, `{}` or false, in a field that does not accept it', "no field", _drop_empty),
    ReadValue("a number in a text, or an integer as `5.0`", "the number", _read_number),
    ReadValue("`true` or `false` in a text, 1 or 0", "true or false", _read_switch),
    ReadValue("a number in place of a text", "its digits", _write_digits),
    ReadValue("a single entry in place of a list", "a list of it", _wrap_entry),
    ReadValue("null in a list", "the other entries", _without_nulls),
)
"""Conversions for all fields of all endpoints."""


@cache  # inspecting a type takes 30 ms
def _accepted_by(type: Any) -> Taken:
    """Return the values that a type of requests accepts."""
    return _accepted_values(inspect.type_info(type), is_required=True)


def _accepted_values(type: inspect.Type, *, is_required: bool) -> Taken:
    """Return the values that a field of a type accepts."""
    kinds, items, objects, tag_field = set[Kind](), None, dict[object, Mapping[str, Taken]](), None
    for each in _members(type):
        match each:
            case inspect.NoneType():
                kinds.add("null")
            case inspect.BoolType():
                kinds.add("switch")
            case inspect.IntType():
                kinds.add("integer")
            case inspect.FloatType():
                kinds |= {"number", "integer"}
            case inspect.StrType():
                kinds.add("text")
            case inspect.LiteralType(values=values):
                kinds |= {"switch" if isinstance(word, bool) else "word" for word in values}
            case inspect.ListType(item_type=item):
                kinds.add("list")
                items = _accepted_values(item, is_required=True)
            case inspect.DictType():
                kinds |= {"object", "empty object"}
            case inspect.StructType():
                tag_field = each.tag_field or tag_field
                tag = each.tag if each.tag_field else None
                objects[tag] = {
                    part.encode_name: _accepted_values(part.type, is_required=part.required) for part in each.fields
                }
                kinds.add("object")
                if tag is None and not any(part.required for part in each.fields):
                    kinds.add("empty object")
            case _:
                return Taken(frozenset(), is_required)
    return Taken(frozenset(kinds), is_required, items, objects, tag_field)


def _members(type: inspect.Type) -> list[inspect.Type]:
    """Return the members of a union type; a list of the type itself if it is not a union."""
    while isinstance(type, inspect.Metadata):
        type = type.type
    return [type] if not isinstance(type, inspect.UnionType) else [one for each in type.types for one in _members(each)]
