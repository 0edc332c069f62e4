"""Anthropic's messages with models that say what a script says: calls, thoughts, counts of what was cached."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from ..thought_templates import HYBRID
from ..tool_templates import LLAMA, NO_TOOLS, QWEN
from .scripted import OSLO, USER, WEATHER, Scripted

TOOLS = [
    {"name": "get_weather", "description": "Rain?", "input_schema": WEATHER},
    {"name": "now", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
]
ARGUMENTS = json.loads(OSLO[1])


@pytest.fixture(scope="module", params=[QWEN, LLAMA, NO_TOOLS], ids=["hermes", "llama3", "plain"])
def model(request: pytest.FixtureRequest) -> Iterator[Scripted]:
    with Scripted.serving(request.param) as model:
        yield model


@pytest.fixture(scope="module")
def hermes() -> Iterator[Scripted]:
    with Scripted.serving(QWEN) as model:
        yield model


@pytest.fixture(scope="module")
def hybrid() -> Iterator[Scripted]:
    with Scripted.serving(HYBRID) as model:
        yield model


def ask(model: Scripted, says: str, messages: list[Any] | None = None, **fields: object) -> Any:
    model.say(says)
    body = {"messages": messages or [USER], "tools": TOOLS, "temperature": 0.0, "max_tokens": 300, **fields}
    return model.client.post("/v1/messages", json={name: value for name, value in body.items() if value is not None})


def reply(model: Scripted, says: str, messages: list[Any] | None = None, **fields: object) -> Any:
    response = ask(model, says, messages, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def events(model: Scripted, says: str, messages: list[Any] | None = None, **fields: object) -> list[Any]:
    lines = ask(model, says, messages, stream=True, **fields).text.split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def joined(values: list[Any]) -> Any:
    """The message that a client makes of a stream; asserts that events follow each other as they must."""
    message, arguments, is_open, has_ended = None, "", False, False
    for value in values:
        assert not has_ended
        match value["type"]:
            case "message_start":
                assert message is None
                message = value["message"]
            case "content_block_start":
                assert not is_open and value["index"] == len(message["content"])
                message["content"].append(value["content_block"])
                is_open, arguments = True, ""
            case "content_block_delta":
                assert is_open and value["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], value["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] += delta["signature"]
                    case "input_json_delta":
                        arguments += delta["partial_json"]
            case "content_block_stop":
                assert is_open and value["index"] == len(message["content"]) - 1
                is_open = False
                if arguments:
                    message["content"][-1]["input"] = json.loads(arguments)
            case "message_delta":
                assert not is_open
                message |= value["delta"]
                message["usage"] |= value["usage"]
            case "message_stop":
                has_ended = True
            case kind:
                assert kind == "ping"
    assert has_ended
    return message


def plain(message: Any) -> Any:
    """A message without what differs from request to request."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return content, message["stop_reason"], message["stop_sequence"], message["usage"]["output_tokens"]


def num_prompt(message: Any) -> int:
    return sum(count for name, count in message["usage"].items() if name.endswith("input_tokens"))


def test_a_call_is_a_block(model: Scripted) -> None:
    message = reply(model, model.format.text_of([OSLO]))
    assert message["stop_reason"] == "tool_use"
    [block] = message["content"]
    assert block.pop("id")
    assert block == {"type": "tool_use", "name": "get_weather", "input": ARGUMENTS}


def test_a_stream_says_the_same_as_the_whole_message(model: Scripted) -> None:
    for says in (model.format.text_of([OSLO]), "It is sunny, <i>really</i>.", ""):
        assert plain(joined(events(model, says))) == plain(reply(model, says))


def test_words_and_several_calls_are_blocks_one_after_the_other(hermes: Scripted) -> None:
    says = "Let me see.\n" + hermes.format.text_of([OSLO, ("now", "{}")])
    whole = reply(hermes, says)
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use", "tool_use"]
    assert whole["content"][0]["text"] == "Let me see." and whole["content"][2]["input"] == {}
    assert plain(joined(events(hermes, says))) == plain(whole)
    one = reply(hermes, says, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in one["content"]] == ["text", "tool_use"]


def test_any_calls_whatever_the_model_would_say(hermes: Scripted) -> None:
    message = reply(hermes, "It is sunny.", tool_choice={"type": "any"}, max_tokens=1000)
    assert message["content"] and {block["type"] for block in message["content"]} == {"tool_use"}


def test_the_named_tool_is_called(hermes: Scripted) -> None:
    message = reply(hermes, "It is sunny.", tool_choice={"type": "tool", "name": "now"})
    [block] = message["content"]
    assert (block["name"], block["input"], message["stop_reason"]) == ("now", {}, "tool_use")


