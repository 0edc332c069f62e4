"""Take the fields out of a JSON body that its type does not have, as far as `field_policy.py` lets them go.

Knows types of msgspec and values of JSON, not what any field means.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from .errors import HTTPError
from .field_policy import HARMLESS, MAX_UNKNOWN, IgnoredFields, asks_for_nothing, judge
from .http.request_body import decode_json

T = TypeVar("T")


def decode_body(body: bytes | bytearray, type: type[T], *, is_strict: bool) -> tuple[T, IgnoredFields]:
    """JSON as a type, and the fields that are ignored.

    Args:
        is_strict: refuse every field that the type does not have.

    Raises:
        HTTPError: 400, a field is refused by `judge`, or there are too many that are unknown.
        msgspec.DecodeError: it is not JSON, too deep, or not of this type.
    """
    ignored = IgnoredFields()
    try:
        value = decode_json(body, type)
    except msgspec.ValidationError as error:
        if is_strict or "unknown field" not in str(error):
            raise
        value = decode_json(_without_unknown(body, type, ignored), type)
    for name in HARMLESS:
        if not asks_for_nothing(getattr(value, name, None)):
            ignored.harmless.add(name)
    return value, ignored


def _without_unknown(body: bytes | bytearray, type: type[Any], ignored: IgnoredFields) -> bytes:
    """The same JSON without them: decoding it again costs less than to look at each value of every body in Python."""
    pruning = _Pruning(ignored)
    try:
        return msgspec.json.encode(pruning.pruned(decode_json(body, object), inspect.type_info(type), ""))
    except RecursionError as error:
        raise msgspec.DecodeError("its arrays and objects are nested too deep") from error


class _Pruning:
    """Copies a value without what its type does not have; a field that many objects have is judged once a value."""

    def __init__(self, ignored: IgnoredFields) -> None:
        self._ignored = ignored

    def pruned(self, value: Any, type: inspect.Type, path: str) -> Any:
        """The value of a type, which stands at `path`."""
        while isinstance(type, inspect.Metadata):
            type = type.type
        if isinstance(type, inspect.UnionType):
            type = _chosen(type, value)
        match type:
            case inspect.StructType(cls=struct) if isinstance(value, dict) and type.forbid_unknown_fields:
                return self._pruned_object(value, struct, path)
            case inspect.ListType(item_type=item) if isinstance(value, list) and _has_objects(item):
                return [self.pruned(each, item, path) for each in value]
            case inspect.DictType(value_type=item) if isinstance(value, dict) and _has_objects(item):
                return {name: self.pruned(each, item, path) for name, each in value.items()}
        return value

    def _pruned_object(self, value: dict[str, Any], struct: type[object], path: str) -> dict[str, Any]:
        known, kept = _fields_of(struct), {}  # type: ignore[arg-type]  # mypy takes the class for its values
        for name, each in value.items():
            place = f"{path}.{name}" if path else name
            if name in known:
                below = known[name]
                kept[name] = each if below is None else self.pruned(each, below, place)
            elif place not in self._ignored.unknown:
                self._ignore(place, each, known)
        return kept

    def _ignore(self, place: str, value: object, known: Mapping[str, object]) -> None:
        verdict = judge(place, value, known)
        if verdict == "harmless":
            self._ignored.harmless.add(place)
        elif verdict == "unknown":
            self._ignored.unknown.add(place)
            if len(self._ignored.unknown) > MAX_UNKNOWN:
                message = f"the body has more than {MAX_UNKNOWN} unknown fields; send those that /openapi.json has"
                raise HTTPError(400, message)


@cache
def _fields_of(struct: type[object]) -> Mapping[str, inspect.Type | None]:
    """An object's fields, as JSON has them, with the types of those that may hold objects; None: they hold none."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    fields = {each.encode_name: each.type if _has_objects(each.type) else None for each in info.fields}
    return fields if info.tag_field is None else {**fields, info.tag_field: None}


def _chosen(union: inspect.UnionType, value: object) -> inspect.Type:
    """The member that a value is of, as far as it can be told: objects are told apart by their tags."""
    members = [each.type if isinstance(each, inspect.Metadata) else each for each in union.types]
    if isinstance(value, list):
        return next((each for each in members if isinstance(each, inspect.ListType)), union)
    if not isinstance(value, dict):
        return union
    structs = [each for each in members if isinstance(each, inspect.StructType)]
    if len(structs) > 1:
        tagged = (each for each in structs if each.tag_field and value.get(each.tag_field) == each.tag)
        return next(tagged, union)
    return next((each for each in members if isinstance(each, inspect.StructType | inspect.DictType)), union)


def _has_objects(type: inspect.Type) -> bool:
    """Whether objects with known fields may stand in a value of a type."""
    match type:
        case inspect.Metadata(type=inner) | inspect.ListType(item_type=inner) | inspect.DictType(value_type=inner):
            return _has_objects(inner)
        case inspect.UnionType(types=members):
            return any(map(_has_objects, members))
    return isinstance(type, inspect.StructType)
