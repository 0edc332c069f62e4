"""Take the fields out of a JSON body that its type does not have, as far as `field_policy.py` lets them go.

Knows types of msgspec and values of JSON, not what any field means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import inspect

from .field_policy import HARMLESS, IgnoredFields, asks_for_nothing
from .http.request_body import decode_json, without_lone_surrogates

T = TypeVar("T")
SURROGATES = "surrogates"
"""Listed where halves of characters were replaced."""


class LeaveOut(Protocol):
    """Takes what is ignored out of the JSON of a body, and notes it."""

    def __call__(self, body: Any, ignored: IgnoredFields, *, is_strict: bool) -> None: ...


def decode_body(
    body: bytes, type: type[T], *, is_strict: bool, leave_out: LeaveOut | None = None
) -> tuple[T, IgnoredFields]:
    """JSON as a type, and the fields that are ignored.

    Args:
        type: a struct, whose `ACTS_ON` names fields that others ignore.
        is_strict: refuse every field that the type does not have.
        leave_out: takes other things out of a body that is not of the type.

    Raises:
        HTTPError: 400, a field is refused by `judge`, or there are too many that are unknown.
        msgspec.DecodeError: it is not JSON, too deep, or not of this type.
    """
    ignored = IgnoredFields()
    try:
        value = _decoded(body, type, ignored, is_strict)
    except msgspec.ValidationError as error:
        if leave_out is None and (is_strict or "unknown field" not in str(error)):
            raise
        cleaned = _without_unknown(body, type, ignored, leave_out, is_strict)
        value = decode_json(cleaned, type)
    for name in HARMLESS.keys() - getattr(type, "ACTS_ON", frozenset()):
        asked = getattr(value, name, None)
        if asked is not None and not asks_for_nothing(asked):  # nearly always it is None
            ignored.harmless.add(name)
    return value, ignored


def _decoded(body: bytes, type: type[T], ignored: IgnoredFields, is_strict: bool) -> T:
    """JSON as a type, in which halves of characters become U+FFFD."""
    try:
        return decode_json(body, type)
    except msgspec.DecodeError as error:
        whole = body if is_strict or isinstance(error, msgspec.ValidationError) else without_lone_surrogates(body)
        if whole == body:
            raise
        ignored.harmless.add(SURROGATES)
        return decode_json(whole, type)


def _without_unknown(
    body: bytes, type: type[Any], ignored: IgnoredFields, leave_out: LeaveOut | None, is_strict: bool
) -> bytes:
    """The same JSON without them: decoding it again costs less than to look at each value of every body in Python."""
    try:
        value = _decoded(body, object, ignored, is_strict)
        if leave_out is not None:
            leave_out(value, ignored, is_strict=is_strict)
        if not is_strict:
            _Pruning(ignored).prune(value, _shape_of(type), "")  # type: ignore[arg-type]  # as if a class had no hash
        return msgspec.json.encode(value)
    except RecursionError as error:
        raise msgspec.DecodeError("its arrays and objects are nested too deep") from error


@dataclass(frozen=True)
class _Object:
    """An object's fields, and the shapes of those in which there are others."""

    fields: frozenset[str]
    shapes: Mapping[str, _Shape]


@dataclass(frozen=True)
class _Shape:
    """Where objects with known fields stand in a value.

    Args:
        objects: what the value is, if it is one, by its tag, which `tag_field` has; None: it needs none.
        items: what an array holds; None: no such objects.
        values: what an object with any fields holds; None: likewise.
    """

    objects: Mapping[object, _Object]
    tag_field: str | None = None
    items: _Shape | None = None
    values: _Shape | None = None


class _Pruning:
    """Takes out of a value what its type does not have."""

    def __init__(self, ignored: IgnoredFields) -> None:
        self._ignored = ignored

    def prune(self, value: Any, shape: _Shape, path: str) -> None:
        """Prune a value of a shape, which stands at `path`."""
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
        if not value.keys() <= known.fields:
            for name in [name for name in value if name not in known.fields]:
                self._ignored.ignore(f"{path}.{name}" if path else name, value.pop(name), known.fields)
        for name, shape in known.shapes.items():
            if name in value:
                self.prune(value[name], shape, f"{path}.{name}" if path else name)


@cache  # to ask msgspec takes 30 ms
def _shape_of(type: Any) -> _Shape:
    return _shape(inspect.type_info(type)) or _Shape({})


def _shape(type: inspect.Type) -> _Shape | None:
    """The shape of a type; None: no object in it has known fields."""
    while isinstance(type, inspect.Metadata):
        type = type.type
    match type:
        case inspect.UnionType(types=members):
            shapes = [shape for member in members if (shape := _shape(member)) is not None]
            return None if not shapes else reduce(_either, shapes)
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


def _either(left: _Shape, right: _Shape) -> _Shape:
    """The shape of a value that has one of two."""
    return _Shape(
        {**left.objects, **right.objects},
        left.tag_field or right.tag_field,
        left.items or right.items,
        left.values or right.values,
    )
