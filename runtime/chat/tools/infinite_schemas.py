"""Find the schemas that only an endless value would fit, because it would have to contain itself.

Knows which keywords hold schemas, not what a grammar can enforce.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from .arguments import Schema
from .schema_types import resolved, target

MAX_SCHEMAS: Final = 1 << 14  # in one schema: a grammar has no room for more
SINGLE: Final = frozenset(("additionalProperties", "items", "additionalItems"))  # keywords of one schema
LISTS: Final = frozenset(("anyOf", "oneOf", "allOf", "prefixItems", "items"))  # of a list of schemas
NAMED: Final = frozenset(("properties", "patternProperties", "$defs", "definitions"))  # of schemas by name
_MAX_LOOKS: Final = 1 << 17  # visits of schemas


def infinite_schema_ids(root: Schema) -> set[int]:
    """Return the ids of the schemas in `root` that only an endless value would fit: those that must contain themselves.

    >>> node = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    >>> id(node) in infinite_schema_ids(node), infinite_schema_ids({**node, "required": []})
    (True, set())
    """
    schemas, waiting = dict[int, Schema](), [root]
    while waiting and len(schemas) < MAX_SCHEMAS:
        schema = waiting.pop()
        if id(schema) in schemas:
            continue
        schemas[id(schema)] = schema
        waiting += [
            each for each in (*_inner_schemas(schema), resolved(schema.get("$ref"), root)) if isinstance(each, Mapping)
        ]
    if not any("$ref" in schema for schema in schemas.values()):
        return set()
    endless, order, num_looks = set(schemas), [*schemas], 0
    while num_looks < _MAX_LOOKS:
        before = len(endless)
        for key in order:
            if key in endless and _has_finite_value(schemas[key], root, endless):
                endless.remove(key)
        num_looks += before
        if len(endless) == before:
            break
        order.reverse()  # chains in this order take one pass in the other order
    return endless


def _inner_schemas(schema: Schema) -> Iterable[Any]:
    """Yield the schemas directly inside one: of properties, items, definitions and alternatives."""
    for key, value in schema.items():
        if key in NAMED and isinstance(value, Mapping):
            yield from value.values()
        elif key in LISTS and isinstance(value, list):
            yield from value
        elif key in SINGLE:
            yield value


def _has_finite_value(schema: Schema, root: Schema, endless: Collection[int]) -> bool:
    """Return whether a finite value fits a schema, assuming that none fits those in `endless`.

    Args:
        root: the whole schema, for references.
        endless: ids of schemas.
    """

    def ends(each: Any) -> bool:
        return id(target(each, root)) not in endless

    if "enum" in schema or "const" in schema:
        return True
    if "$ref" in schema and id(resolved(schema["$ref"], root)) in endless:
        return False
    ways = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
    if not all(any(map(ends, way)) for way in ways):
        return False
    if not all(map(ends, schema["allOf"] if isinstance(schema.get("allOf"), list) else ())):
        return False
    kinds = schema.get("type")
    if isinstance(kinds, list) and any(kind not in ("object", "array") for kind in kinds):
        return True
    named, required = schema.get("properties"), schema.get("required")
    if kinds == "array" or not isinstance(named, Mapping) or not isinstance(required, list):
        required, named = [], {}
    if not all(ends(named[name]) for name in required if isinstance(name, str) and name in named):
        return False
    is_filled = kinds != "object" and isinstance(schema.get("minItems"), int) and schema["minItems"] > 0
    return not is_filled or all(map(ends, _first_item_schemas(schema, schema["minItems"])))


def _first_item_schemas(schema: Schema, count: int) -> list[Any]:
    """Return the schemas of an array's first `count` items: those by position, then `items` once for all others.

    Fewer if no schema is given for the others.
    """
    first: list[Any] = next((schema[key] for key in ("prefixItems", "items") if isinstance(schema.get(key), list)), [])
    others = [schema["items"]] if len(first) < count and isinstance(schema.get("items"), Mapping) else []
    return [*first[:count], *others]
