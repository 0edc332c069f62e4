"""Reduce a tool's schema to the part that a grammar can enforce.

Agents send the schemas of all their tools, and no grammar can follow some of these. The part that cannot be enforced
is left out: calls can then be more than the schema allows, and never less. Knows JSON schemas and what the library
reads of them, not requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

from ...errors import InvalidGrammar
from .arguments import Schema
from .infinite_schemas import LISTS, MAX_SCHEMAS, NAMED, SINGLE, infinite_schema_ids
from .schema_types import ANY, resolved, target

Enforcement = Literal["schema", "outline", "object"]
"""The level of enforcement: as much as a grammar can enforce; names and types of arguments; any JSON object."""

ANY_OBJECT: Final[Schema] = {"type": "object"}
MAX_DEPTH: Final = 48  # of nested schemas: the library reads 128 levels of JSON
MAX_MULTIPLE: Final = 4096  # higher ones are more work: 1000003 takes seven seconds
MAX_FLOAT: Final = 1e18  # the library refuses higher limits

_WORDS: Final = frozenset(("title", "description", "examples", "example", "default", "$comment", "deprecated"))
_LIMITS: Final = tuple(
    (low, high) for low in ("minimum", "exclusiveMinimum") for high in ("maximum", "exclusiveMaximum")
)
_COUNTS: Final = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))
_UNENFORCED: Final[Mapping[str, tuple[object, ...]]] = {
    **dict.fromkeys(("not", "if", "contains", "minContains", "maxContains", "dependencies", "$dynamicRef"), ()),
    **dict.fromkeys(("dependentRequired", "dependentSchemas"), ({},)),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), (True, {})),
    "propertyNames": (True, {}, {"type": "string"}),
    "uniqueItems": (False,),
}
"""Keywords that the library ignores, and the values with which they require nothing."""
_LOOKS_AROUND: Final = re.compile(r"\(\?(=|!|<=|<!)|\\[AZbBk1-9]")
_DRAFT: Final = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/20(?:19-09|20-12))/schema#?")
_NOTHING: Final = object()


def enforceable(schema: Schema, level: Enforcement = "schema") -> tuple[Schema, bool]:
    """Return the enforceable part of a tool's schema, and whether that is all of it, descriptions aside.

    If no object fits it, any object is allowed; if it has too many schemas, the level is `outline`.

    Args:
        level: `schema`: all that can be enforced; `outline`: names and types of arguments; `object`: any object.

    >>> enforceable({"properties": {"a": {"type": "string", "pattern": "^(?!b)", "title": "A"}}})
    ({'properties': {'a': {'type': 'string'}}}, False)
    """
    if level == "outline":
        return _outline(schema), False
    reading = _Reading(schema)
    found = reading.read(schema)
    kinds = found.get("type", "object")
    if level == "object" or "object" not in kinds:  # a string or an array
        return ANY_OBJECT, False
    if reading.num_schemas >= MAX_SCHEMAS:
        return _outline(schema), False
    return (found if isinstance(kinds, str) else {**found, "type": "object"}), reading.is_whole


def enforceable_json(schema: Schema) -> tuple[Schema, bool]:
    """Return the enforceable part of a schema of any JSON, and whether that is all of it, descriptions aside.

    Of one with too many schemas in it, only the type is left, if any.
    """
    reading = _Reading(schema)
    found = reading.read(schema)
    if reading.num_schemas >= MAX_SCHEMAS:
        return {"type": schema["type"]} if _is_type(schema.get("type"), schema) else {}, False
    return found, reading.is_whole


def without_descriptions(schema: Schema) -> Schema:
    """Return a copy of a schema without descriptions, titles, examples and defaults, which are only for the model.

    Raises:
        InvalidGrammar: only an endless value fits it.

    >>> without_descriptions({"properties": {"title": {"title": "A", "pattern": "^(?!b)"}}})
    {'properties': {'title': {'pattern': '^(?!b)'}}}
    """
    if id(schema) in infinite_schema_ids(schema):
        raise InvalidGrammar("a value would have to hold itself without end; leave what it requires of itself optional")
    return _Reading(schema, leaves_out=False).read(schema)


def _draft_url(value: object) -> str | None:
    """Return the URL by which the library knows the draft that `$schema` names; None if it does not know it."""
    found = _DRAFT.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    is_old = found[1].startswith("draft-")
    return f"http://json-schema.org/{found[1]}/schema#" if is_old else f"https://json-schema.org/{found[1]}/schema"


def _outline(schema: Schema) -> Schema:
    """Return a schema with only the names and types of a tool's arguments, and which are required."""
    properties, required = schema.get("properties"), schema.get("required")
    named = properties if isinstance(properties, Mapping) else {}
    kinds = {name: each.get("type") if isinstance(each, Mapping) else None for name, each in named.items()}
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return {
        "type": "object",
        "properties": {name: {"type": kind} if _is_type(kind, schema) else {} for name, kind in kinds.items()},
        "required": [name for name in kinds if name in needed],
        "additionalProperties": named is not properties or schema.get("additionalProperties") is not False,
    }


