"""Turn validation errors of msgspec into sentences that name the field, its value and the allowed ones.

Knows types of msgspec and its messages, not what any field means.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

_PLACE = re.compile(r"(?P<what>.*?)(?: - at (?P<of_key>`key` in )?`\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_STEP = re.compile(r"\[(\.\.\.|\d+)\]|([^.\[\]]+)")
_ENUM = re.compile(r"Invalid (?:enum )?value (?P<value>.*)", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `([^`]+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]+)`")
_EXPECTED = re.compile(r"Expected `(?P<kinds>[^`]+)`(?P<bound>.*?)(?:, got `(?P<sent>[^`]+)`)?", re.DOTALL)
_LENGTH = re.compile(r" of length (<=|>=|==|<|>) (\d+)")
_RANGE = re.compile(r" (<=|>=|<|>) (\S+)")
_KINDS = {
    "str": "a text",
    "int": "an integer",
    "float": "a number",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_WANTED = {"bool": ("true", "false")}
_UNITS = {"array": ("entry", "entries"), "str": ("character", "characters"), "object": ("field", "fields")}
_BOUNDS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than", "==": "exactly"}
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_LONGEST = 80  # characters of a value in a message


@dataclass(frozen=True)
class Mismatch:
    """Why a value does not match a type: a sentence, and the field that it is about; None if it is the whole body."""

    message: str
    param: str | None


def explain(error: msgspec.ValidationError, type: Any = None, *, within: str = "") -> Mismatch:
    """Return the message of a validation error as a sentence for clients, and the path of the value that is wrong.

    Args:
        type: the type that was expected; None: allowed values are not listed.
        within: the field that was decoded as this type, if it is not the whole body.

    >>> explain(msgspec.ValidationError("Object missing required field `content` - at `$.messages[0]`"))
    Mismatch(message='messages[0] has no `content`, which is required', param='messages[0].content')
    >>> explain(msgspec.ValidationError("Expected `int | null`, got `str` - at `$.n`")).message
    'n is a text; it must be an integer or null'
    """
    found = _PLACE.fullmatch(str(error))
    assert found is not None  # it matches any text
    what, path = found["what"], found["path"] or ""
    place = f"{within}.{path}".strip(".") if not path.startswith("[") else f"{within}{path}"
    subject = f"a name in {place}" if found["of_key"] else place or "the body"
    if missing := _MISSING.fullmatch(what):
        return Mismatch(f"{subject} has no `{missing[1]}`, which is required", f"{place}.{missing[1]}".strip("."))
    if unknown := _UNKNOWN.fullmatch(what):
        in_place = f" in {place}" if place else ""
        message = f"unknown field `{unknown[1]}`{in_place}; remove it, or use a name from /openapi.json"
        return Mismatch(message, f"{place}.{unknown[1]}".strip("."))
    if value := _ENUM.fullmatch(what):
        allowed = [] if type is None else allowed_values(type, path)
        must = f"it must be {_join_alternatives(allowed)}" if allowed else "see /openapi.json for its values"
        return Mismatch(f"{subject} is {_shown(value['value'])}; {must}", place or None)
    if expected := _EXPECTED.fullmatch(what):
        return Mismatch(_type_error(subject, expected), place or None)
    return Mismatch(f"{place}: {what}" if place else what, place or None)


def allowed_values(type: Any, path: str) -> list[str]:
    """Return the fixed values that a type allows at a path such as `messages[0].role`, quoted for messages.

    >>> from typing import Literal
    >>> allowed_values(list[Literal["a", "b"]], "[3]")
    ["'a'", "'b'"]
    """
    values = [value for each in types_at(type, path) if isinstance(each, inspect.LiteralType) for value in each.values]
    return [_shown(repr(value)) for value in dict.fromkeys(values)]


def types_at(type: Any, path: str) -> list[inspect.Type]:
    """Return the types that a value at a path may have, unions split into members; none if there is no such path."""
    types = [*_union_members(_type_info(type))]
    for index, name in _STEP.findall(path):
        types = [
            member for each in types for inner in _inner_types(each, name, index) for member in _union_members(inner)
        ]
    return types


def _inner_types(type: inspect.Type, name: str, index: str) -> Iterator[inspect.Type]:
    """Yield the types one level inside a type: of an object's field `name`, or with `index` of a list's entries."""
    match type:
        case inspect.StructType() if name:
            yield from (each.type for each in type.fields if each.encode_name == name)
            if name == type.tag_field:
                yield inspect.LiteralType((type.tag,))
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item) if index:
            yield item
        case inspect.DictType(value_type=value) if index == "...":
            yield value


def _union_members(type: inspect.Type) -> Iterator[inspect.Type]:
    """Yield the members of a union, also of unions in it; another type yields itself. Constraints are left out."""
    while isinstance(type, inspect.Metadata):
        type = type.type
    if isinstance(type, inspect.UnionType):
        for each in type.types:
            yield from _union_members(each)
    else:
        yield type


@cache  # inspecting a type takes 30 ms
def _type_info(type: Any) -> inspect.Type:
    return inspect.type_info(type)


def _type_error(subject: str, expected: re.Match[str]) -> str:
    """Return the sentence about a value of a wrong type or size.

    It is like "n is a text; it must be an integer or null".

    Args:
        subject: what the sentence begins with: the path of the value.
        expected: the match of `_EXPECTED` with msgspec's message.
    """
    kinds, bound = expected["kinds"].split(" | "), expected["bound"]
    wanted = _join_alternatives([word for kind in kinds for word in _WANTED.get(kind, (_KINDS.get(kind, kind),))])
    if length := _LENGTH.fullmatch(bound):
        one, several = next(_UNITS[kind] for kind in kinds if kind in _UNITS)
        wanted = f"{wanted} of {_BOUNDS[length[1]]} {length[2]} {one if length[2] == '1' else several}"
    elif limit := _RANGE.fullmatch(bound):
        wanted = f"{wanted}, {_BOUNDS[limit[1]]} {limit[2]}"
    else:
        wanted += bound
    if expected["sent"] is None:
        return f"{subject} must be {wanted}"
    return f"{subject} is {_KINDS.get(expected['sent'], expected['sent'])}; it must be {wanted}"


def _join_alternatives(words: list[str]) -> str:
    """Return words joined as alternatives in a sentence.

    >>> _join_alternatives(["a text", "a list", "null"])
    'a text, a list or null'
    """
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _shown(value: str) -> str:
    """Return a value in Python's notation as JSON shows it, cut to `_LONGEST` characters."""
    value = _CONSTANTS.get(value, value)
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."
