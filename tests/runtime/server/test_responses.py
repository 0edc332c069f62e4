"""OpenAI's responses, whole and as events; with the fake engine and with a real one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.errors import StepFailed
from radixlm.runtime.server import create_app
from starlette.testclient import TestClient

if TYPE_CHECKING:
    from .conftest import FakeEngine

EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    *["response.output_text.delta"] * 3,
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def ask(client: TestClient, **body: object) -> Any:
    return client.post("/v1/responses", json={"input": "Hi", **body})


def events(client: TestClient, **body: object) -> list[Any]:
    """The values of a stream; asserts that each event has the name that its value says, and its number."""
    response = ask(client, stream=True, **body)
    assert response.headers["content-type"].startswith("text/event-stream")
    values = []
    for number, event in enumerate(event for event in response.text.split("\n\n") if event):
        name, data = event.split("\n")
        values.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {values[-1]['type']}"
        assert values[-1]["sequence_number"] == number
    return values


def test_a_whole_response_has_a_message_a_status_and_usage(client: TestClient) -> None:
    reply = ask(client, model="fake", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5).json()
    assert (reply["object"], reply["status"], reply["model"]) == ("response", "completed", "fake")
    assert reply["id"].startswith("resp_")
    [item] = reply["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hello wörld!", "annotations": [], "logprobs": []}]
    assert (reply["instructions"], reply["metadata"], reply["temperature"]) == ("Be brief.", {"a": "b"}, 0.5)
    assert (reply["error"], reply["incomplete_details"], reply["store"]) == (None, None, True)
    usage = reply["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (3, 3, 6)
    assert usage["input_tokens_details"]["cached_tokens"] == 2
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


def test_a_stream_has_openais_events_in_their_order(client: TestClient) -> None:
    values = events(client)
    assert [value["type"] for value in values] == EVENTS
    assert "".join(value["delta"] for value in values if value["type"].endswith("delta")) == "Hello wörld!"
    assert values[0]["response"]["status"] == "in_progress" and values[0]["response"]["usage"] is None
    assert len({value["item_id"] for value in values if "item_id" in value}) == 1
    assert len({value["response"]["id"] for value in values if "response" in value}) == 1
    last = values[-1]["response"]
    assert last["output"] == [values[-2]["item"]]
    assert last["usage"]["total_tokens"] == 6
    assert last["output"][0]["content"][0]["text"] == values[-4]["text"] == "Hello wörld!"


def test_a_reply_that_was_cut_is_incomplete(client: TestClient) -> None:
    reply = ask(client, max_output_tokens=1).json()
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert reply["output"][0]["status"] == "incomplete"
    assert events(client, max_output_tokens=1)[-1]["type"] == "response.incomplete"


def test_logprobs_come_if_they_are_included(client: TestClient) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = ask(client, **asked).json()["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in whole] == ["Hello", " wörld", "!"]
    assert whole[0]["top_logprobs"] == [{"token": "Hello", "logprob": -0.5, "bytes": list(b"Hello")}]
    values = events(client, **asked)
    assert [entry for value in values if value["type"].endswith("delta") for entry in value["logprobs"]] == whole
    assert values[-4]["logprobs"] == whole


def test_the_conversation_is_what_instructions_and_input_say(client: TestClient, engine: FakeEngine) -> None:
    first = ask(client).json()["output"][0]
    first["content"][0]["parsed"] = None  # as OpenAI's client has it
    said = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        first,
        {"role": "user", "content": "b"},
    ]
    assert ask(client, instructions="Be brief.", input=said).status_code == 200
    assert engine.asked[-1][0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "a"},
        {"role": "assistant", "content": "Hello wörld!"},
        {"role": "user", "content": "b"},
    ]


def test_what_asks_for_nothing_may_be_there(client: TestClient) -> None:
    empty = {"tools": [], "tool_choice": "auto", "reasoning": {"effort": None}, "text": {"format": {"type": "text"}}}
    assert ask(client, **empty, include=[], truncation="disabled", store=True, background=False).status_code == 200
    assert ask(client, previous_response_id="").status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1", "conversation": "conv_1"}, "previous_response_id"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": True}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"reasoning": {"effort": "a lot"}}, "reasoning.effort"),
        ({"max_output_tokens": -3}, "max_output_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"max_tool_calls": -5}, "max_tool_calls"),
        ({"max_tokens": 3}, "max_tokens"),
    ],
)
def test_what_is_not_served_is_400_and_named(client: TestClient, body: dict[str, object], param: str | None) -> None:
    for stream in (False, True):
        response = ask(client, **body, stream=stream)
        assert response.status_code == 400
        assert param is None or param in (response.json()["error"]["param"] or response.json()["error"]["message"])


def test_an_error_in_a_stream_is_a_failed_response_with_what_was_said(client: TestClient, engine: FakeEngine) -> None:
    engine.words = ["Hello", StepFailed("the step failed; send the request again")]
    last = events(client)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "the step failed; send the request again"}
    assert last["response"]["output"][0]["content"][0]["text"] == "Hello"


@pytest.fixture(scope="module")
def real(tiny_artifact: Path) -> Iterator[TestClient]:
    with Engine(tiny_artifact, max_num_seqs=2, kv_cache_bytes=32 << 20, num_threads=1) as engine:
        yield TestClient(create_app(engine))


def test_a_response_is_the_chats_reply_and_reuses_its_prompt(real: TestClient) -> None:
    asked = {"max_tokens": 6, "temperature": 0}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the use of a tree?"}]
    chat = real.post("/v1/chat/completions", json={"messages": messages, **asked}).json()
    said = {"instructions": "Be brief.", "input": messages[1]["content"], "max_output_tokens": 6, "temperature": 0}
    reply = ask(real, **said).json()
    assert reply["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    cached = reply["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached == reply["usage"]["input_tokens"] - 1 == chat["usage"]["prompt_tokens"] - 1
    streamed = events(real, **said)[-1]["response"]
    assert streamed["output"][0]["content"] == reply["output"][0]["content"]


def test_an_input_that_outgrew_the_context_loses_its_middle_if_that_is_asked_for(real: TestClient) -> None:
    said = [{"role": "user" if number % 2 == 0 else "assistant", "content": "word " * 40} for number in range(399)]
    response = ask(real, input=said, max_output_tokens=2)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    for instructions in (None, "Be brief."):
        wish = {"instructions": instructions, "max_output_tokens": 2, "truncation": "auto"}
        reply = ask(real, input=said, **wish).json()
        assert (reply["truncation"], reply["truncated"]["num_dropped_tokens"] > 0) == ("auto", True)
        assert reply["truncated"]["dropped_messages"][0] == 0, "places are the input's"
    assert "truncated" not in ask(real).json()


# Histories that began elsewhere.

FOREIGN: dict[str, dict[str, Any]] = {
    "web_search_call": {"id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    "local_shell_call": {"call_id": "1", "status": "completed", "action": {"type": "exec", "command": ["ls"]}},
    "compaction": {"encrypted_content": "x"},
    "ghost_snapshot": {"ghost_commit": {"id": "a", "parent": None}},
    "tool_search_call": {"call_id": "2", "execution": "client", "arguments": {"query": "x"}},
    "code_interpreter_call": {"id": "ci_1", "code": "1", "container_id": "c", "outputs": []},
    "of_another_server": {"contents": "x"},
}


def test_items_of_histories_that_began_elsewhere_are_left_out_and_listed(
    client: TestClient, engine: FakeEngine
) -> None:
    """They were an error of a type, in every request that had them."""
    said = {"role": "user", "content": "Hi"}
    items = [said, *({"type": kind, **fields} for kind, fields in FOREIGN.items()), {**said, "content": "Go on."}]
    response = ask(client, input=items)
    assert response.status_code == 200, response.text
    assert [message["content"] for message in engine.asked[-1][0]] == ["Hi", "Go on."]
    listed = response.headers["x-radixlm-ignored"].split(", ")
    assert listed == sorted(f"input.{kind}" for kind in FOREIGN)


def test_places_in_the_input_are_those_that_were_sent_though_items_are_left_out(
    client: TestClient, engine: FakeEngine
) -> None:
    items = [{"type": "web_search_call"}, {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
    assert ask(client, input=items).json()["error"]["message"].startswith("input[1].content[0]: ")


def test_an_item_that_is_only_referred_to_is_refused_in_words(client: TestClient) -> None:
    error = ask(client, input=[{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": "a"}]).json()[
        "error"
    ]
    assert error["message"] == "input[1] is an item_reference, which is not supported; send the item itself"
    assert error["param"] == "input[1]"


def test_a_mistyped_item_is_no_foreign_one(client: TestClient) -> None:
    error = ask(client, input=[{"type": "mesage", "role": "user", "content": "Hi"}]).json()["error"]
    assert "did you mean `message`" in error["message"]


def test_a_strict_server_refuses_foreign_items(engine: FakeEngine) -> None:
    strict = TestClient(create_app(engine, is_strict=True))  # type: ignore[arg-type]
    error = ask(strict, input=[{"type": "web_search_call"}]).json()["error"]
    assert "web_search_call" in error["message"] and error["param"] == "input[0].type"
    assert (
        "send the item itself" in ask(strict, input=[{"type": "item_reference", "id": "a"}]).json()["error"]["message"]
    )


def test_what_is_asked_to_be_told_and_is_not_there_is_listed(client: TestClient) -> None:
    asked = ["web_search_call.results", "of.another_server", "reasoning.encrypted_content"]
    response = ask(client, include=asked)
    assert response.status_code == 200
    assert response.headers["x-radixlm-ignored"] == "include.of.another_server, include.web_search_call.results"
    error = ask(client, include=["message.output_text.logprob"]).json()["error"]
    assert error["param"] == "include" and "did you mean 'message.output_text.logprobs'" in error["message"]


def test_what_another_model_refused_comes_back_as_its_words(client: TestClient, engine: FakeEngine) -> None:
    refused = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}
    user = {"role": "user", "content": "Hi"}
    assert ask(client, input=[user, refused, user]).status_code == 200
    assert engine.asked[-1][0][1]["content"] == "I will not."
