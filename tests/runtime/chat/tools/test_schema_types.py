"""What hostile schemas cost to read: they refer to themselves, and have more ways than there is time."""

from __future__ import annotations

from typing import Any

import pytest
from radixlm.runtime.chat.tools.known_formats import FUNCTION_GEMMA, GEMMA, GLM, LFM, QWEN_CODER
from radixlm.runtime.chat.tools.raw_text import _MAX_SEEN, enumerated_values, unenforced_keywords
from radixlm.runtime.chat.tools.schema_types import ANY, STRING, Types, resolved, types_of, types_of_property
from radixlm.runtime.chat.tools.tool_format import Tool, ToolFormat
from radixlm.runtime.errors import InvalidGrammar

from ..test_grammars import Bench


def doubled(num: int, way: str = "anyOf") -> dict[str, Any]:
    """A schema of eight to the power of `num` ways, all of which are a letter."""
    ways = {f"a{number}": {way: [{"$ref": f"#/$defs/a{number + 1}"} for _ in range(8)]} for number in range(num)}
    return {"$ref": "#/$defs/a0", "$defs": {**ways, f"a{num}": {"type": "string", "enum": ["x"], "format": "uri"}}}


@pytest.mark.parametrize("way", ["anyOf", "oneOf", "allOf"])
def test_ways_that_double_are_looked_at_once(way: str) -> None:
    """Seven of them took a hundred seconds, in which no other request was looked at."""
    schema = doubled(7, way)
    assert types_of(schema, schema) == {"string"}
    assert set(unenforced_keywords(schema["$defs"]["a0"], schema)) == {"format"}
    assert enumerated_values(schema["$defs"]["a0"], schema) == (None if way == "allOf" else ["x"])
    assert types_of(doubled(40, way), doubled(40, way)) >= {"string"}


@pytest.mark.parametrize("format", [QWEN_CODER, GLM, GEMMA, FUNCTION_GEMMA, LFM])
def test_a_tool_with_ways_that_double_has_a_grammar(format: ToolFormat) -> None:
    schema = doubled(7)
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a0"}}, "$defs": schema["$defs"]}
    for is_strict in (False, True):
        if is_strict and format is not LFM:
            parameters["$defs"]["a7"].pop("format")
        assert format.grammar([Tool("f", parameters, is_strict=is_strict)], "auto") is not None


def test_more_ways_than_are_looked_at_allow_more() -> None:
    ways = [{"type": "string", "const": str(number)} for number in range(_MAX_SEEN + 1)]
    assert enumerated_values({"anyOf": ways}, {}) is None
    assert unenforced_keywords({"anyOf": ways}, {}) == ["anyOf"]
    assert enumerated_values({"anyOf": ways[:9]}, {}) == [str(number) for number in range(9)]


def test_a_schema_that_is_itself_is_of_any_type() -> None:
    loop = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}}}
    assert types_of(loop["$defs"]["a"], loop) == ANY
    assert types_of({"$ref": "#"}, {"$ref": "#"}) == ANY


INTEGER = frozenset(("integer",))
TEXT = {"properties": {"a": {"type": "string"}}}
NUMBER = {"properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        (TEXT, STRING),
        ({"$ref": "#/$defs/text"}, STRING),
        ({"$ref": "#/definitions/text"}, STRING),
        ({"$ref": "#/$defs/again"}, STRING),
        ({"allOf": [{"properties": {"b": {}}}, {"$ref": "#/$defs/text"}]}, STRING),
        ({"oneOf": [{"required": ["b"]}, TEXT, {"anyOf": [TEXT]}]}, STRING),
        ({"anyOf": [TEXT, NUMBER]}, STRING | INTEGER),
        ({"anyOf": [TEXT, NUMBER], "allOf": [TEXT]}, STRING),
        ({**TEXT, "oneOf": [{"properties": {"a": {"minLength": 1}}}, {"properties": {"a": {}}}]}, STRING),
        ({"anyOf": [{"$ref": "#"}, TEXT]}, STRING),
        ({"$ref": "#/$defs/extra"}, STRING),
        ({"properties": {"b": {}}, "allOf": 5, "anyOf": [5], "$ref": "#/nothing"}, None),
    ],
)
def test_a_property_is_described_anywhere_in_the_schema_of_an_object(
    schema: dict[str, Any], types: Types | None
) -> None:
    shared = {"text": TEXT, "again": {"$ref": "#/$defs/text"}, "extra": {"additionalProperties": {"type": "string"}}}
    root = {**schema, "$defs": shared, "definitions": shared}
    assert types_of_property("a", root, root) == types


