"""Thoughts in chat completions: models that say what a script says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ..thought_templates import HEADED, HYBRID, OPENED, SPECIAL
from ..tool_templates import QWEN
from .scripted import END_OF_TURN, OSLO, USER, VOCAB_SIZE, Scripted, events

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
JSON = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "required": ["b"]}}}
SAYS = {
    "hybrid": (HYBRID, "<think>\nHm, é.\n</think>\n\nYes."),
    "opened": (OPENED, "Hm, é.\n</think>\n\nYes."),
    "special": (SPECIAL, "<file_sep>\nHm, é.\n<reponame>\n\nYes."),
    "headed": (
        HEADED,
        "<|channel|>analysis<|message|>Hm, é.<|end|><|im_start|>assistant<|channel|>final<|message|>Yes.",
    ),
}


@pytest.fixture(scope="module", params=SAYS)
def thinking(request: pytest.FixtureRequest) -> Iterator[tuple[Scripted, str]]:
    template, says = SAYS[request.param]
    with Scripted.serving(template) as model:
        yield model, says


@pytest.fixture(scope="module")
def hybrid() -> Iterator[Scripted]:
    with Scripted.serving(HYBRID) as model:
        yield model


@pytest.fixture(scope="module")
def opened() -> Iterator[Scripted]:
    with Scripted.serving(OPENED) as model:
        yield model


def deltas(response: Any, key: str) -> list[str]:
    return [choice["delta"][key] for chunk in events(response) for choice in chunk["choices"] if key in choice["delta"]]


def test_a_thought_is_no_content(thinking: tuple[Scripted, str]) -> None:
    model, says = thinking
    reply = model.ask(says, tools=None).json()
    message = reply["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, é.", "Yes.")
    usage = reply["usage"]
    num_thought = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 3 < num_thought < usage["completion_tokens"] - 2


def test_a_stream_has_the_same_thought_before_the_content(thinking: tuple[Scripted, str]) -> None:
    model, says = thinking
    whole = model.ask(says, tools=None).json()
    response = model.ask(says, tools=None, stream=True, stream_options={"include_usage": True})
    assert "".join(deltas(response, "reasoning_content")) == "Hm, é." and len(deltas(response, "reasoning_content")) > 2
    assert "".join(deltas(response, "content")) == "Yes."
    chunks = events(response)
    assert chunks[-1]["usage"]["completion_tokens_details"] == whole["usage"]["completion_tokens_details"]
    is_thought = ["reasoning_content" in choice["delta"] for chunk in chunks for choice in chunk["choices"][:1]]
    is_content = [bool(choice["delta"].get("content")) for chunk in chunks for choice in chunk["choices"][:1]]
    assert max(place for place, is_it in enumerate(is_thought) if is_it) < is_content.index(True)


def test_logprobs_have_all_tokens_of_thought_and_content(thinking: tuple[Scripted, str]) -> None:
    model, says = thinking
    reply = model.ask(says, tools=None, logprobs=True).json()
    choice = reply["choices"][0]
    assert len(choice["logprobs"]["content"]) == reply["usage"]["completion_tokens"]
    chunks = events(model.ask(says, tools=None, logprobs=True, stream=True))
    streamed = [e for c in chunks for x in c["choices"] if x["logprobs"] for e in x["logprobs"]["content"]]
    assert [each["token"] for each in streamed] == [each["token"] for each in choice["logprobs"]["content"]]


def test_a_reply_that_ends_in_its_thought_has_no_content(thinking: tuple[Scripted, str]) -> None:
    model, says = thinking
    cut = says[: says.index(" é")]
    reply = model.ask(cut, tools=None).json()
    message = reply["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm,", "")
    usage = reply["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] >= usage["completion_tokens"] - 1


def test_a_model_that_does_not_think_has_no_thought() -> None:
    with Scripted.serving(QWEN) as model:
        reply = model.ask("<think>\nHm.\n</think>\n\nYes.", tools=None).json()
        assert reply["choices"][0]["message"] == {
            "content": "<think>\nHm.\n</think>\n\nYes.",
            "role": "assistant",
            "refusal": None,
        }
        assert "completion_tokens_details" not in reply["usage"]
        said = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
        assert model.engine.render([USER, said, USER]) == model.engine.render(
            [USER, {"role": "assistant", "content": "Yes."}, USER]
        )


def test_a_prompt_that_closed_the_thought_is_answered_at_once(hybrid: Scripted) -> None:
    message = hybrid.reply("Yes.", tools=None, chat_template_kwargs={"enable_thinking": False})["message"]
    assert message == {"content": "Yes.", "role": "assistant", "refusal": None}


def test_calls_come_behind_a_thought_which_may_speak_of_them(hybrid: Scripted) -> None:
    says = f"<think>\nI say <tool_call> or so.\n</think>\n\n{CALL}"
    choice = hybrid.reply(says)
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "I say <tool_call> or so."
    [call] = choice["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == OSLO
    streamed = hybrid.ask(says, stream=True)
    assert "".join(deltas(streamed, "reasoning_content")) == "I say <tool_call> or so."
    assert "".join(deltas(streamed, "content")) == ""


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_a_thought_that_comes_back_is_in_the_prompt_and_found_cached(hybrid: Scripted, key: str) -> None:
    first = hybrid.ask("<think>\nHm, really?\n</think>\n\nYes, it is so.", tools=None, return_token_ids=True).json()
    message = first["choices"][0]["message"]
    said = {"role": "assistant", "content": message["content"], key: message["reasoning_content"]}
    later = hybrid.ask("So.", [USER, said, USER], tools=None).json()
    num_before = first["usage"]["total_tokens"] - 1  # the end of the turn is computed with the next prompt
    assert later["usage"]["prompt_tokens_details"]["cached_tokens"] >= num_before


def test_a_thought_belongs_to_a_reply(hybrid: Scripted) -> None:
    response = hybrid.ask("a", [{"role": "user", "content": "b", "reasoning_content": "c"}])
    assert response.status_code == 400 and "reasoning_content" in response.json()["error"]["message"]


@pytest.mark.parametrize("says", ['<think>\nHm "}{".\n</think>\n\n{"b": 1}', '{"b": 1}'])
@pytest.mark.parametrize("template", [HYBRID, SPECIAL], ids=["of several tokens", "of one token"])
def test_a_schema_holds_the_answer_and_not_the_thought(template: str, says: str) -> None:
    if template is SPECIAL:
        says = says.replace("</think>", "<reponame>").replace("<think>", "<file_sep>")
    with Scripted.serving(template) as model:
        choice = model.reply(says, tools=None, response_format=JSON)
        assert choice["message"]["content"] == '{"b": 1}'
        assert choice["message"].get("reasoning_content", "") == ('Hm "}{".' if "Hm" in says else "")
        assert choice["finish_reason"] == "stop"


def test_a_schema_holds_the_answer_behind_a_thought_that_the_prompt_opened(opened: Scripted) -> None:
    message = opened.reply('Hm "}{".</think>{"b": 1}', tools=None, response_format=JSON)["message"]
    assert (message["reasoning_content"], message["content"]) == ('Hm "}{".', '{"b": 1}')
    required = opened.reply(f"Hm.</think>{opened.format.text_of([OSLO])}", tool_choice="required")
    assert json.loads(required["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo", "days": 3}


@pytest.mark.parametrize("template", [HYBRID, OPENED])
@pytest.mark.parametrize("joint", ['>"', ">.", "></"])
def test_no_token_ends_a_thought_and_begins_the_answer_that_a_schema_holds(template: str, joint: str) -> None:
    """It was a 400, drawn by the model, where the tags are ordinary text."""
    begin = "<think>\n" if template is HYBRID else ""
    with Scripted.serving(template) as model:
        tokenizer = model.engine.tokenizer
        [spilling] = [i for i in range(VOCAB_SIZE) if tokenizer.token_bytes(i) == joint.encode()]
        ids = [*model.engine.encode(f"{begin}Hm.\n</think", add_bos=False), spilling]
        model.runner.script.extend([*ids, *model.engine.encode('>\n\n{"b": 1}', add_bos=False), END_OF_TURN])
        body = {"messages": [USER], "temperature": 0.0, "max_tokens": 60, "response_format": JSON}
        response = model.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        message = response.json()["choices"][0]["message"]
        assert message["reasoning_content"].startswith("Hm.") and message["content"].startswith("{")


def test_a_schema_holds_the_answer_where_parts_have_headers() -> None:
    says = '<|channel|>analysis<|message|>Hm "}{".<|end|><|im_start|>assistant<|channel|>final<|message|>{"b": 1}'
    with Scripted.serving(HEADED) as model:
        choice = model.reply(says, tools=None, response_format=JSON)
        assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ('Hm "}{".', '{"b": 1}')
        bare = model.reply('<|channel|>final<|message|>{"b": 1}', tools=None, response_format=JSON)["message"]
        assert bare["content"] == '{"b": 1}' and "reasoning_content" not in bare
        called = model.reply(says.replace('{"b": 1}', model.format.text_of([OSLO])), tool_choice="required")
        assert called["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
        assert called["message"]["reasoning_content"] == 'Hm "}{".'
        free = model.reply(says.replace('{"b": 1}', "Yes."))["message"]
        assert (free["reasoning_content"], free["content"]) == ('Hm "}{".', "Yes.")


def test_a_stop_string_ends_the_answer_and_not_the_thought(hybrid: Scripted) -> None:
    message = hybrid.reply("<think>\nYes or no\n</think>\n\nYes or no", tools=None, stop=" or")["message"]
    assert (message["reasoning_content"], message["content"]) == ("Yes or no", "Yes")
