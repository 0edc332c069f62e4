"""Find the JSON types that a schema allows, for formats that write values without their type.

Knows JSON schemas and values, not how a model writes a call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

Types = frozenset[str]
"""Names of JSON schema's types."""

ANY: Final[Types] = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
STRING: Final[Types] = frozenset(("string",))
ELSEWHERE: Final = frozenset(("$ref", "allOf", "anyOf", "oneOf", "patternProperties"))
"""Keywords that describe an object besides its `properties`."""
_ROOT: Final = "the whole"  # name of the whole schema as a definition
_MAX_DEPTH = 16  # of schemas that refer to or combine others
_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}
_WORDS: Final = {
    **{"true": "boolean", "false": "boolean", "null": "null"},
    **{"True": "boolean", "False": "boolean", "None": "null"},
}
_BEGINNINGS: Final[Mapping[str, Types]] = {
    **{"{": frozenset(("object",)), "[": frozenset(("array",)), '"': STRING},
    **dict.fromkeys("-0123456789", frozenset(("number", "integer"))),
}


def types_of(
    schema: object, root: Mapping[str, Any], seen: dict[int, Types] | None = None, *, _depth: int = 0
) -> Types:
    """Return the names of the JSON types that a schema within `root` allows, or more if it is hard to tell.

    >>> sorted(types_of({"anyOf": [{"type": "string"}, {"const": None}]}, {}))
    ['null', 'string']

    Args:
        seen: types of other schemas within the same root, by their `id`; extended.
    """
    if not isinstance(schema, Mapping) or _depth > _MAX_DEPTH:
        return ANY
    seen = {} if seen is None else seen
    if id(schema) in seen:
        return seen[id(schema)]
    seen[id(schema)] = types = ANY  # preliminary, because a schema can lead back here
    inner = partial(types_of, root=root, seen=seen, _depth=_depth + 1)
    if "$ref" in schema:
        types &= inner(resolved(schema["$ref"], root))
    if "type" in schema:
        said = schema["type"]
        names = {said} if isinstance(said, str) else set(map(str, said)) if isinstance(said, list) else ANY
        found = names & ANY or ANY  # other names are no types
        types &= found | {"integer"} if "number" in found else found
    if isinstance(schema.get("enum"), list):
        types &= frozenset(type_of(value) for value in schema["enum"])
    if "const" in schema:
        types &= {type_of(schema["const"])}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            types &= frozenset().union(*map(inner, schema[key]))
    for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        types &= inner(each)
    seen[id(schema)] = types
    return types


def types_of_property(
    key: str,
    schema: object,
    root: Mapping[str, Any],
    seen: dict[int, Types] | None = None,
    *,
    _found: dict[int, Types | None] | None = None,
    _depth: int = 0,
) -> Types | None:
    """Return the names of the JSON types that a schema within `root` allows for the property `key`.

    Its reference, and the branches of `allOf`, `anyOf` and `oneOf`, can describe the property. None if nothing does.

    >>> schema = {"oneOf": [{"properties": {"a": {"type": kind}}} for kind in ("string", "null")] + [{}]}
    >>> sorted(types_of_property("a", schema, schema)), types_of_property("b", schema, schema)
    (['null', 'string'], None)

    Args:
        seen: as in `types_of`.
    """
    found = {} if _found is None else _found  # by the schemas' ids
    if not isinstance(schema, Mapping) or _depth > _MAX_DEPTH:
        return None
    if id(schema) in found:
        return found[id(schema)]
    found[id(schema)] = None  # preliminary, because a schema can lead back here
    inner = partial(types_of_property, key, root=root, seen=seen, _found=found, _depth=_depth + 1)
    named, extra = schema.get("properties"), schema.get("additionalProperties")
    every = list[Types | None]()
    if isinstance(named, Mapping) and key in named:
        every.append(types_of(named[key], root, seen))
    elif extra and isinstance(extra, Mapping):
        every.append(types_of(extra, root, seen))
    branches = {way: schema[way] for way in ("allOf", "anyOf", "oneOf") if isinstance(schema.get(way), list)}
    every += map(inner, [resolved(schema.get("$ref"), root), *branches.pop("allOf", ())])
    for each in branches.values():
        ways = [types for types in map(inner, each) if types is not None]
        every += [frozenset().union(*ways)] if ways else []
    known = [types for types in every if types is not None]
    found[id(schema)] = types = ANY.intersection(*known) if known else None
    return types


def extra_properties(schema: Mapping[str, Any], root: Mapping[str, Any]) -> object:
    """Return the schema of the members that the `properties` of an object's schema do not name.

    False if there can be none. That is the default if `properties` name some, and the schema describes no others: in
    its reference, in branches or by patterns.
    """
    named, others = _names_of(schema), set[str]()
    left, seen = [schema], set[int]()
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if each.get("patternProperties"):
            return {}
        others |= _names_of(each)
        inner = [resolved(each.get("$ref"), root)]
        inner += [
            branch for way in ("allOf", "anyOf", "oneOf") if isinstance(each.get(way), list) for branch in each[way]
        ]
        left += [branch for branch in inner if isinstance(branch, Mapping)]
    return schema.get("additionalProperties", not named or others > named)


