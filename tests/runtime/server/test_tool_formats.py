"""Calls in the formats of families, in all three dialects: models that say what a script says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from radixlm.runtime.chat.tools.tool_format import Tool

from ..tool_templates import CALLS, HARMONY, MUSE, SMOLLM3, calling
from .scripted import OSLO, USER, WEATHER, Scripted

SPECIALS = {
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "mistral-ids": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "mistral-list": ("[TOOL_CALLS]",),
    "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "gemma": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "lfm": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "kimi": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
}
NOW = ("now", "{}")


@pytest.fixture(scope="module", params=CALLS)
def model(request: pytest.FixtureRequest) -> Iterator[Scripted]:
    with Scripted.serving(calling(CALLS[request.param]), SPECIALS.get(request.param, ())) as model:
        yield model


def chat(model: Scripted, messages: list[Any], **fields: object) -> Any:
    tools = [
        {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
        {"type": "function", "function": {"name": "now"}},
    ]
    return model.client.post("/v1/chat/completions", json={"messages": messages, "tools": tools, **fields})


def anthropic(model: Scripted, messages: list[Any], **fields: object) -> Any:
    tools = [
        {"name": "get_weather", "input_schema": WEATHER},
        {"name": "now", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
    ]
    return model.client.post("/v1/messages", json={"messages": messages, "tools": tools, **fields})


def responses(model: Scripted, messages: list[Any], **fields: object) -> Any:
    tools = [
        {"type": "function", "name": "get_weather", "parameters": WEATHER},
        {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}},
    ]
    fields["max_output_tokens"] = fields.pop("max_tokens")
    return model.client.post("/v1/responses", json={"input": messages, "tools": tools, **fields})


def called_in(response: Any, *, is_stream: bool) -> tuple[str, list[tuple[str, str]]]:
    """The content of a reply in any dialect, and its calls: names and arguments."""
    assert response.status_code == 200, response.text
    if is_stream:
        lines = response.text.split("\n")
        return _streamed([json.loads(line[6:]) for line in lines if line.startswith("data: {")])
    body = response.json()
    if "choices" in body:
        message = body["choices"][0]["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
        return message["content"] or "", calls
    if "output" in body:
        said = [part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"]]
        calls = [(item["name"], item["arguments"]) for item in body["output"] if item["type"] == "function_call"]
        return "".join(said), calls
    said = [block["text"] for block in body["content"] if block["type"] == "text"]
    calls = [(block["name"], json.dumps(block["input"])) for block in body["content"] if block["type"] == "tool_use"]
    return "".join(said), calls


def _streamed(events: list[Any]) -> tuple[str, list[tuple[str, str]]]:
    content, names, arguments = "", [], []
    for event in events:
        for choice in event.get("choices", ()):
            content += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    names.append(call["function"]["name"])
                    arguments.append("")
                arguments[-1] += call["function"]["arguments"]
        kind, block = event.get("type"), event.get("content_block", {})
        if kind == "content_block_start" and block["type"] == "tool_use":
            names.append(block["name"])
            arguments.append("")
        elif kind == "content_block_delta":
            content += event["delta"].get("text", "")
            if "partial_json" in event["delta"]:
                arguments[-1] += event["delta"]["partial_json"]
        elif kind == "response.output_item.added" and event["item"]["type"] == "function_call":
            names.append(event["item"]["name"])
            arguments.append("")
        elif kind == "response.function_call_arguments.delta":
            arguments[-1] += event["delta"]
        elif kind == "response.output_text.delta":
            content += event["delta"]
    return content, [(name, text or "{}") for name, text in zip(names, arguments, strict=True)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", [chat, anthropic, responses])
def test_calls_are_calls_in_every_dialect(model: Scripted, dialect: Any, stream: bool) -> None:
    model.say("Let me see." + model.format.text_of([OSLO, NOW]))
    response = dialect(model, [USER], stream=stream, temperature=0.0, max_tokens=300)
    assert called_in(response, is_stream=stream) == ("Let me see.", [OSLO, NOW])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", [chat, anthropic, responses])
def test_a_call_that_is_cut_is_not_lost(model: Scripted, dialect: Any, stream: bool) -> None:
    says = model.format.text_of([OSLO])
    model.say(says)
    num_tokens = len(model.engine.encode(says[: says.index("weather")], add_bos=False))
    response = dialect(model, [USER], stream=stream, temperature=0.0, max_tokens=num_tokens)
    content, calls = called_in(response, is_stream=stream)
    assert calls == [] and content and says.startswith(content)


def test_a_conversation_goes_on_from_the_calls_as_they_were_said(model: Scripted) -> None:
    model.say(model.format.text_of([OSLO, NOW], ["abcdefgh1", "abcdefgh2"]))
    first = chat(model, [USER], temperature=0.0, max_tokens=300).json()
    message = first["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in message["tool_calls"]]
    model.say("It rains.")
    second = chat(model, [USER, message, *results], temperature=0.0, max_tokens=300).json()
    assert second["choices"][0]["message"]["content"] == "It rains."
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    num_unknown = 30 if '"id"' in model.format.end else 2  # ids that come behind the arguments are not remembered
    assert cached >= first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"] - num_unknown


def test_what_must_be_called_is_called(model: Scripted) -> None:
    """Though the script says other words."""
    model.say("Only words.")
    body = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0.0, "max_tokens": 200}
    choice = chat(model, [USER], **body).json()["choices"][0]
    text = json.dumps(choice["message"])
    assert re.search("get_weather|now", text) or choice["finish_reason"] == "length"
    assert "Only words" not in text


# gpt-oss, whose replies have parts with headers.

THOUGHT = "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant"
HEADS = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.get_weather<|message|>",
    " to=functions.get_weather<|channel|>commentary json<|message|>",
)


@pytest.fixture(scope="module")
def harmony() -> Iterator[Scripted]:
    specials = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")
    with Scripted.serving(HARMONY, specials) as model:
        yield model


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", [chat, anthropic, responses])
@pytest.mark.parametrize("lead", ["", THOUGHT], ids=["at-once", "after-a-thought"])
@pytest.mark.parametrize("head", HEADS)
def test_a_part_for_a_function_is_a_call(harmony: Scripted, head: str, lead: str, dialect: Any, stream: bool) -> None:
    harmony.say(lead + head + OSLO[1])
    response = dialect(harmony, [USER], stream=stream, temperature=0.0, max_tokens=300)
    assert called_in(response, is_stream=stream) == ("", [OSLO])
    assert stream or ("Rain?" in response.text) == bool(lead)


@pytest.mark.parametrize("arguments", ["{", '{"city": "Os', '{"city": "Oslo", '])
@pytest.mark.parametrize("dialect", [anthropic, responses])
def test_no_part_interrupts_the_arguments_of_a_call(harmony: Scripted, dialect: Any, arguments: str) -> None:
    """What has ended gets no more text: the end of a part cannot come before that of its arguments."""
    head = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    harmony.say(f"{head}{arguments}<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.")
    response = dialect(harmony, [USER], stream=True, max_tokens=200, temperature=0.0)
    ended, names = set[int](), list[str]()
    for line in response.text.split("\n"):
        event = json.loads(line[6:]) if line.startswith("data: {") else {}
        index = event.get("output_index", event.get("index"))
        if event.get("type") in ("response.output_item.done", "content_block_stop"):
            ended.add(index)
        assert "delta" not in event or index not in ended or event["type"] == "message_delta"
        part = event.get("item", event.get("content_block", {}))
        names += [part["name"]] if "name" in part else []
    assert set(names) == {"get_weather"} and ended == {0}


def test_words_before_a_call_are_content_and_a_thought_is_none(harmony: Scripted) -> None:
    preamble = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
    harmony.say(THOUGHT + preamble + HEADS[0] + OSLO[1])
    message = chat(harmony, [USER], temperature=0.0, max_tokens=300).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Let me see.", "Rain?")
    assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": OSLO[1]}
    results = [{"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}]
    harmony.say("<|channel|>final<|message|>It rains.")
    second = chat(harmony, [USER, message, *results], temperature=0.0, max_tokens=300)
    assert called_in(second, is_stream=False) == ("It rains.", [])


def test_a_call_in_the_templates_words_is_found_cached(harmony: Scripted) -> None:
    harmony.say(THOUGHT + HEADS[2] + OSLO[1])
    first = chat(harmony, [USER], temperature=0.0, max_tokens=300).json()
    message = first["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}]
    harmony.say("<|channel|>final<|message|>It rains.")
    second = chat(harmony, [USER, message, *results], temperature=0.0, max_tokens=300).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"] - 2


def test_another_function_is_not_called_and_none_is_called_where_none_may_be(harmony: Scripted) -> None:
    harmony.say(HEADS[0].replace("get_weather", "get_money") + "{}")
    content, calls = called_in(chat(harmony, [USER], temperature=0.0, max_tokens=60), is_stream=False)
    assert calls == [] and "get_money" in content
    harmony.say(THOUGHT + HEADS[0] + OSLO[1])
    content, calls = called_in(
        chat(harmony, [USER], tool_choice="none", temperature=0.0, max_tokens=60), is_stream=False
    )
    assert calls == []


def test_a_part_for_a_function_must_come_where_a_call_is_required(harmony: Scripted) -> None:
    harmony.say(THOUGHT + "<|channel|>final<|message|>Only words.")
    body = {"tool_choice": {"type": "function", "function": {"name": "now"}}, "temperature": 0.0, "max_tokens": 100}
    message = chat(harmony, [USER], **body).json()["choices"][0]["message"]
    assert "Only words" not in json.dumps(message)


def test_a_part_that_is_cut_in_its_header_is_content(harmony: Scripted) -> None:
    says = HEADS[0][: HEADS[0].index("weather")]
    harmony.say(THOUGHT + says + "weather")
    num_tokens = len(harmony.engine.encode(THOUGHT + says, add_bos=False))
    content, calls = called_in(chat(harmony, [USER], temperature=0.0, max_tokens=num_tokens), is_stream=False)
    assert calls == [] and "to=functions.get_" in content


# Muse Glimmer, whose calls stand behind a header and in tags.

SELF = " to=self<|message|>Rain?<|eom|><|start|>assistant"


@pytest.fixture(scope="module")
def muse() -> Iterator[Scripted]:
    with Scripted.serving(MUSE, ("<|start|>", "<|message|>", "<|eom|>")) as model:
        yield model


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", [chat, anthropic, responses])
@pytest.mark.parametrize("lead", ["", SELF], ids=["at-once", "after-a-thought"])
def test_a_part_that_is_a_call_in_tags_is_a_call(muse: Scripted, lead: str, dialect: Any, stream: bool) -> None:
    muse.say(lead + " to=get_weather<|message|>" + muse.format.text_of([OSLO]))
    response = dialect(muse, [USER], stream=stream, temperature=0.0, max_tokens=300)
    assert called_in(response, is_stream=stream) == ("", [OSLO])
    assert stream or ("Rain?" in response.text) == bool(lead)


def test_words_for_the_user_are_content_where_tools_might_be_called(muse: Scripted) -> None:
    muse.say(SELF + " to=user<|message|>It rains.")
    assert called_in(chat(muse, [USER], temperature=0.0, max_tokens=100), is_stream=False) == ("It rains.", [])


def test_a_call_in_tags_that_comes_back_is_found_cached(muse: Scripted) -> None:
    muse.say(SELF + " to=get_weather<|message|>" + muse.format.text_of([OSLO]))
    first = chat(muse, [USER], temperature=0.0, max_tokens=300).json()
    message = first["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}]
    muse.say(" to=user<|message|>It rains.")
    second = chat(muse, [USER, message, *results], temperature=0.0, max_tokens=300).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"] - 2


def test_a_part_in_tags_must_call_where_a_call_is_required(muse: Scripted) -> None:
    muse.say(SELF + " to=user<|message|>Only words.")
    choice = chat(muse, [USER], tool_choice="required", temperature=0.0, max_tokens=200).json()["choices"][0]
    assert "Only words" not in json.dumps(choice["message"])


def test_a_model_that_is_told_of_tools_by_another_name_knows_them_and_calls_them_so() -> None:
    with Scripted.serving(SMOLLM3) as model:
        assert "get_weather" in model.engine.prompts.render([USER], (Tool("get_weather", WEATHER),))
        model.say("Let me see." + model.format.text_of([OSLO, NOW]))
        assert "<tool_call>" in model.format.text_of([OSLO])
        first = chat(model, [USER], temperature=0.0, max_tokens=300)
        assert called_in(first, is_stream=False) == ("Let me see.", [OSLO, NOW])
        message = first.json()["choices"][0]["message"]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in message["tool_calls"]]
        second = chat(model, [USER, message, *results], temperature=0.0, max_tokens=30).json()
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        usage = first.json()["usage"]
        assert cached >= usage["prompt_tokens"] + usage["completion_tokens"] - 2
