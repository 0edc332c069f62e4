"""Replies that call, and replies that only look so, in every format: no call is lost, and none is invented."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from radixlm.runtime.chat.tools.arguments import JSON
from radixlm.runtime.chat.tools.literal_arguments import LiteralArguments
from radixlm.runtime.chat.tools.tool_format import ToolFormat

from ..thought_templates import HYBRID, OPENED
from ..tool_templates import CALLS, HARMONY, LLAMA, NO_TOOLS, QWEN, calling
from .scripted import OSLO, TOOLS, USER, Scripted, events
from .test_tool_formats import SPECIALS, anthropic, called_in, chat, responses

TEMPLATES = {name: calling(CALLS[name]) for name in CALLS} | {"hermes": QWEN, "llama3": LLAMA, "plain": NO_TOOLS}
TEMPLATES["deepseek-special"] = TEMPLATES["deepseek"]
TAGS = {
    **SPECIALS,
    "deepseek-special": [f"<｜tool▁{tag}｜>" for tag in ("calls▁begin", "call▁begin", "sep", "call▁end")],
}
NOW = ("now", "{}")
CALL = '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}'
BARE = {
    "bare": CALL,
    "pretty": json.dumps(json.loads(CALL), indent=2),
    "fenced": f"```json\n{CALL}\n```",
    "fenced-without-a-language": f"```\n{CALL}\n```\n",
    "parameters": CALL.replace("arguments", "parameters"),
    "openai": f'{{"type": "function", "function": {CALL}}}',
    "a list": f"[{CALL}]",
    "white space": f"\n {CALL} \n",
    "arguments first": '{"arguments": {"city": "Oslo", "days": 3}, "name": "get_weather"}',
    "in tags": f"<tools>\n{CALL}\n</tools>",
    "in a fence and tags": f"```xml\n<function_call>\n{CALL}\n</function_call>\n```",
}
NO_CALLS = (
    '{"names": ["a"]}',
    '{"person": {"name": "x"}}',
    '{"name": "Alice", "age": 3}',
    '{"name": "now", "age": 3}',
    '{"name": "unknown", "arguments": {}}',
    f'[{CALL[:-1]}, "why": 1}}]',
    f"As in {CALL}",
    f"```json\n{CALL}\n```\nThis is how a call looks.",
    f"First:\n```json\n{CALL}\n```",
    "```python\nprint(1)\n```",
    "<b>now</b>",
    "<tools>",
    f"<tools>\n{CALL}\n</tools>\nThat is how.",
    '{"arguments": {"city": "Oslo"}, "for": "get_weather"}',
)
BEHIND = ("", "\n", "\n\n", " ", "\n \t", "Done.", "\nDone", "\n<b>", '\n{"city": 1}', "\n```")


@pytest.fixture(scope="module", params=TEMPLATES)
def model(request: pytest.FixtureRequest) -> Iterator[Scripted]:
    with Scripted.serving(TEMPLATES[request.param], TAGS.get(request.param, ())) as model:
        yield model


def calls_of(choice: Any) -> list[tuple[str, str]]:
    calls = choice["message"].get("tool_calls", [])
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("behind", BEHIND)
def test_what_stands_behind_a_call_makes_no_other(model: Scripted, behind: str, choice: str) -> None:
    reply = model.reply(model.format.text_of([OSLO]) + behind, tool_choice=choice)
    assert (calls_of(reply), reply["message"]["content"]) == ([OSLO], None)
    assert reply["finish_reason"] == "tool_calls"


def test_a_call_keeps_to_its_schema_and_is_the_only_one_where_one_is_allowed(model: Scripted) -> None:
    called = calls_of(model.reply(model.format.text_of([("get_weather", '{"city": "Oslo", "days": 9}')])))
    assert [(name, json.loads(arguments)["days"] <= 7) for name, arguments in called] == [("get_weather", True)]
    assert calls_of(model.reply(model.format.text_of([OSLO, NOW]), parallel_tool_calls=False)) == [OSLO]


@pytest.mark.parametrize("between", ["", "\n"])
def test_calls_may_be_closed_and_opened_again(model: Scripted, between: str) -> None:
    if not model.format.close:
        pytest.skip("nothing closes several calls")
    reply = model.reply(model.format.text_of([OSLO]) + between + model.format.text_of([NOW]))
    assert (calls_of(reply), reply["message"]["content"]) == ([OSLO, NOW], None)


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_only_looks_like_a_call_is_text(model: Scripted, text: str) -> None:
    reply = model.reply(text)
    assert (reply["message"]["content"], reply["finish_reason"], calls_of(reply)) == (text, "stop", [])
    deltas = [chunk["choices"][0]["delta"] for chunk in events(model.ask(text, stream=True))]
    assert "".join(delta.get("content") or "" for delta in deltas) == text


def test_what_begins_a_call_may_stand_among_words(model: Scripted) -> None:
    if not model.format.is_tagged:
        pytest.skip("a call can only be the beginning of a reply")
    for opening in (*model.format.openings, model.format.trigger):
        text = f"The tag {opening} begins a call."
        assert model.reply(text)["message"]["content"] == text
        called = model.reply(text + model.format.text_of([OSLO]))
        assert (called["message"]["content"], calls_of(called)) == (text, [OSLO])


def test_a_tag_with_the_name_of_a_tool_among_words_is_text(model: Scripted) -> None:
    """The name ended in a call with invented arguments, though the model went on with words."""
    if not model.format.is_tagged or re.search("[a-zA-Z]", model.format.middle):
        pytest.skip("a key or a tag of its own behind the name makes it a call")
    for opening in model.format.openings:
        for behind in (" to look.", "\nto look.", ".", "", " now", " or 1 > 0"):
            text = f"Say {opening}get_weather{model.format.middle.rstrip()}{behind}"
            reply = model.reply(text)
            assert (reply["message"]["content"], calls_of(reply)) == (text, [])


def test_white_space_between_tags_and_around_a_name_loses_no_call(model: Scripted) -> None:
    format = model.format
    whole, lead = format.text_of([OSLO]), format.openings[0]
    spaced = re.sub(r"(?<=[>\]])(?=[<\[{])", "\n", lead)
    says = [whole.replace(lead, spaced, 1)]
    if format.has_blank_before_name:
        says.append(whole.replace(lead, f"{lead}\n", 1))
    if not re.search("[a-zA-Z]", format.middle):
        head = f"{lead}get_weather{format.middle.rstrip()}"
        says.append(whole.replace(head, f"{head}\n", 1))
    for text in says:
        reply = model.reply(text)
        assert (reply["message"]["content"], calls_of(reply)) == (None, [OSLO])


@pytest.mark.parametrize("before", ["```\n", "```xml\n", "\n```json\n"])
def test_the_fence_around_a_call_is_no_content(model: Scripted, before: str) -> None:
    reply = model.reply(f"{before}{model.format.text_of([OSLO])}\n```")
    assert (reply["message"]["content"], calls_of(reply)) == (None, [OSLO])


def test_several_fences_are_several_calls(model: Scripted) -> None:
    if model.format.separator is None:
        pytest.skip("a reply has one call")
    now = '{"name": "now", "arguments": {}}'
    for says in (f"```json\n{CALL}\n```\n\n```json\n{now}\n```", f"<tools>{CALL}</tools>\n<tools>{now}</tools>"):
        assert calls_of(model.reply(says)) == [OSLO, NOW]


@pytest.mark.parametrize("says", BARE.values(), ids=BARE)
def test_a_whole_reply_that_is_a_call_in_json_is_one(model: Scripted, says: str) -> None:
    assert [(name, json.loads(text)) for name, text in calls_of(model.reply(says))] == [(OSLO[0], json.loads(OSLO[1]))]
    deltas = [chunk["choices"][0] for chunk in events(model.ask(says, stream=True))]
    assert deltas[-1]["finish_reason"] == "tool_calls"
    assert not any(each["delta"].get("content") for each in deltas)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_no_json_can_say_is_not_in_arguments(stream: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    with Scripted.serving(QWEN) as model:
        says = r'{"name": "f", "arguments": {"a": "b\ud83d"}}'
        assert called_in(model.ask(says, tools=tools, stream=stream), is_stream=stream) == (
            "",
            [("f", '{"a": "b\ufffd"}')],
        )
        says = '{"name": "f", "arguments": {"a": 1e999}}'
        assert called_in(model.ask(says, tools=tools, stream=stream), is_stream=stream) == (says, [])


def test_json_is_no_call_where_replies_keep_to_a_schema(model: Scripted) -> None:
    schema = {"type": "object", "properties": {"name": {}, "arguments": {}}, "required": ["name", "arguments"]}
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    text = f"{CALL[:-2]}}}}}" if model.format.is_tagged else '{"arguments": {}, "name": "now"}'
    reply = model.reply(text, response_format=format)
    assert model.format.trigger == "{" or (calls_of(reply) == [] and reply["message"]["content"] == text)


def test_a_call_without_the_tags_before_it_is_one(model: Scripted) -> None:
    whole = model.format.text_of([OSLO])
    opening, *others = model.format.openings
    for other in others:
        says = f"I will look.\n\n{whole.replace(opening, other, 1)}"
        reply = model.reply(says)
        assert (reply["message"]["content"], calls_of(reply)) == ("I will look.", [OSLO])


def test_a_value_ends_before_the_next_tag_without_a_line_feed() -> None:
    tools = [
        {
            "type": "function",
            "function": {"name": "bash", "parameters": {"properties": {"command": {"type": "string"}}}},
        },
        {"type": "function", "function": {"name": "now"}},
    ]
    with Scripted.serving(calling(CALLS["qwen-coder"])) as model:
        for command in ("ls", "echo '</parameter>'", "cat a.xml\n<a>\n</parameter>\n</a>", "a</parameter>\nb"):
            says = (
                f"<tool_call>\n<function=bash>\n<parameter=command>\n{command}</parameter>\n</function>\n</tool_call>\n"
                "<tool_call>\n<function=now>\n</function>\n</tool_call>"
            )
            calls = calls_of(model.reply(says, tools=tools))
            assert [(name, json.loads(arguments)) for name, arguments in calls] == [
                ("bash", {"command": command}),
                ("now", {}),
            ]


def test_a_preamble_may_stand_before_an_answer_and_a_part_for_an_unknown_function_is_text() -> None:
    specials = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")
    with Scripted.serving(HARMONY, specials) as model:
        between = "<|end|><|start|>assistant"
        preamble = f"<|channel|>commentary<|message|>Let me see.{between}"
        reply = model.reply(f"{preamble}<|channel|>final<|message|>It rains.")
        assert (reply["message"]["content"], calls_of(reply)) == ("Let me see.It rains.", [])
        head = "<|channel|>commentary to=functions.get_money <|constrain|>json<|message|>"
        assert calls_of(model.reply(f"{head}{{}}")) == []
        called = head.replace("get_money", "get_weather") + OSLO[1]
        for behind in ("", "\n", "\nDone."):
            assert calls_of(model.reply(called + behind)) == [OSLO]


def test_a_reply_may_end_inside_its_reasoning_and_says_so() -> None:
    with Scripted.serving(HYBRID) as model:
        for fields in ({}, {"tool_choice": "none"}, {"tools": None}):
            reply = model.reply("<think>\nhm.", **fields)
            assert (reply["finish_reason"], reply["message"]["reasoning_content"]) == ("stop", "hm.")
            assert reply["ended_in_reasoning"] is True
            assert model.reply("<think>", **fields)["ended_in_reasoning"] is True
        last = events(model.ask("<think>\nhm.", stream=True))[-1]["choices"][0]
        assert last["ended_in_reasoning"] is True
        assert "ended_in_reasoning" not in model.reply("<think>\nhm.\n</think>\n\nYes.")
        cut = model.reply("<think>\nhm. hm. hm.", max_tokens=5)
        assert cut["finish_reason"] == "length" and "ended_in_reasoning" not in cut


def test_a_tag_that_the_prompt_has_is_dropped_where_the_model_writes_it_again() -> None:
    with Scripted.serving(OPENED) as model:
        reply = model.reply("<think>\nhm\n</think>\n\nYes.", tools=None)
        assert (reply["message"]["reasoning_content"], reply["message"]["content"]) == ("hm", "Yes.")
        assert model.reply("hm\n</think>\n\nYes.", [USER], tools=None)["message"]["reasoning_content"] == "hm"


def test_a_message_that_ends_inside_its_reasoning_says_so_in_every_api() -> None:
    with Scripted.serving(HYBRID) as model:
        model.say("<think>\nhm.")
        body = {"messages": [USER], "max_tokens": 50, "temperature": 0}
        assert model.client.post("/v1/messages", json=body).json()["ended_in_reasoning"] is True
        model.say("<think>\nhm.")
        body = {"input": "Hi", "max_output_tokens": 50, "temperature": 0}
        assert model.client.post("/v1/responses", json=body).json()["ended_in_reasoning"] is True


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", [chat, anthropic, responses])
def test_a_call_in_a_fence_is_a_call_in_every_api(dialect: Any, stream: bool) -> None:
    with Scripted.serving(QWEN) as model:
        model.say(BARE["fenced"])
        response = dialect(model, [USER], stream=stream, temperature=0.0, max_tokens=300)
        assert called_in(response, is_stream=stream) == ("", [OSLO])


ORDERED = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "b": {"type": "integer"},
        "c": {"type": "string"},
        "d": {"type": "boolean"},
    },
    "required": ["b"],
}


@pytest.mark.parametrize("keys", ["b", "cba", "dbac", "bdca", "acdb"])
def test_arguments_that_are_not_required_may_come_in_any_order(model: Scripted, keys: str) -> None:
    if model.format.arguments is JSON:
        pytest.skip("the library keeps members of JSON objects in the order of their schema")
    values = {"a": "x", "b": 1, "c": "y", "d": True}
    arguments = {key: values[key] for key in keys}
    tools = [{"type": "function", "function": {"name": "f", "parameters": ORDERED}}]
    for choice in ("auto", "required"):
        written = unsorted(model.format).text_of([("f", json.dumps(arguments))])
        [(name, text)] = calls_of(model.reply(written, tools=tools, tool_choice=choice))
        assert (name, list(json.loads(text).items())) == ("f", list(arguments.items()))


def unsorted(format: ToolFormat) -> ToolFormat:
    """A format whose template sorts arguments, writing them as they come."""
    return (
        replace(format, arguments=AsTheyCome(**vars(format.arguments)))
        if hasattr(format.arguments, "quote")
        else format
    )


class AsTheyCome(LiteralArguments):
    def in_order(self, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
        return list(values.items())


WRONG = [
    {"town": "Oslo"},
    {"city": 5, "days": "three"},
    {},
    {"city": "Oslo", "days": 9, "more": None},
]
NO_ARGUMENTS: list[Any] = ["Oslo", ["Oslo"], 5, None, True, '"Oslo"', "{", ""]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("fence", ["{}", "```json\n{}\n```"], ids=["bare", "fenced"])
def test_json_as_a_whole_reply_is_passed_on_as_it_is_and_a_call_only_with_an_object(fence: str, stream: bool) -> None:
    """Agents tell a model what is wrong with its arguments; what no tool can be asked with is no call."""
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]  # type: ignore[dict-item]
    with Scripted.serving(QWEN) as model:
        for tools in (TOOLS, strict):
            for arguments in WRONG:
                says = fence.replace("{}", json.dumps({"name": "get_weather", "arguments": arguments}))
                content, [(name, text)] = called_in(model.ask(says, tools=tools, stream=stream), is_stream=stream)
                assert (content, name, json.loads(text)) == ("", "get_weather", arguments)
        for value in NO_ARGUMENTS:
            says = fence.replace("{}", json.dumps({"name": "get_weather", "arguments": value}))
            assert called_in(model.ask(says, stream=stream), is_stream=stream) == (says, [])
        for name in ("get_money", "", None, 5, ["now"]):
            says = fence.replace("{}", json.dumps({"name": name, "arguments": {}}))
            assert called_in(model.ask(says, stream=stream), is_stream=stream) == (says, [])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_call_inside_of_reasoning_is_none(stream: bool) -> None:
    with Scripted.serving(HYBRID) as model:
        call = model.format.text_of([OSLO])
        for thought in (call, f"I could {call} or not", f"```json\n{call}\n```", f"hm {call[:20]}"):
            for answer, expected in (("Done.", ("Done.", [])), (call, ("", [OSLO]))):
                says = f"<think>\n{thought}\n</think>\n\n{answer}"
                assert called_in(model.ask(says, stream=stream), is_stream=stream) == expected
        assert called_in(model.ask(f"<think>\n{call}", stream=stream), is_stream=stream) == ("", [])
