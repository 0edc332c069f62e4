"""What of odd schemas calls are held to: the library follows it, and it forbids nothing that the schema allows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.runtime.chat.grammar import Grammar
from radixlm.runtime.chat.tools.arguments import Schema
from radixlm.runtime.chat.tools.infinite_schemas import MAX_SCHEMAS, _has_finite_value, infinite_schema_ids
from radixlm.runtime.chat.tools.known_formats import GEMMA, HERMES, LFM, QWEN_CODER
from radixlm.runtime.chat.tools.schema_subset import (
    ANY_OBJECT,
    MAX_DEPTH,
    enforceable,
    enforceable_json,
    without_descriptions,
)
from radixlm.runtime.chat.tools.tool_format import Tool
from radixlm.runtime.errors import InvalidGrammar

from ..test_grammars import Bench

ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
ODD: dict[str, dict[str, Any]] = {
    "looks ahead": {"type": "string", "format": "email", "pattern": ZOD_EMAIL},
    "looks behind": {"type": "string", "pattern": "(?<=a)b"},
    "refers back": {"type": "string", "pattern": r"(a)\1"},
    "ends a word": {"type": "string", "pattern": r"\bab\b"},
    "is elsewhere": {"$ref": "https://example.com/a.json"},
    "is nowhere": {"$ref": "#/$defs/nothing"},
    "is a name that nothing has": {"$ref": "#nothing"},
    "any type": {"type": "any"},
    "types of another language": {"type": ["string", "Date"]},
    "no type": {"type": None},
    "large steps": {"type": "integer", "multipleOf": 1000003},
    "steps of nothing": {"type": "integer", "multipleOf": 0},
    "no number between": {"type": "integer", "minimum": 5, "maximum": 1},
    "no length between": {"type": "string", "minLength": 5, "maxLength": 1},
    "a limit in words": {"type": "integer", "minimum": "5"},
    "a limit of floats": {"type": "number", "maximum": 3.4e38},
    "a length of a half": {"type": "string", "minLength": 0.5},
    "no list of values": {"enum": "a"},
    "no list of ways": {"anyOf": None},
    "no items": {"type": "array", "items": None},
    "no schema": None,  # type: ignore[dict-item]
    "a list": [],  # type: ignore[dict-item]
    "names in a text": {"type": "object", "required": "a"},
    "no names": {"type": "object", "properties": None, "additionalProperties": False},
    "names that look ahead": {"patternProperties": {"^(?!a)": {}}, "additionalProperties": False},
    "an odd draft": {"$schema": "https://example.com/draft"},
}
VALUES: dict[str, object] = {"string": "a@b.co", "integer": 7, "number": 0.5, "array": [1], "object": {"a": 1}}
NOT_FOLLOWED: dict[str, dict[str, Any]] = {
    "an open group": {"properties": {"a": {"type": "string", "pattern": "(("}}},
    "nothing between": {
        "properties": {"a": {"exclusiveMinimum": 5, "maximum": 5, "type": "integer"}},
        "required": ["a"],
    },
    "two types": {"properties": {"a": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "required": ["a"]},
    "no object": {"enum": [1]},
}


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench("smollm2")
    yield bench
    bench.grammars.close()


def schema_of(odd: object) -> dict[str, Any]:
    properties = {"a": odd, "b": {"type": "boolean"}}
    return {"type": "object", "properties": properties, "required": ["a", "b"], "additionalProperties": False}


def grammar_of(asked: Schema) -> Grammar:
    grammar = HERMES.grammar([Tool("f", asked)], "required")
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("format", [HERMES, QWEN_CODER, GEMMA, LFM], ids=["hermes", "qwen-coder", "gemma", "lfm"])
@pytest.mark.parametrize("name", ODD)
def test_an_odd_argument_is_left_out_and_the_others_are_kept_to(bench: Bench, format: Any, name: str) -> None:
    schema = schema_of(ODD[name])
    asked, is_whole = enforceable(schema)
    assert not is_whole
    grammar = format.grammar([Tool("f", asked)], "required")
    kind = ODD[name].get("type") if isinstance(ODD[name], dict) else None
    value = VALUES.get(kind if isinstance(kind, str) else "", 7)
    follows = partial(bench.follows, grammar)
    assert follows(format.text_of([("f", json.dumps({"a": value, "b": True}))]))
    assert not follows(format.text_of([("f", json.dumps({"a": value, "b": 5}))]))


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_what_the_library_still_refuses_is_followed_in_outline(bench: Bench, name: str) -> None:
    schema = NOT_FOLLOWED[name]
    with pytest.raises(InvalidGrammar, match="cannot be used"):
        bench.grammars.compile(grammar_of(enforceable(schema)[0]))
    asked, is_whole = enforceable(schema, "outline")
    assert not is_whole
    grammar = grammar_of(asked)
    value = 5 if name == "nothing between" else "b"
    assert bench.follows(grammar, HERMES.text_of([("f", json.dumps({"a": value}))]))
    assert bench.follows(grammar, HERMES.text_of([("f", "{}")])) is ("required" not in schema)


def test_a_schema_that_can_be_followed_is_what_it_was() -> None:
    drafts = {"$schema": "http://json-schema.org/draft-07/schema#", "$defs": {"b c": {"type": "string"}, "d": True}}
    ways = [{"$ref": "#/$defs/b%20c"}, {"$ref": "#"}, {"$ref": "#/properties/a/anyOf/0"}, {"const": {"title": 1}}]
    values = {"type": ["string", "null"], "enum": ["a", None], "pattern": r"^[\w-]+\.\d$", "format": "uri"}
    numbers = {"minimum": 0, "exclusiveMaximum": 9.5, "multipleOf": 0.5, "maxItems": 3}
    draft4 = {"minimum": 5, "exclusiveMinimum": True, "maximum": 7, "items": [{"minLength": 1}, {}]}
    inner = {"a": {"anyOf": ways}, "title": values, "description": numbers, "default": draft4}
    schema = {**drafts, "type": "object", "properties": inner, "patternProperties": {"^x-": {}}, "required": ["title"]}
    assert enforceable(schema) == (schema, True)
    bundled = {"properties": {"a": {"$ref": "item"}}, "$defs": {"item": {"$id": "item", "type": "string"}}}
    assert enforceable(bundled) == (bundled, True)


def test_words_for_the_model_are_no_part_of_a_grammar_and_names_are() -> None:
    words = {"title": "T", "description": "D", "examples": [1], "default": 2, "$comment": "C"}
    names = {name: {"type": "integer", **words} for name in words}
    schema = {**words, "properties": names, "anyOf": [{"items": {"const": 1, **words}}], "required": list(words)}
    bare = {"properties": {name: {"type": "integer"} for name in words}, "anyOf": [{"items": {"const": 1}}]}
    assert enforceable(schema) == ({**bare, "required": list(words)}, True)
    assert without_descriptions(schema) == {**bare, "required": list(words)}


@pytest.mark.parametrize(
    ("kind", "is_whole"), [("object", True), (["object"], True), (["null", "object"], True), ("string", False)]
)
def test_arguments_are_an_object_whatever_else_a_schema_allows(kind: object, is_whole: bool) -> None:
    found = enforceable({"type": kind, "properties": {"a": {}}})
    assert found == (({"type": "object", "properties": {"a": {}}}, True) if is_whole else (ANY_OBJECT, False))


def test_no_depth_and_no_number_of_schemas_is_too_much() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}}
    found, is_whole = enforceable(deep)
    levels = 0
    while "properties" in found:
        found, levels = found["properties"]["a"], levels + 1
    assert (is_whole, levels) == (False, MAX_DEPTH + 1)
    wide = {"properties": {f"p{number}": {"anyOf": [{}] * 3} for number in range(MAX_SCHEMAS // 3)}}
    asked, is_whole = enforceable(wide)
    assert not is_whole and asked["properties"] == {name: {} for name in wide["properties"]}
    assert without_descriptions(deep)["properties"]["a"]["type"] == "object"


def test_what_is_left_out_forbids_nothing(bench: Bench) -> None:
    """`additionalProperties: false` beside names that were left out forbade these."""
    schema = {"patternProperties": {"^(?!x)a": {}}, "additionalProperties": False}
    jsonschema.validate({"ab": 1}, schema)
    asked, _ = enforceable(schema)
    assert bench.follows(grammar_of(asked), HERMES.text_of([("f", '{"ab": 1}')]))


KEYWORDS = (
    *("type", "properties", "required", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions"),
    *("items", "prefixItems", "additionalItems", "additionalProperties", "patternProperties", "pattern", "format"),
    *("minItems", "maxItems", "minLength", "maxLength", "minimum", "maximum", "multipleOf", "$schema", "$id", "title"),
)
REFS = st.sampled_from(["#", "#/$defs/a", "#/properties/a", "#/anyOf/0", "#/nothing", "elsewhere"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | REFS | st.sampled_from(["object", "string", "a"])
LOOSE = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from((*KEYWORDS, "a", "")), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(schema=st.dictionaries(st.sampled_from(KEYWORDS), LOOSE, max_size=6))
def test_whatever_stands_in_a_schema_is_followed_or_left_out(schema: dict[str, Any]) -> None:
    """A list among the types of a schema that refers to another was an error of the server, and so was a definition
    that is `true` beside a reference to nothing."""
    for level in ("schema", "outline", "object"):
        enforceable(schema, level)
    enforceable_json(schema)
    with suppress(InvalidGrammar):
        without_descriptions(schema)


@pytest.mark.parametrize("odd", [{"type": [[]]}, {"type": [{"a": 1}, "null"]}, {"$defs": {"a": True, "b": 5}}])
def test_odd_values_beside_references_are_left_out(odd: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"x": {"$ref": "nothing"}, "y": odd}, "required": ["y"]}
    assert enforceable({**odd, **schema})[0]["type"] == "object"


NODES = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["object", "array", "string", ["object", "null"]]),
        "properties": st.dictionaries(
            st.sampled_from("ab"), st.builds(lambda at: {"$ref": f"#/$defs/{at}"}, st.integers(0, 5)), max_size=2
        ),
        "required": st.lists(st.sampled_from("ab"), max_size=2),
        "anyOf": st.lists(st.builds(lambda at: {"$ref": f"#/$defs/{at}"}, st.integers(0, 5)), min_size=1, max_size=2),
        "$ref": st.builds("#/$defs/{}".format, st.integers(0, 5)),
    },
)


@settings(max_examples=300, deadline=None)
@given(nodes=st.lists(NODES, min_size=6, max_size=6))
def test_schemas_without_end_are_those_that_no_number_of_looks_finds_one_for(nodes: list[dict[str, Any]]) -> None:
    root: dict[str, Any] = {"$ref": "#/$defs/0", "$defs": {str(at): node for at, node in enumerate(nodes)}}
    schemas = {id(each): each for each in [root, *nodes, *refs_in(nodes)]}
    ended, found = set[int](), infinite_schema_ids(root)
    while more := {key for key in schemas if _has_finite_value(schemas[key], root, set(schemas) - ended)} - ended:
        ended |= more
    assert found == set(schemas) - ended


def refs_in(value: Any) -> list[dict[str, Any]]:
    """The schemas that are nothing but references, in lists and names."""
    inner = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
    own = [value] if isinstance(value, dict) and value.keys() == {"$ref"} else []
    return own + [found for each in inner for found in refs_in(each)]


def test_a_long_chain_of_schemas_has_its_end_found() -> None:
    """In either order: each look at all of them found one end before."""
    links = [
        {"type": "object", "properties": {"x": {"$ref": f"#/$defs/{n + 1}"}}, "required": ["x"]} for n in range(500)
    ]
    named = {str(number): link for number, link in enumerate([*links, {"type": "string"}])}
    for defs in (named, dict(reversed(named.items()))):
        assert without_descriptions({"$ref": "#/$defs/0", "$defs": defs})


def test_each_name_of_a_schema_is_looked_at_a_few_times() -> None:
    """Names times names held a thread for half a minute."""

    class Counted(str):
        num_compared = 0
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            Counted.num_compared += 1
            return str(self) == str(other)

    class Definitions(dict[str, Any]):
        num_listed = 0

        def values(self) -> Any:
            Definitions.num_listed += 1
            return super().values()

    names = [Counted(f"p{number}") for number in range(500)]
    schema = {"properties": {str(name): {"$ref": "nowhere"} for name in names}, "required": names}
    schema["$defs"] = Definitions(a={})
    assert enforceable(schema, "outline")[0]["required"] == names
    enforceable(schema)
    assert Counted.num_compared < 10 * len(names) and Definitions.num_listed < 10


@pytest.mark.parametrize(
    ("said", "is_whole"),
    [
        ({"not": {"type": "string"}}, False),
        ({"items": {"if": {}, "then": {"type": "string"}}}, False),
        ({"uniqueItems": True}, False),
        ({"uniqueItems": False}, True),
        ({"propertyNames": {"pattern": "^a"}}, False),
        ({"propertyNames": {"type": "string"}}, True),
        ({"unevaluatedProperties": False}, False),
        ({"unevaluatedProperties": True}, True),
        ({"properties": {"not": {}, "if": {}}}, True),
    ],
)
def test_a_keyword_that_the_library_leaves_out_is_told(said: dict[str, Any], is_whole: bool) -> None:
    """It was left out without a word."""
    schema = {"type": "object", "properties": {"x": said}}
    assert (enforceable(schema)[1], enforceable_json(schema)[1]) == (is_whole, is_whole)
