"""Replies in every format, cut anywhere: the calls are the same, and no text is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from radixlm.runtime.chat.tools.known_formats import KNOWN, PLAIN
from radixlm.runtime.chat.tools.schema_types import type_of
from radixlm.runtime.chat.tools.tool_calls import ReadReply, ToolCallReader
from radixlm.runtime.chat.tools.tool_format import ToolFormat

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
    if any(head + name in text or (not head and name + middle in text) for name in NAMES):
        return
    assert read(format, list(text)).content == text
