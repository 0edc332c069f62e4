"""Literals as models write them, and strings that cannot be held to a schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from radixlm.runtime.chat.tools.known_formats import FUNCTION_GEMMA, GEMMA, LFM, QWEN_CODER
from radixlm.runtime.chat.tools.literal_reader import LiteralReader
from radixlm.runtime.chat.tools.tool_format import Tool
from radixlm.runtime.errors import InvalidGrammar


def read(text: str, quote: str | None) -> Any:
    reader = LiteralReader(quote)
    written = "".join(map(reader.push, text))
    assert reader.is_whole and not reader.rest
    return json.loads(written)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"""(a='x\n\t\'\"\\ \u00e9\x41\d', b="it's")""", {"a": "x\n\t'\"\\ éA\\d", "b": "it's"}),
        (r"(a='\ud83d\ude00 \U0001f600')", {"a": "😀 😀"}),
        ("(a=True, b=None, c=[1, -2.5, 'x',], d={'k': False, \"l\": null})", None),
        ("()", {}),
    ],
)
def test_pythons_literals_become_json(text: str, value: Any) -> None:
    wanted = {"a": True, "b": None, "c": [1, -2.5, "x"], "d": {"k": False, "l": None}}
    assert read(text, None) == (wanted if value is None else value)


def test_gemmas_literals_become_json() -> None:
    text = """{city:<|"|>St. "John" <3<|"|>,days:3,of:{a:[true,null,<|"|>x<|"|>],b:None}}"""
    assert read(text, '<|"|>') == {"city": 'St. "John" <3', "days": 3, "of": {"a": [True, None, "x"], "b": None}}


@pytest.mark.parametrize("style", [LFM.arguments, GEMMA.arguments, FUNCTION_GEMMA.arguments])
def test_a_name_may_have_any_letters_but_those_between_names_and_values(style: Any) -> None:
    """What came of the first two was no JSON."""
    arguments = {"my key": "a=b", "<b>'s": {"c": 1}, "a-b.c": [True], "ü": None}
    assert read(style.written(json.dumps(arguments)), style.quote) == arguments


def test_spaces_around_names_are_not_theirs() -> None:
    assert read("( a = 1 , b = {'c d' : 2})", None) == {"a": 1, "b": {"c d": 2}}


@pytest.mark.parametrize("format", [QWEN_CODER, GEMMA], ids=["tags", "literals"])
@pytest.mark.parametrize("is_optional", [False, True], ids=["string", "string-or-null"])
def test_a_strict_string_that_cannot_be_enforced_without_quotes_is_refused(format: Any, is_optional: bool) -> None:
    text = {"type": "string", "pattern": "^a+$"}
    asked = {"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]} if is_optional else text
    parameters = {"type": "object", "properties": {"a": asked}, "$defs": {"text": text}}
    with pytest.raises(InvalidGrammar, match="pattern"):
        format.grammar([Tool("f", parameters, is_strict=True)], "auto")
    assert format.grammar([Tool("f", parameters)], "auto") is not None