@dataclass
class _Reading:
    """One pass through a schema, `root`.

    Args:
        leaves_out: whether parts that cannot be enforced are left out; else only descriptions are.
    """

    root: Schema
    leaves_out: bool = True
    is_whole: bool = True
    num_schemas: int = 0
    depth: int = 0
    infinite_ids: set[int] | None = None  # ids of schemas that only an endless value fits

    def read(self, schema: Schema) -> dict[str, Any]:
        """Return a reduced copy of a schema inside `root`, with all schemas in it reduced, too.

        `is_whole` becomes False if the copy enforces less than the schema.
        """
        self.num_schemas += 1
        found = {key: self._reduce_value(key, value) for key, value in schema.items() if key not in _WORDS}
        if any(schema[key] not in _UNENFORCED[key] for key in _UNENFORCED.keys() & schema.keys()):
            self.is_whole = False
        if "$schema" in found:  # for an unknown one the library would look elsewhere
            draft = _draft_url(found.pop("$schema"))
            found |= {} if draft is None else {"$schema": draft}
            self.is_whole = self.is_whole and draft is not None
        if self.leaves_out:
            self._drop_endless(schema, found)
        if self.leaves_out:
            self._remove_keywords(found, [key for key, value in found.items() if value is _NOTHING])
            for low, high in (*_LIMITS, *_COUNTS):
                if _is_number(found.get(low)) and _is_number(found.get(high)) and found[low] > found[high]:
                    self._remove_keywords(found, (low, high))
        return found

    def _drop_endless(self, schema: Schema, found: dict[str, Any]) -> None:
        """Delete from the reduced copy `found` what no finite value fits, because it would have to contain itself.

        These are required fields, and `minItems`. Then the copy is not the whole schema.
        """
        if self.infinite_ids is None:
            self.infinite_ids = infinite_schema_ids(self.root)
        if id(schema) not in self.infinite_ids:
            return
        named = schema.get("properties")
        required, properties = schema.get("required"), named if isinstance(named, Mapping) else {}
        if isinstance(found.get("required"), list) and isinstance(required, list):
            kept = [
                name for name in required if id(target(properties.get(str(name)), self.root)) not in self.infinite_ids
            ]
            self.is_whole = self.is_whole and len(kept) == len(required)
            found["required"] = kept
        if found.pop("minItems", None) is not None:
            self.is_whole = False

    def _remove_keywords(self, found: dict[str, Any], keys: Iterable[str]) -> None:
        """Delete keywords from the reduced copy `found`, and note that it is not the whole schema."""
        for key in keys:
            del found[key]
            self.is_whole = False
            if key in ("properties", "patternProperties"):
                found["additionalProperties"] = True  # what was removed may allow other fields
            elif key in ("$ref", "allOf", "anyOf", "oneOf"):
                found.setdefault("additionalProperties", True)

    def _reduce_value(self, key: str, value: Any) -> Any:
        """Return the value of the keyword `key` with the schemas in it reduced.

        `_NOTHING` if the library cannot enforce the keyword with this value.
        """
        if self.leaves_out and not _FITS.get(key, _is_any)(value, self.root):
            return _NOTHING
        if self.leaves_out and key == "$ref" and resolved(value, self.root) is None and not self._has_names:
            return _NOTHING  # a reference to nothing
        if key in NAMED and isinstance(value, Mapping):
            return {name: self._reduce_schema(each) for name, each in value.items()}
        if key in LISTS and isinstance(value, list):
            return [self._reduce_schema(each) for each in value]
        return self._reduce_schema(value) if key in SINGLE else value

    @cached_property
    def _has_names(self) -> bool:
        """Return whether some definitions have `$id` or `$anchor`, by which references can find them."""
        shared = [self.root[key] for key in ("$defs", "definitions") if isinstance(self.root.get(key), Mapping)]
        each_shared = (each for named in shared for each in named.values() if isinstance(each, Mapping))
        return any("$id" in each or "$anchor" in each for each in each_shared)

    def _reduce_schema(self, value: Any) -> Any:
        """Return the reduced copy of an inner schema; unchanged if it is true or false.

        If it is nested too deeply, or there are too many, one that allows everything.
        """
        if isinstance(value, bool):
            return value
        if self.depth < MAX_DEPTH and self.num_schemas < MAX_SCHEMAS and isinstance(value, Mapping):
            self.depth += 1
            found = self.read(value)
            self.depth -= 1
            return found
        self.is_whole = False
        return {} if self.leaves_out else value


def _is_any(value: object, root: Schema) -> bool:
    return True


def _is_type(value: object, root: Schema) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in ANY for name in names)


def _is_text(value: object, root: Schema) -> bool:
    return isinstance(value, str)


def _is_texts(value: object, root: Schema) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_list(value: object, root: Schema) -> bool:
    return isinstance(value, list)


def _is_mapping(value: object, root: Schema) -> bool:
    return isinstance(value, Mapping)


def _has_patterns(value: object, root: Schema) -> bool:
    return isinstance(value, Mapping) and not any(map(_LOOKS_AROUND.search, value))


def _is_pattern(value: object, root: Schema) -> bool:
    return isinstance(value, str) and _LOOKS_AROUND.search(value) is None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object, root: Schema) -> bool:
    return isinstance(value, int) and value >= 0 and not isinstance(value, bool)


def _is_limit(value: object, root: Schema) -> bool:  # in draft 4, `exclusiveMinimum` can be `true`
    return isinstance(value, int) or (isinstance(value, float) and abs(value) <= MAX_FLOAT)


def _is_multiple(value: object, root: Schema) -> bool:
    return isinstance(value, int | float) and 0 < value <= MAX_MULTIPLE


_FITS: Final[Mapping[str, Callable[[object, Schema], bool]]] = {
    **{name: _is_list for name in ("enum", *LISTS - SINGLE)},
    **{name: _is_mapping for name in NAMED},
    "patternProperties": _has_patterns,
    "type": _is_type,
    "required": _is_texts,
    "pattern": _is_pattern,
    "format": _is_text,
    "multipleOf": _is_multiple,
    "$ref": _is_text,
    **{name: _is_limit for names in _LIMITS for name in names},
    **{name: _is_count for names in _COUNTS for name in names},
}
"""Tests of keywords' values, so that the library enforces them. It accepts any other keyword, and ignores it."""
