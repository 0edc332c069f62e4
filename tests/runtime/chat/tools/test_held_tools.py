"""As much of tools' schemas as a grammar has room for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from radixlm.runtime.chat.grammar import MAX_GRAMMAR_LENGTH, Grammar
from radixlm.runtime.chat.tools.arguments import Schema
from radixlm.runtime.chat.tools.known_formats import GEMMA, HARMONY, HERMES, LFM, QWEN_CODER
from radixlm.runtime.chat.tools.tool_enforcement import ToolEnforcement
from radixlm.runtime.chat.tools.tool_format import Tool, ToolChoice, ToolFormat
from radixlm.runtime.errors import InvalidGrammar, InvalidParameter

from ..test_grammars import Bench
from .test_tool_format import FORMATS, NOW, WEATHER


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench("smollm2")
    yield bench
    bench.grammars.close()


def held(format: ToolFormat, tools: list[Tool], content: Grammar | None = None) -> ToolEnforcement:
    def field_of(place: int) -> str:
        return f"tools[{place}].parameters"

    return ToolEnforcement(format, tools, "auto", is_parallel=True, content=content, field_of=field_of)


@pytest.mark.parametrize("format", [*FORMATS.values(), HARMONY], ids=[*FORMATS, "harmony"])
def test_five_hundred_long_names_have_room_in_every_format(format: ToolFormat) -> None:
    long = {"type": "object", "properties": {f"argument_{number}": {"type": "string"} for number in range(9)}}
    tools = [NOW, *(Tool(f"{number:03}" + "n" * 61, long) for number in range(511))]
    found = held(format, tools)
    assert found.grammar is not None and len(found.grammar.text) <= MAX_GRAMMAR_LENGTH
    assert 0 < len(found.loose) < 512 and 0 not in found.loose
    assert all(tool.name in found.grammar.text for tool in tools)


def test_what_is_wrong_with_a_form_of_replies_is_no_fault_of_tools() -> None:
    with pytest.raises(InvalidGrammar, match="is not an object"):
        held(HERMES, [NOW], Grammar("json_schema", "[1]"))
    found = held(HERMES, [NOW], Grammar.json_object())
    assert found.grammar is not None
    content = found.grammar.text.split("\n").index(
        next(line for line in found.grammar.text.split("\n") if line.startswith("content:"))
    )
    error = InvalidGrammar("it is odd", line=content + 1)
    with pytest.raises(InvalidGrammar) as raised:
        found.loosen(error)
    assert raised.value is error and not found.loose


def test_only_what_is_to_blame_is_let_go_of_and_strict_tools_never_are() -> None:
    assert WEATHER.is_strict
    found = held(HERMES, [WEATHER, NOW])
    assert found.grammar is not None and found.loose == []
    lines = found.grammar.text.split("\n")
    at = {
        place: next(i for i, line in enumerate(lines, 1) if line.startswith(f"arguments_{place}:")) for place in (0, 1)
    }
    with pytest.raises(InvalidParameter, match=r"tools\[0\].parameters: odd"):
        found.loosen(InvalidGrammar("odd", line=at[0]))
    found.loosen(InvalidGrammar("odd", line=at[1]))
    assert found.loose == [1]
    found.loosen(InvalidGrammar("odd", line=at[1]))
    with pytest.raises(InvalidParameter, match=r"tools\[1\].parameters: odd"):
        found.loosen(InvalidGrammar("odd", line=at[1]))
    with pytest.raises(InvalidParameter, match="tools: slow"):
        found.loosen(InvalidGrammar("slow"))


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("num_values", [12, 13, 14, 15, 16, 17])
def test_as_many_schemas_as_have_room_are_enforced(choice: ToolChoice, num_values: int) -> None:
    tools = [
        Tool(f"tool_{number}", {"properties": {f"a{number}": {"enum": [f"{number} {at}" for at in range(num_values)]}}})
        for number in range(512)
    ]
    found = ToolEnforcement(HERMES, tools, choice, is_parallel=True, content=None, field_of=str)
    assert found.grammar is not None and 0.95 * MAX_GRAMMAR_LENGTH < len(found.grammar.text) <= MAX_GRAMMAR_LENGTH
    assert found.loose


@pytest.mark.parametrize(
    ("parameters", "is_more_allowed"),
    [
        ({"oneOf": [{"properties": {"b": {"type": "integer"}}}, {"required": ["a"]}]}, True),
        ({"$ref": "#/$defs/more", "$defs": {"more": {"properties": {"b": {}}}}}, True),
        ({"patternProperties": {"^b": {}}, "additionalProperties": False}, True),
        ({"allOf": [{"patternProperties": {"^b": {}}}]}, True),
        ({"anyOf": [{"required": ["a"]}, {"properties": {"a": {"const": "x"}}}]}, False),
    ],
    ids=["oneOf", "$ref", "pattern", "pattern in allOf", "no more names"],
)
@pytest.mark.parametrize("format", [QWEN_CODER, GEMMA, LFM], ids=["qwen-coder", "gemma", "lfm"])
def test_arguments_that_are_described_besides_the_properties_are_allowed_and_not_all_enforced(
    bench: Bench, format: ToolFormat, parameters: Schema, is_more_allowed: bool
) -> None:
    """They were forbidden, and the schema was said to be enforced."""
    tool = Tool("f", {"type": "object", "properties": {"a": {"type": "string"}}, **parameters})
    enforcement = held(format, [tool])
    assert enforcement.grammar is not None and enforcement.loose == [0] and held(HERMES, [tool]).loose == []
    assert bench.follows(enforcement.grammar, format.text_of([("f", '{"a": "x"}')]))
    assert bench.follows(enforcement.grammar, format.text_of([("f", '{"b": 5, "a": "x"}')])) is is_more_allowed