@pytest.mark.parametrize("way", ["anyOf", "oneOf", "allOf"])
def test_ways_that_double_are_searched_once_for_a_property(way: str) -> None:
    schema = doubled(7, way)
    schema["$defs"]["a7"] = TEXT
    assert types_of_property("a", schema, schema) == STRING
    assert types_of_property("a", doubled(400, way), doubled(400, way)) is None


def test_names_that_are_no_types_say_nothing() -> None:
    assert types_of({"type": "any"}, {}) == ANY
    assert types_of({"type": ["string", "Date"]}, {}) == {"string"}


@pytest.mark.parametrize(
    ("ref", "found"),
    [
        ("#", {"a b": [{"c/d": 1}]}),
        ("#/a%20b/0/c~1d", 1),
        ("#/a b/1", None),
        ("#/a b/-1", None),
        ("#a b", None),
        (5, None),
    ],
)
def test_a_reference_is_a_path_from_the_root(ref: object, found: object) -> None:
    assert resolved(ref, {"a b": [{"c/d": 1}]}) == found


@pytest.mark.parametrize("format", [QWEN_CODER, GEMMA, LFM])
def test_many_arguments_of_one_large_schema_are_too_long_before_memory_ends(format: ToolFormat) -> None:
    texts = {"type": "string", "enum": ["x" * 200 + str(number) for number in range(400)]}
    properties = {f"p{number}": {"$ref": "#/$defs/a"} for number in range(10_000)}
    with pytest.raises(InvalidGrammar, match="more than 131072 characters"):
        format.grammar([Tool("f", {"type": "object", "properties": properties, "$defs": {"a": texts}})], "auto")


# Values in values, in formats that are no JSON.


@pytest.fixture(scope="module")
def bench() -> Any:
    bench = Bench("smollm2")
    yield bench
    bench.grammars.close()


@pytest.mark.parametrize("format", [GEMMA, FUNCTION_GEMMA], ids=["gemma", "function-gemma"])
def test_a_schema_that_holds_itself_has_rules_that_end(bench: Bench, format: ToolFormat) -> None:
    """Twelve such arguments made 210 MB of rules, and three more all of memory."""
    properties = {f"p{number:02}": {"$ref": "#"} for number in range(20)}
    parameters = {"type": "object", "properties": properties, "additionalProperties": False}
    grammar = format.grammar([Tool("f", parameters, is_strict=True)], "required")
    assert grammar is not None and len(grammar.text) < 20_000
    assert bench.follows(grammar, format.text_of([("f", '{"p01": {"p02": {"p03": {"p04": {"p05": {"p19": {}}}}}}}')]))
    assert not bench.follows(
        grammar, format.text_of([("f", '{"p01": {"p02": {"p03": {"p04": {"p05": {"p40": {}}}}}}}')])
    )


@pytest.mark.parametrize("format", [GEMMA, FUNCTION_GEMMA], ids=["gemma", "function-gemma"])
def test_values_are_held_to_their_schema_at_any_depth(bench: Bench, format: ToolFormat) -> None:
    """The fifth in the other was written as nothing at all."""
    schema: dict[str, Any] = {"type": "integer"}
    good, bad = "7", '"x"'
    for number in range(12):
        if number % 2:
            schema = {"type": "array", "items": schema}
            good, bad = f"[{good}, {good}]", f"[{bad}]"
        else:
            schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
            good, bad = f'{{"a": {good}}}', f'{{"a": {bad}}}'
    parameters = {"type": "object", "properties": {"b": schema}, "required": ["b"], "additionalProperties": False}
    grammar = format.grammar([Tool("f", parameters, is_strict=True)], "required")
    assert grammar is not None
    assert bench.follows(grammar, format.text_of([("f", f'{{"b": {good}}}')]))
    assert not bench.follows(grammar, format.text_of([("f", f'{{"b": {bad}}}')]))
    assert not bench.follows(grammar, format.text_of([("f", '{"b": []}')]).replace("[]", ""))
