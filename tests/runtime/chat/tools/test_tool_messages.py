"""Calls in messages that come through the Python API, where no type holds them to a shape."""

from __future__ import annotations

from typing import Any

import pytest
from radixlm.runtime.chat.chat_template import ChatTemplate
from radixlm.runtime.chat.reasoning_format import reasoning_format_of
from radixlm.runtime.chat.tools.known_formats import HARMONY, HERMES, KIMI, LLAMA3, MISTRAL_IDS, PLAIN, format_of
from radixlm.runtime.chat.tools.tool_format import Tool, ToolFormat
from radixlm.runtime.chat.tools.tool_messages import for_template
from radixlm.runtime.errors import InvalidRequest

from ...compared_id import Id
from ...tool_templates import CALLS, QWEN, calling
from ...tool_templates import HARMONY as HARMONY_TEMPLATE
from ...tool_templates import LLAMA as LLAMA_TEMPLATE


def said(*calls: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": list(calls)}]


@pytest.mark.parametrize("format", [HERMES, PLAIN, KIMI, MISTRAL_IDS])
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


BY_IDS = """\
{%- set last = namespace(index=-1) -%}
{%- for m in messages -%}
    {%- if m.role == 'assistant' and not m.get('tool_calls') -%}{%- set last.index = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for tool in tools or [] -%}{{ tool | tojson }}{%- endfor -%}
{%- for m in messages -%}
    <|im_{{ m.role }}|>
    {%- if m.role == 'tool' -%}## Return of {{ m.tool_call_id }}: {% endif -%}
    {%- if m.role == 'assistant' -%}
        <think>{{ m.get('reasoning_content', '') if loop.index0 > last.index else '' }}</think>
    {%- endif -%}
    {{ m.content }}
    {%- if m.get('tool_calls') -%}
        <|tool_calls_section_begin|>
        {%- for call in m.tool_calls -%}
            <|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}
            {{- '<|tool_call_end|>' }}
        {%- endfor -%}
        <|tool_calls_section_end|>
    {%- endif -%}
    <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>{%- endif -%}"""
"""As Kimi K2 Thinking's: it writes the ids of calls, and the thoughts of those that come before the next answer."""


def test_kimis_thoughts_and_calls_stand_in_the_prompt_where_its_template_writes_ids() -> None:
    """Its calls were words, behind which the template drops what was thought."""
    template = ChatTemplate(BY_IDS)
    format, thoughts = format_of(template), reasoning_format_of(template)
    assert format == KIMI and thoughts is not None and thoughts.field == "reasoning_content"
    history: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    for number, name in enumerate("fgf"):
        call = {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        thought = {"reasoning_content": f"Thought {number}."}
        history.append({"role": "assistant", "content": "", "tool_calls": [call], **thought})
        history.append({"role": "tool", "tool_call_id": f"call_{number}", "content": "c"})
    told, tools = for_template(history, [Tool("f", {"type": "object"}).for_template()], format)
    text = template.render(thoughts.for_template(told), tools=tools)
    for number, name in enumerate("fgf"):
        made = f"functions.{name}:{number}"
        assert f"<think>Thought {number}.</think><|tool_calls_section_begin|><|tool_call_begin|>{made}<|" in text
        assert f"## Return of {made}: c" in text


def test_each_of_several_calls_stands_before_its_result_where_a_template_renders_one() -> None:
    """gpt-oss's template renders the first call of a message, and names each result by the call before it."""
    called = [{"id": f"call_{name}", "function": {"name": name, "arguments": "{}"}} for name in "fgh"]
    history = said(*called)
    history[1] |= {"thinking": "Hm."}
    results = [{"role": "tool", "tool_call_id": f"call_{name}", "content": f"of {name}"} for name in "gfx"]
    told, _ = for_template([*history, *results, {"role": "user", "content": "b"}], (), HARMONY)
    names: list[Any] = [message.get("tool_calls", [{}])[0] for message in map(dict[str, Any], told)]
    said_of = [
        call["function"]["name"] if call else message["content"] for call, message in zip(names, told, strict=True)
    ]
    assert said_of == ["a", "f", "of f", "g", "of g", "h", "of x", "b"]
    text = ChatTemplate(HARMONY_TEMPLATE).render(told)
    assert all(text.count(f" to=functions.{name}<") == 1 for name in "fgh")
    assert text.count("Hm.") == 1


def test_several_calls_of_a_message_are_rendered_where_a_template_refuses_more_than_one() -> None:
    """Llama 3's does: a history that another model began was refused whole."""
    called = [{"id": f"call_{name}", "function": {"name": name, "arguments": "{}"}} for name in "fg"]
    results = [{"role": "tool", "tool_call_id": f"call_{name}", "content": f"of {name}"} for name in "fg"]
    told, tools = for_template([*said(*called), *results], (), LLAMA3)
    text = ChatTemplate(LLAMA_TEMPLATE).render(told, tools=tools)
    places = [text.index(each) for each in ('"f"', "of f", '"g"', "of g")]
    assert places == sorted(places)


def test_calls_of_one_id_have_a_result_each_where_a_template_renders_one_call() -> None:
    """Each had the results of both."""
    called = [{"id": "call_1", "function": {"name": name, "arguments": "{}"}} for name in "fg"]
    results = [{"role": "tool", "tool_call_id": "call_1", "content": f"of {name}"} for name in "fg"]
    told, _ = for_template([*said(*called), *results], (), HARMONY)
    assert [message["content"] for message in told if message["role"] == "tool"] == ["of f", "of g"]
    assert [message["role"] for message in told] == ["user", "assistant", "tool", "assistant", "tool"]


def test_an_answer_without_calls_has_no_field_for_them_where_a_template_asks_for_the_field() -> None:
    assert "tool_calls" not in for_template(said(), (), HARMONY)[0][1]


def test_calls_may_be_a_tuple_where_ids_are_short() -> None:
    history = said({"id": "call_1", "function": {"name": "f", "arguments": "{}"}})
    listed = for_template(history, (), MISTRAL_IDS)[0]
    history[1]["tool_calls"] = tuple(history[1]["tool_calls"])
    assert for_template(history, (), MISTRAL_IDS)[0] == listed


def test_results_find_their_calls_at_once() -> None:
    """Each call was looked for among all results, and each among all calls: a minute for a body of megabytes."""
    ids = [Id(f"c{number}") for number in range(500)]
    calls = [{"id": each, "function": {"name": "f", "arguments": "{}"}} for each in ids]
    results = [{"role": "tool", "tool_call_id": Id(each), "content": str(each)} for each in reversed(ids)]
    before = Id.num_compared
    told, _ = for_template([*said(*calls), *results], (), LLAMA3)
    assert [each["content"] for each in told if each["role"] == "tool"] == [str(each) for each in ids]
    assert Id.num_compared - before < 20 * len(ids)


def test_results_of_calls_with_one_id_are_told_in_their_order() -> None:
    calls = [{"id": each, "function": {"name": "f", "arguments": "{}"}} for each in ("a", "b", "a")]
    results = [{"role": "tool", "tool_call_id": i, "content": words} for i, words in zip("xaaab", "01234", strict=True)]
    told, _ = for_template([*said(*calls), *results], (), LLAMA3)
    shown = [each["tool_calls"][0]["id"] if each.get("tool_calls") else each["content"] for each in told[1:]]
    assert shown == ["a", "1", "b", "4", "a", "2", "3", "0"]


CALLED = [{"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}} for name in "fg"]


def result(name: str, content: str = "") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{name}", "content": content or f"of {name}"}


@pytest.mark.parametrize("source", [QWEN, calling(CALLS["qwen-coder"])], ids=["qwen2.5", "qwen-coder"])
def test_results_are_rendered_in_the_order_of_their_calls_where_a_template_writes_no_ids(source: str) -> None:
    """The model read each as the result of the other call: some clients append results as they complete."""
    template = ChatTemplate(source)
    asked, after = said(*CALLED), {"role": "user", "content": "b"}
    texts = [
        template.render(for_template([*asked, *results, after], (), format_of(template))[0])
        for results in ([result("f"), result("g")], [result("g"), result("f")])
    ]
    assert texts[0] == texts[1]
    assert texts[0].index("of f") < texts[0].index("of g")


@pytest.mark.parametrize(
    ("calls", "results", "told"),
    [
        ("fg", "fg", "01"),
        ("fg", "gf", "10"),
        ("fg", "xgf", "210"),
        ("fgh", "hffg", "1230"),
        ("fgf", "fgf", "012"),  # which of the two each is for, is not known
        ("fgf", "gff", "012"),
        ("", "gf", "01"),
    ],
)
def test_only_results_of_known_calls_change_places(calls: str, results: str, told: str) -> None:
    called = [{"id": f"call_{name}", "function": {"name": name, "arguments": "{}"}} for name in calls]
    answers = [result(name, str(number)) for number, name in enumerate(results)]
    history = [*said(*called), *answers, {"role": "user", "content": "b"}, result("g"), result("f")]
    shown = [message["content"] for message in for_template(history, (), HERMES)[0]]
    assert shown == ["a", "", *told, "b", "of g", "of f"]