def _names_of(schema: Mapping[str, Any]) -> set[str]:
    properties = schema.get("properties")
    return set(properties) if isinstance(properties, Mapping) else set()


def follow_reference(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with the keywords of its reference's target in place of `$ref`; empty if it is no schema.

    Keywords of the schema override those of the target.
    """
    found = schema if isinstance(schema, Mapping) else {}
    for _ in range(_MAX_DEPTH):
        if "$ref" not in found:
            break
        behind = resolved(found["$ref"], root)
        others = {key: value for key, value in found.items() if key != "$ref"}
        found = {**(behind if isinstance(behind, Mapping) else {}), **others}
    return found


def target(schema: object, root: Mapping[str, Any]) -> object:
    """Return the target of a schema that is only a reference; other schemas unchanged."""
    return resolved(schema["$ref"], root) if isinstance(schema, Mapping) and schema.keys() == {"$ref"} else schema


def resolved(ref: object, root: Mapping[str, Any]) -> object:
    """Return the part of `root` at a path `#/a/b`; None if there is none, or `ref` is no such path.

    >>> resolved("#/b/1", {"b": ["c", "d"]}), resolved("other.json", {})
    ('d', None)
    """
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        return None
    found: object = root
    for key in ref.split("/")[1:]:
        name = unquote(key).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(name)
        else:
            found = (
                found[int(name)] if isinstance(found, list) and name.isdecimal() and int(name) < len(found) else None
            )
    return found


def type_of(value: object) -> str:
    """Return the name of a decoded value's JSON type: `integer` for an int, `number` for a float, even 1.0."""
    if isinstance(value, bool):
        return "boolean"
    kinds = ((str, "string"), (int, "integer"), (float, "number"), (list, "array"), (Mapping, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def as_json(text: str, types: Types) -> str:
    """Return a value that a model wrote without its type, as JSON: unchanged if it is JSON, else as a string.

    Also as a string, if JSON's type is not in the allowed `types`, and a string is. Python's `True`, `False` and `None`
    are JSON here.

    >>> as_json("12", frozenset(["string", "null"])), as_json("12", frozenset(["integer"])), as_json("None", ANY)
    ('"12"', '12', 'null')
    """
    written = _PYTHON.get(text.strip(), text.strip())
    try:
        kind = type_of(json.loads(written, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return string(text)
    if "string" in types and kind not in types:
        return string(text)
    return written


def cut_as_json(text: str, types: Types) -> str:
    """Return the beginning of the JSON of an incomplete value: of a type that the text can be, else of a string.

    >>> [cut_as_json(text, ANY) for text in ("No", "[1", "a b")], cut_as_json("12", STRING | {"null"})
    (['nu', '[1', '"a b'], '"12')
    """
    begun = text.strip()
    types = types if "string" in types else ANY  # like `as_json`, which passes JSON of other types on
    for word, kind in _WORDS.items():
        if begun and word.startswith(begun) and kind in types:
            return _PYTHON.get(word, word)[: len(begun)]
    kinds = _BEGINNINGS.get(begun[:1], frozenset())
    return text.lstrip() if kinds & types else string(text)[:-1]


def string(text: str) -> str:
    """Return a text as JSON."""
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def standalone(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of the schema `root` as an independent schema, whose references have the same targets.

    >>> standalone({"$ref": "#/$defs/a"}, {"$defs": {"a": {}}})
    {'$defs': {'a': {}}, '$ref': '#/$defs/a'}
    """
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    alone = {**shared, **schema}
    if not any(not ref.startswith(("#/$defs/", "#/definitions/")) for ref in _find_references(alone)):
        return alone
    return {"$defs": {_ROOT: _redirect_references(root)}, **_redirect_references(schema)}


def _find_references(value: Any) -> Iterator[str]:
    """Yield the texts of all `$ref`s inside a schema that begin with `#`."""
    if isinstance(value, Mapping):
        if isinstance(ref := value.get("$ref"), str) and ref.startswith("#"):
            yield ref
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from _find_references(each)


def _redirect_references(value: Any) -> Any:
    """Return a copy of a schema whose references `#...` lead into the definition that holds the whole schema."""
    if isinstance(value, Mapping):
        return {
            key: f"#/$defs/{_ROOT}{each[1:]}"
            if key == "$ref" and str(each).startswith("#")
            else _redirect_references(each)
            for key, each in value.items()
        }
    return [_redirect_references(each) for each in value] if isinstance(value, list) else value
