"""Decode a JSON body as a type, without the unknown fields that `field_policy.py` allows to be ignored.

Knows types of msgspec and values of JSON, not what any field means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import inspect

from .errors import HTTPError
from .field_policy import HARMLESS, REFUSED, IgnoredFields, advice_on, asks_for_nothing
from .hints.validation import explain, types_at
from .http.request_body import decode_json, decode_repaired

T = TypeVar("T")
SURROGATES = "surrogates"
"""Listed in the header if lone surrogates were replaced."""


class LeaveOut(Protocol):
    """Removes ignored parts from a decoded JSON body, and records them."""

    def __call__(self, body: Any, ignored: IgnoredFields, *, is_strict: bool) -> None: ...


def decode_body(
    body: bytes, type: type[T], *, is_strict: bool, leave_out: LeaveOut | None = None
) -> tuple[T, IgnoredFields]:
    """Decode a JSON body, and return it with the ignored fields.

    Args:
        type: a struct. Its `ACTS_ON` names fields that it supports and others ignore.
        is_strict: refuse every field that the type does not have.
        leave_out: removes other parts of a body that does not match the type.

    Raises:
        HTTPError: 400 if it does not match the type, `judge` refuses a field, or there are too many unknown ones.
        msgspec.DecodeError: it is not JSON, or is nested too deep.
    """
    ignored = IgnoredFields()
    try:
        value = _decode_known(body, type, ignored, leave_out, is_strict)
    except msgspec.ValidationError as error:
        raise _mismatch(error, type) from error
    for name in HARMLESS.keys() - getattr(type, "ACTS_ON", frozenset()):
        asked = getattr(value, name, None)
        if asked is not None and not asks_for_nothing(asked):  # nearly always None
            ignored.harmless.add(name)
    return value, ignored


def _decode_known(body: bytes, type: type[T], ignored: IgnoredFields, leave_out: LeaveOut | None, is_strict: bool) -> T:
    """Decode a body as a type. If it does not match, decode it again without unknown fields, which go into `ignored`.

    Raises:
        msgspec.ValidationError: it does not match; nothing can be left out.
        HTTPError: 400 if an unknown field cannot be ignored.
    """
    try:
        return _decode(body, type, ignored, is_strict)
    except msgspec.ValidationError as error:
        if leave_out is None and (is_strict or "unknown field" not in str(error)):
            raise
        return decode_json(_without_unknown(body, type, ignored, leave_out, is_strict), type)


def _mismatch(error: msgspec.ValidationError, type: type[Any]) -> HTTPError:
    """Return the response to a body that does not match its type."""
    found = explain(error, type)
    name = (found.param or "").partition(".")[0]
    if name in REFUSED and all(map(_has_no_effect, types_at(type, name))):
        others = type.__struct_fields__
        return HTTPError(400, f"unsupported field `{name}`; {advice_on(name, others)}", param=name)
    return HTTPError(400, found.message, param=found.param)


def _has_no_effect(type: inspect.Type) -> bool:
    """Return whether a type has only values without effect, such as null or false: a field that asks for nothing."""
    match type:
        case inspect.NoneType():
            return True
        case inspect.LiteralType(values=values):
            return all(map(asks_for_nothing, values))
    return False


def _decode(body: bytes, type: type[T], ignored: IgnoredFields, is_strict: bool) -> T:
    """Decode JSON as a type. Lone surrogates become U+FFFD, unless the server is strict."""
    if is_strict:
        return decode_json(body, type)
    value, is_repaired = decode_repaired(body, type)
    if is_repaired:
        ignored.harmless.add(SURROGATES)
    return value


def _without_unknown(
    body: bytes, type: type[Any], ignored: IgnoredFields, leave_out: LeaveOut | None, is_strict: bool
) -> bytes:
    """Return the JSON body without unknown fields, which are added to `ignored`.

    Decoding such a body twice costs less than checking each value of every body in Python.
    """
    try:
        value = _decode(body, object, ignored, is_strict)
        if leave_out is not None:
            leave_out(value, ignored, is_strict=is_strict)
        if not is_strict:
            _Pruning(ignored).prune(value, _shape_of(type), "")  # type: ignore[arg-type]  # as if a class had no hash
        return msgspec.json.encode(value)
    except RecursionError as error:
        raise msgspec.DecodeError("its arrays and objects are nested too deep") from error


@dataclass(frozen=True)
class _Object:
    """The known fields of an object, and the shapes of those that contain other objects."""

    fields: frozenset[str]
    shapes: Mapping[str, _Shape]


@dataclass(frozen=True)
class _Shape:
    """The positions of objects with known fields in a JSON value.

    Args:
        objects: the objects that the value may be, by the value of `tag_field`; the key None for an untagged one.
        items: shape of an array's items; None if they contain no objects with known fields.
        values: shape of the values of an object with arbitrary fields; None likewise.
    """

    objects: Mapping[object, _Object]
    tag_field: str | None = None
    items: _Shape | None = None
    values: _Shape | None = None


class _Pruning:
    """Removes unknown fields from a decoded JSON value."""

    def __init__(self, ignored: IgnoredFields) -> None:
        self._ignored = ignored

    def prune(self, value: Any, shape: _Shape, path: str) -> None:
        """Remove unknown fields from a value, and from the objects in it. `path` names the value in errors."""
        if isinstance(value, list):
            if shape.items is not None:
                for each in value:
                    self.prune(each, shape.items, path)
        elif isinstance(value, dict):
            tag = None if shape.tag_field is None else value.get(shape.tag_field)
            known = shape.objects.get(tag if isinstance(tag, str) else None)
            if known is not None:
                self._prune_object(value, known, path)
            elif shape.values is not None:
                for each in value.values():
                    self.prune(each, shape.values, path)

    def _prune_object(self, value: dict[str, Any], known: _Object, path: str) -> None:
        """Remove the unknown fields of an object, and of objects in its known fields."""
        if not value.keys() <= known.fields:
            for name in [name for name in value if name not in known.fields]:
                self._ignored.ignore(f"{path}.{name}" if path else name, value.pop(name), known.fields)
        for name, shape in known.shapes.items():
            if name in value:
                self.prune(value[name], shape, f"{path}.{name}" if path else name)


@cache  # inspecting a type takes 30 ms
def _shape_of(type: Any) -> _Shape:
    return _shape(inspect.type_info(type)) or _Shape({})


def _shape(type: inspect.Type) -> _Shape | None:
    """Return the shape of a type; None if it contains no object with known fields."""
    while isinstance(type, inspect.Metadata):
        type = type.type
    match type:
        case inspect.UnionType(types=members):
            shapes = [shape for member in members if (shape := _shape(member)) is not None]
            return None if not shapes else reduce(_shape_of_union, shapes)
        case inspect.ListType(item_type=item):
            shape = _shape(item)
            return None if shape is None else _Shape({}, items=shape)
        case inspect.DictType(value_type=item):
            shape = _shape(item)
            return None if shape is None else _Shape({}, values=shape)
        case inspect.StructType() if type.forbid_unknown_fields:
            fields = {each.encode_name: _shape(each.type) for each in type.fields}
            names = frozenset(fields) | ({type.tag_field} if type.tag_field else frozenset())
            known = _Object(names, {name: shape for name, shape in fields.items() if shape is not None})
            return _Shape({type.tag if type.tag_field else None: known}, type.tag_field)
    return None


def _shape_of_union(left: _Shape, right: _Shape) -> _Shape:
    """Return the shape of a union of two."""
    return _Shape(
        {**left.objects, **right.objects},
        left.tag_field or right.tag_field,
        left.items or right.items,
        left.values or right.values,
    )
