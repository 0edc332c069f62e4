"""Replies in every format, cut anywhere: the calls are the same, and no text is lost."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from radixlm.runtime.chat.tools.arguments import JSON, LOOSE_JSON, read_cut
from radixlm.runtime.chat.tools.known_formats import KNOWN, PLAIN
from radixlm.runtime.chat.tools.schema_types import type_of
from radixlm.runtime.chat.tools.tagged_arguments import TaggedArguments
from radixlm.runtime.chat.tools.tool_calls import ReadReply, ToolCallReader, read_reply
from radixlm.runtime.chat.tools.tool_format import Tool, ToolFormat

FORMATS = (*KNOWN, PLAIN)
NAMES = ("now", "nowhere", "get_weather")
TEXTS = st.text("aß€😀 \n<>/{}[]'\"=,:|\\", max_size=9)
TEXTS |= st.sampled_from(
    ["12", "true", "None", "<", "</", "'", '"', "\\", "\n", "{", "}]", "a <b> c", " ", ", ", "x=1"]
)
VALUES = st.recursive(
    TEXTS | st.integers(-99, 99) | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False),
    lambda values: st.lists(values, max_size=2) | st.dictionaries(st.sampled_from("abc"), values, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b", "long_name"]), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)


def read(format: ToolFormat, pieces: list[str], schemas: dict[str, Any] | None = None) -> ReadReply:
    reader, reply = ToolCallReader(format, NAMES, schemas=schemas), ReadReply()
    for piece in pieces:
        for part in reader.push(piece):
            reply.add(part)
    for part in reader.finish():
        reply.add(part)
    return reply


def said(format: ToolFormat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    return format.text_of([(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls])


def typed(arguments: dict[str, Any]) -> dict[str, Any]:
    """A schema that the arguments fit."""
    return {"properties": {key: {"type": type_of(value)} for key, value in arguments.items()}}


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.begin + format.middle)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_however_calls_are_cut_in_pieces_they_are_the_same(format: ToolFormat, data: st.DataObject) -> None:
    calls = data.draw(CALLS if format.separator is not None else CALLS.map(lambda calls: calls[:1]))
    schemas = {name: typed(arguments) for name, arguments in calls}
    calls = [(name, arguments) for name, arguments in calls if typed(arguments) == schemas[name]]
    lead = data.draw(st.sampled_from(["", "Let me see."])) if format.is_tagged else ""
    text = lead + said(format, calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    reply = read(format, pieces, schemas)
    assert reply.content == lead
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == calls
    letters = read(format, list(text), schemas)
    assert [(call.name, call.arguments) for call in letters.calls] == [(c.name, c.arguments) for c in reply.calls]


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.begin + format.middle)
def test_wherever_a_call_is_cut_all_that_is_known_of_it_is_said(format: ToolFormat) -> None:
    arguments = {"a": "x < y", "b": 12, "long_name": {"c": [None, "d"]}}
    text = said(format, [("now", arguments)])
    schemas = {"now": typed(arguments)}
    whole = read(format, [text], schemas).calls[0].arguments
    is_called, longest = False, ""
    for end in range(1, len(text) + 1):
        reply = read(format, [text[:end]], schemas)
        if not reply.calls:
            assert reply.content == text[:end] and not is_called
            continue
        is_called = True
        [call] = reply.calls
        assert reply.content == "" and whole.startswith(call.arguments) and call.arguments.startswith(longest)
        longest = call.arguments
    assert longest == whole and json.loads(whole) == arguments


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.begin + format.middle)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_is_no_call_is_content_as_it_is(format: ToolFormat, data: st.DataObject) -> None:
    head, middle = format.open + format.begin, format.middle
    piece = st.sampled_from([format.trigger, format.open, format.begin, middle, format.end, "now", "{", "}", " ", "a"])
    text = "".join(data.draw(st.lists(piece, max_size=6)))
    names = "|".join(map(re.escape, NAMES))  # white space before a name loses no call
    if re.search(rf"{re.escape(head)}\s*({names})" if head else f"({names}){re.escape(middle)}", text):
        return
    # a call before its opening is read as one
    if (
        format.open
        and format.begin
        and re.search(rf"{re.escape(format.begin)}\s*({names}).*{re.escape(format.trigger)}", text, re.DOTALL)
    ):
        return
    assert read(format, list(text)).content == text


ANY_TYPES = {
    name: {"properties": {"a": {"type": "string"}, "b": {}, "c": {"type": ["string", "null"]}}} for name in NAMES
}


def fragments(format: ToolFormat) -> st.SearchStrategy[str]:
    """Pieces of replies: what the format writes, whole calls, JSON that may be one, and all that text may have."""
    style = format.arguments
    marks = [
        getattr(style, name, "") or "" for name in ("open", "between", "close", "before_string", "quote", "assign")
    ]
    tags = [format.open, format.begin, format.middle, format.end, format.close, format.trigger, *marks]
    values = st.sampled_from(["x", "", "l\nf", "q\"'\\", "😀", None, True, 5, [1, {"z": "</a>"}], *tags])
    arguments = st.dictionaries(st.sampled_from("abc"), values, max_size=3)
    calls = st.tuples(st.sampled_from(NAMES), arguments).map(lambda call: said(format, [call]))
    plain = st.sampled_from(
        [
            *NAMES,
            '{"name": "now", "arguments": {}}',
            "```json\n",
            "<tools>",
            "\n```",
            "\n",
            "\r\n",
            " ",
            "{",
            "}",
            "[",
            "]",
            "<",
            "</",
        ]
    )
    return st.sampled_from(tags) | calls | plain | st.text("aß😀\"'\\=,:()-1", max_size=3)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.begin + format.middle)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_reply_of_any_shape_says_the_same_however_it_comes(format: ToolFormat, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(fragments(format), max_size=8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    whole = outcome(read(format, [text], ANY_TYPES))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert outcome(read(format, pieces, ANY_TYPES)) == whole
    assert outcome(read(format, list(text), ANY_TYPES)) == whole


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.begin + format.middle)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_reply_that_is_cut_has_the_beginnings_of_its_calls_and_no_other(
    format: ToolFormat, data: st.DataObject
) -> None:
    values = st.sampled_from(["x", "12 apples", "l\nf", "😀", None, True, 5, -1.5, [1, {"z": "</a>"}], {"y": "None"}])
    arguments = st.dictionaries(st.sampled_from("abc"), values, max_size=3)
    drawn = st.lists(
        st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3, unique_by=lambda call: call[0]
    )
    calls = data.draw(drawn)
    calls = calls if format.separator is not None else calls[:1]
    schemas = {name: typed(values) for name, values in calls}
    text = ("Let me see. " if format.is_tagged else "") + said(format, calls)
    _, whole = outcome(read(format, [text], schemas))
    for end in range(data.draw(st.integers(0, 6)), len(text), 7):  # all of them take a second for each call
        _, found = outcome(read(format, [text[:end]], schemas))
        assert len(found) <= len(whole)
        for (name, begun), (expected, all_of_it) in zip(found, whole, strict=False):
            assert name == expected and all_of_it.startswith(begun)


def outcome(reply: ReadReply) -> tuple[str, list[tuple[str, str]]]:
    return reply.content, [(call.name, call.arguments) for call in reply.calls]


@pytest.mark.parametrize(
    ("types", "value"),
    [(["string", "null"], "5 apples"), (["string", "null"], None), (["integer"], 12), ({}, "😀"), ({}, [True, "x"])],
)
def test_a_value_that_is_cut_is_the_beginning_of_its_json(types: Any, value: Any) -> None:
    schema = {"now": {"properties": {"a": {"type": types} if types else {}}}}
    for format in FORMATS:
        text = said(format, [("now", {"a": value})])
        [(_, whole)] = outcome(read(format, [text], schema))[1]
        for end in range(len(text)):
            _, found = outcome(read(format, [text[:end]], schema))
            assert all(whole.startswith(begun) for _, begun in found), (format, text[:end])


def test_a_value_ends_at_the_last_tag_before_the_next_that_belongs_to_the_call() -> None:
    """Where a value has all that ends a call, no reader can tell it from the end."""
    values = [
        "</parameter>",
        "a\n</parameter>\nb",
        "<parameter=x>\n1\n</parameter> </a>",
        "</function>",
        "</tool_call>",
    ]
    for format in FORMATS:
        style = format.arguments
        if not isinstance(style, TaggedArguments):
            continue
        close = style.close.strip()
        for value in [
            *values,
            close,
            f"a{close}b",
            f"a{close}\n",
            f"{close}{close}",
            style.open,
            style.close * 2 + "x",
        ]:
            calls = [("now", {"a": value, "b": "x"}), ("get_weather", {"a": value})]
            calls = calls if format.separator is not None else calls[:1]
            schemas = {name: typed(arguments) for name, arguments in calls}
            text = said(format, calls)
            for pieces in ([text], list(text)):
                found = outcome(read(format, pieces, schemas))
                assert [(name, json.loads(arguments)) for name, arguments in found[1]] == calls


def test_of_an_argument_that_comes_twice_the_first_is_taken() -> None:
    """JSON had its key twice, which some readers refuse."""
    for format in FORMATS:
        if format.arguments in (JSON, LOOSE_JSON):
            continue
        first, second = ({"a": value, "b": 1} for value in ("x", "y"))
        once, again = (format.arguments.written(json.dumps(each)) for each in (first, second))
        opener, closer = getattr(format.arguments, "opener", ""), getattr(format.arguments, "closer", "")
        if not isinstance(format.arguments, TaggedArguments):
            once, again = once.removesuffix(closer) + format.arguments.comma, again.removeprefix(opener)
        for value in ("2", "{}", "[1, 2]", "null"):
            text = format.head("now") + once + again.replace("1", value) + format.tail() + format.close
            for pieces in ([text], list(text)):
                [(name, arguments)] = outcome(read(format, pieces, {"now": typed(first)}))[1]
                assert (name, json.loads(arguments, object_pairs_hook=list)) == ("now", list(first.items()))
        for end in range(len(text)):
            for _, begun in outcome(read(format, [text[:end]], {"now": typed(first)}))[1]:
                assert begun.count('"a"') <= 1 and begun.count('"b"') <= 1


OBJECT = {"type": "object", "properties": {"content": {"type": "string"}, "n": {"type": "integer"}}}


@pytest.mark.parametrize(
    "parameters",
    [
        OBJECT,
        {"$ref": "#/$defs/file", "$defs": {"file": OBJECT}},
        {"type": "object", "allOf": [{"$ref": "#/definitions/file"}], "definitions": {"file": OBJECT}},
        {"type": "object", "oneOf": [OBJECT, {"properties": {"path": {"type": "string"}}}]},
    ],
    ids=["properties", "$ref", "allOf", "oneOf"],
)
@pytest.mark.parametrize("value", ['{"a": 1}', "42", "true", "None"])
def test_a_string_between_tags_stays_one_wherever_a_schema_describes_it(parameters: Any, value: str) -> None:
    """A file's text became an object or a number, because only the properties of the outermost schema were read."""
    for format in FORMATS:
        if isinstance(format.arguments, TaggedArguments):
            arguments = {"content": value, "n": 7}
            reply = read_reply(said(format, [("write", arguments)]), format, [Tool("write", parameters)])
            assert [json.loads(call.arguments) for call in reply.calls] == [arguments]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (r'{"a": "x\ud83d', {"a": "x\ufffd"}),
        (r'{"\ude00": ["\ud83d", {"b\ud83d": 1}]}', {"\ufffd": ["\ufffd", {"b\ufffd": 1}]}),
        (r'{"a": "\ud83d\ude00"}', {"a": "😀"}),
        ('{"a": [1e400, -1e400, 0.5]}', {"a": [sys.float_info.max, -sys.float_info.max, 0.5]}),
    ],
)
def test_what_is_read_of_arguments_can_be_encoded(text: str, read: dict[str, Any]) -> None:
    """A lone surrogate could not, and ended the reply; a number above all floats became null."""
    assert read_cut(text) == read
    json.dumps(read_cut(text), ensure_ascii=False, allow_nan=False).encode()
