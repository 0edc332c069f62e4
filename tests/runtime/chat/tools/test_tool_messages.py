"""Calls in messages that come through the Python API, where no type holds them to a shape."""

from __future__ import annotations

from typing import Any

import pytest
from radixlm.runtime.chat.tools.known_formats import HERMES, PLAIN
from radixlm.runtime.chat.tools.tool_format import ToolFormat
from radixlm.runtime.chat.tools.tool_messages import for_template
from radixlm.runtime.errors import InvalidRequest


def said(*calls: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": list(calls)}]


@pytest.mark.parametrize("format", [HERMES, PLAIN])
@pytest.mark.parametrize(
    "call",
    [
        "f",
        {},
        {"function": "f"},
        {"function": {"name": "f"}},
        {"function": {"arguments": "{}"}},
        {"function": {"name": True, "arguments": "{}"}},
        {"function": {"name": "f", "arguments": 5}},
        {"function": {"name": "f", "arguments": ["a"]}},
    ],
)
def test_a_call_of_another_shape_is_refused_and_named(format: ToolFormat, call: object) -> None:
    """Each of these was a KeyError or a TypeError, which says nothing of the message."""
    with pytest.raises(InvalidRequest, match=r"(tool_calls is|arguments of the call of 'f')"):
        for_template(said(call), (), format)


@pytest.mark.parametrize("format", [HERMES, PLAIN])
def test_arguments_may_be_values_already(format: ToolFormat) -> None:
    texts = [
        for_template(said({"id": "1", "function": {"name": "f", "arguments": arguments}}), (), format)[0][1]
        for arguments in ({"q": "é"}, '{"q": "é"}')
    ]
    assert texts[0] == texts[1]


def test_an_id_of_a_call_may_be_anything() -> None:
    messages = [*said({"id": {"a": 1}, "function": {"name": "f", "arguments": "{}"}})]
    told, _ = for_template([*messages, {"role": "tool", "tool_call_id": {"a": 1}, "content": "c"}], (), PLAIN)
    assert told[-1]["content"] == "Result of f: c"