def test_none_calls_nothing_and_has_the_same_prompt(hermes: Scripted) -> None:
    none = reply(hermes, "Only words.", tool_choice={"type": "none"})
    assert [block["type"] for block in none["content"]] == ["text"] and none["stop_reason"] == "end_turn"
    assert num_prompt(none) == num_prompt(reply(hermes, "Only words."))


def test_a_cut_call_keeps_what_can_be_read(hermes: Scripted) -> None:
    says = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
    lengths = range(1, len(hermes.engine.encode(says, add_bos=False)))
    cuts = [reply(hermes, says, max_tokens=length) for length in lengths]
    assert {cut["stop_reason"] for cut in cuts[:-4]} == {"max_tokens"}
    inputs = [cut["content"][0]["input"] for cut in cuts if cut["content"] and "input" in cut["content"][0]]
    assert {} in inputs and {"city": "Oslo"} in inputs and inputs[-1] == ARGUMENTS
    for length in (lengths[-5], lengths[-9]):
        values = events(hermes, says, max_tokens=length)
        deltas = [value["delta"] for value in values if value["type"] == "content_block_delta"]
        text = "".join(delta.get("partial_json", "") for delta in deltas)
        assert OSLO[1].startswith(text) and values[-2]["delta"]["stop_reason"] == "max_tokens"
        assert [value["type"] for value in values][-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_stop_sequence_is_named(hermes: Scripted) -> None:
    message = reply(hermes, "One two three.", stop_sequences=["zzz", " two"], tools=None)
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", " two")
    assert message["content"][0]["text"] == "One"


def test_a_full_context_is_no_limit_of_tokens(hermes: Scripted) -> None:
    prompt = [{"role": "user", "content": "a " * 900}]
    message = reply(hermes, "b " * 500, prompt, tools=None, max_tokens=1000)
    assert message["stop_reason"] == "model_context_window_exceeded"


def test_a_prompt_that_is_too_long_is_refused_in_words_that_clients_know(hermes: Scripted) -> None:
    response = ask(hermes, "No.", [{"role": "user", "content": "a " * 3000}], tools=None)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith("prompt is too long: 1") and error["message"].endswith(" tokens > 1023 maximum")


def test_a_reply_in_json_keeps_to_its_schema(hermes: Scripted) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    for fields in ({"output_config": {"format": {"type": "json_schema", "schema": schema}}},
                   {"output_format": {"type": "json_schema", "schema": schema}}):  # fmt: skip
        message = reply(hermes, "It is sunny.", tools=None, **fields)
        assert isinstance(json.loads(message["content"][0]["text"])["ok"], bool)
    wrong = {"format": {"type": "json_schema", "schema": {"type": "odd"}}}
    relaxed = ask(hermes, "No.", tools=None, output_config=wrong)
    assert relaxed.status_code == 200 and relaxed.headers["x-radixlm-ignored"] == "output_config.format.schema"


def test_a_strict_schema_that_cannot_be_used_is_named(hermes: Scripted) -> None:
    web = {"type": "web_search_20250305", "name": "web_search"}
    odd = {"name": "f", "input_schema": {"properties": {"a": {"type": "odd"}}}}
    message = ask(hermes, "No.", tools=[web, *TOOLS, {**odd, "strict": True}]).json()["error"]["message"]
    assert message.startswith("tools[3].input_schema: ")


def test_a_tool_whose_schema_cannot_be_followed_is_called_and_listed(model: Scripted) -> None:
    odd = {"properties": {"city": {"type": "any"}, "days": {"$ref": "https://example.com/days.json"}}}
    response = ask(model, model.format.text_of([OSLO]), tools=[{**TOOLS[0], "input_schema": odd}, TOOLS[1]])
    [call] = response.json()["content"]
    assert (call["name"], call["input"]) == ("get_weather", ARGUMENTS)
    assert response.headers["x-radixlm-ignored"] == "tools.get_weather.input_schema"


# What is cached.


def loop(model: Scripted, num_turns: int, *, stream: bool = False) -> list[Any]:
    """The replies of a loop of calls, each sent back with its result as a client does."""
    history: list[Any] = [USER]
    replies = []
    for turn in range(num_turns):
        says = "Let me see.\n" + model.format.text_of([("get_weather", f'{{"city": "Oslo", "days": {turn + 1}}}')])
        message = joined(events(model, says, history)) if stream else reply(model, says, history)
        replies.append(message)
        [call] = [block for block in message["content"] if block["type"] == "tool_use"]
        answer = {"type": "tool_result", "tool_use_id": call["id"], "content": f"Rain on day {turn}."}
        content = [{name: block[name] for name in block if name != "citations"} for block in message["content"]]
        history += [{"role": "assistant", "content": content}, {"role": "user", "content": [answer]}]
    return replies


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_calls_computes_nothing_twice_and_says_so(stream: bool) -> None:
    with Scripted.serving(QWEN) as model:
        replies = loop(model, 6, stream=stream)
    for before, after in itertools.pairwise(replies):
        read = after["usage"]["cache_read_input_tokens"]
        # but for the last token of the reply, which was never fed, and what closes a turn
        assert read >= num_prompt(before) + before["usage"]["output_tokens"] - 2
        assert after["usage"]["cache_creation_input_tokens"] == 0  # nothing is marked with `cache_control`
        assert num_prompt(after) - read == after["usage"]["input_tokens"] > 0


def test_counted_tokens_are_those_of_the_prompt(hermes: Scripted) -> None:
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Be brief."}]
    body = {"messages": [USER], "tools": TOOLS, "system": system}
    counted = hermes.client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    assert counted == num_prompt(reply(hermes, "Yes.", system=system)) > 50


def test_the_billing_line_hides_no_prefix(hermes: Scripted) -> None:
    for nonce in ("fa690", "0b3c1"):
        line = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};"}
        message = reply(hermes, "Yes.", system=[line, {"type": "text", "text": "You like to be brief. " * 20}])
    assert message["usage"]["cache_read_input_tokens"] >= num_prompt(message) - 1


def test_a_prefix_is_found_whichever_dialect_computed_it(hermes: Scripted) -> None:
    words = "You like to be brief, and to answer in verse. " * 10
    messages = [{"role": "system", "content": words}, USER]
    hermes.ask("Yes.", messages, tools=None)
    message = reply(hermes, "Yes.", system=words, tools=None)
    assert message["usage"]["cache_read_input_tokens"] >= num_prompt(message) - 1


@pytest.mark.parametrize("stream", [False, True])
def test_what_has_no_room_is_left_out_where_that_is_asked_for_and_told(hermes: Scripted, stream: bool) -> None:
    long = "a word and a word " * 40
    history: list[Any] = []
    for turn in range(9):
        call = {"type": "tool_use", "id": f"t{turn}", "name": "now", "input": {}}
        answer = {"type": "tool_result", "tool_use_id": f"t{turn}", "content": long}
        history += [{"role": "user", "content": f"{turn} {long}"}, {"role": "assistant", "content": [call]}]
        history += [{"role": "user", "content": [answer]}, {"role": "assistant", "content": "Noon."}]
    history.append(USER)
    assert ask(hermes, "Yes.", history).status_code == 400
    fields = {"truncation": "middle", "max_tokens": 20, "system": "Be brief."}
    told = joined(events(hermes, "Yes.", history, **fields)) if stream else reply(hermes, "Yes.", history, **fields)
    dropped = told["truncation"]["dropped_messages"]
    assert dropped == list(range(len(dropped))) and len(dropped) % 4 == 0 and 0 < len(dropped) < len(history)
    assert told["truncation"]["num_dropped_tokens"] > 1000 and num_prompt(told) < 1024


def test_what_is_off_is_neither_read_nor_kept(hermes: Scripted) -> None:
    for _ in range(2):
        usage = reply(hermes, "Yes.", cache_match="off")["usage"]
        assert usage["cache_read_input_tokens"] == usage["cache_creation_input_tokens"] == 0 < usage["input_tokens"]


# Thoughts.

THINKS = "<think>\nHm, é.\n</think>\n\n"


def test_a_thought_is_a_block_before_the_others(hybrid: Scripted) -> None:
    says = THINKS + "Let me see.\n" + hybrid.format.text_of([OSLO])
    whole = reply(hybrid, says)
    thought, text, call = whole["content"]
    assert thought["type"] == "thinking" and thought["thinking"] == "Hm, é." and thought["signature"]
    assert 3 < whole["usage"]["output_tokens_details"]["thinking_tokens"] < whole["usage"]["output_tokens"]
    assert (text["type"], text["text"].strip(), call["name"]) == ("text", "Let me see.", "get_weather")
    values = events(hybrid, says)
    assert plain(joined(values)) == plain(whole)
    kinds = [value["delta"]["type"] for value in values if value["type"] == "content_block_delta"]
    assert kinds.index("signature_delta") < kinds.index("text_delta") < kinds.index("input_json_delta")


def test_a_thought_that_is_sent_back_is_found_again(hybrid: Scripted) -> None:
    first = reply(hybrid, THINKS + "Yes.", tools=None)
    history = [USER, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "Sure?"}]
    second = reply(hybrid, THINKS + "Yes.", history, tools=None)
    assert second["usage"]["cache_read_input_tokens"] >= num_prompt(first) + first["usage"]["output_tokens"] - 2
