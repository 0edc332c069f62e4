"""Chat completions in OpenAI's shape, whole and streamed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from radixlm.runtime.errors import StepFailed
from starlette.testclient import TestClient

if TYPE_CHECKING:
    from .conftest import FakeEngine

USER = {"role": "user", "content": "Hi"}
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 3,
    "total_tokens": 6,
    "prompt_tokens_details": {
        "cached_tokens": 2,
        "cached_tokens_by_kind": {"exact": 2},
        "cached_tokens_by_tier": {"memory": 2},
        "cache_match": "exact",
        "why_not_more": {
            "kind": "retokenized",
            "position": 2,
            "wanted_ids": [2],
            "wanted_text": "!",
            "cached_ids": [0, 1],
            "cached_text": "Hello wörld",
            "message": "at token 2 the cache has the text of [2] '!' as the model generated it, [0, 1] 'Hello wörld'; "
            'match "text" reuses it',
        },
    },
}


def ask(client: TestClient, **body: object) -> Any:
    return client.post("/v1/chat/completions", json={"messages": [USER], **body})


def events(client: TestClient, **body: object) -> list[Any]:
    """The values of a stream; asserts that `[DONE]` ends it."""
    response = ask(client, stream=True, **body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_whole_reply_has_text_finish_reason_and_usage(client: TestClient) -> None:
    reply = ask(client, model="fake").json()
    assert reply["object"] == "chat.completion"
    assert reply["id"].startswith("chatcmpl-")
    assert reply["model"] == "fake"
    assert reply["usage"] == USAGE
    [choice] = reply["choices"]
    assert choice["index"] == 0
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": "Hello wörld!", "refusal": None}


def test_a_stream_joins_to_the_whole_reply(client: TestClient) -> None:
    chunks = events(client)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello wörld!"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["stop"]
    assert not any("usage" in chunk for chunk in chunks)


def test_each_chunk_has_the_usage_so_far_if_asked(client: TestClient) -> None:
    *chunks, last = events(client, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 3]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}
    assert last["usage"] == USAGE


def test_a_stream_ends_with_usage_if_asked(client: TestClient) -> None:
    chunks = events(client, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == USAGE
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_ids_of_prompt_and_reply_are_returned_if_asked(client: TestClient) -> None:
    reply = ask(client, return_token_ids=True).json()
    assert (reply["prompt_token_ids"], reply["choices"][0]["token_ids"]) == ([1, 2, 3], [0, 1, 2])
    reply = ask(client).json()
    assert "prompt_token_ids" not in reply and "token_ids" not in reply["choices"][0]


def test_streamed_ids_join_to_the_replys_and_the_last_choice_has_the_prompts(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.words[1] = ""  # half a character has an id and no text yet
    chunks = events(client, return_token_ids=True, stream_options={"include_usage": True})
    assert [i for chunk in chunks for choice in chunk["choices"] for i in choice.get("token_ids", [])] == [0, 1, 2]
    assert [chunk.get("prompt_token_ids") for chunk in chunks if chunk["choices"]][-1] == [1, 2, 3]
    assert sum("prompt_token_ids" in chunk for chunk in chunks) == 1
    assert not any("token_ids" in choice for chunk in events(client) for choice in chunk["choices"])


def test_parameters_reach_the_engine_and_the_rest_are_the_models_defaults(
    client: TestClient, engine: FakeEngine
) -> None:
    ask(client, max_completion_tokens=2, top_p=0.5, stop="END", seed=7, logit_bias={"5": -1.5})
    [(messages, params)] = engine.asked
    assert messages == [USER]
    assert (params.max_tokens, params.top_p, params.stop, params.seed) == (2, 0.5, ("END",), 7)
    assert dict(params.logit_bias) == {5: -1.5}
    assert params.temperature == 0.3


def test_parts_are_joined_and_developer_is_system(client: TestClient, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ask(client, messages=[{"role": "developer", "content": parts}])
    assert engine.asked[0][0] == [{"role": "system", "content": "ab"}]


def test_length_is_the_finish_reason_at_max_tokens(client: TestClient) -> None:
    choice = ask(client, max_tokens=1).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "Hello")


def test_logprobs_have_tokens_bytes_and_alternatives(client: TestClient) -> None:
    content = ask(client, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["Hello", " wörld", "!"]
    assert bytes(content[1]["bytes"]).decode() == " wörld"
    assert content[0]["top_logprobs"] == [{"token": "Hello", "logprob": -0.5, "bytes": list(b"Hello")}]


def test_what_other_servers_take_for_no_limit_is_none_here(client: TestClient, engine: FakeEngine) -> None:
    """vLLM's top_k of -1 is off; top_p of 0 takes the most likely token; no alternatives need no logprobs."""
    assert ask(client, top_k=-1, top_p=0, top_logprobs=0).status_code == 200
    params = engine.asked[0][1]
    assert (params.top_k, params.top_p, params.logprobs) == (0, 0.0, None)


def test_logprobs_say_that_nothing_was_refused(client: TestClient) -> None:
    assert ask(client, logprobs=True).json()["choices"][0]["logprobs"]["refusal"] is None


def test_logprob_bytes_of_a_split_character_join_to_it(client: TestClient, engine: FakeEngine) -> None:
    engine.words, engine.bytes_of_tokens = ["", "", "🎉"], ["🎉".encode()[:1], "🎉".encode()[1:3], "🎉".encode()[3:]]
    content = ask(client, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "🎉"
    assert b"".join(bytes(entry["top_logprobs"][0]["bytes"]) for entry in content).decode() == "🎉"


def test_a_reply_may_be_sent_back_as_it_came(client: TestClient, engine: FakeEngine) -> None:
    reply = ask(client).json()["choices"][0]["message"]
    as_dumped = {**reply, "annotations": None, "audio": None, "function_call": None, "tool_calls": None}
    for message in (reply, as_dumped):
        assert ask(client, messages=[USER, message, USER]).status_code == 200
        assert engine.asked[-1][0] == [USER, {"role": "assistant", "content": "Hello wörld!"}, USER]


def test_logprobs_are_streamed_with_their_text(client: TestClient) -> None:
    choices = [chunk["choices"][0] for chunk in events(client, logprobs=True)]
    spoken = [choice for choice in choices if choice["delta"].get("content")]
    assert [choice["logprobs"]["content"][0]["token"] for choice in spoken] == ["Hello", " wörld", "!"]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"messages": 5}, "messages", "messages is an integer; it must be a list"),
        (
            {"messages": [{"role": "robot", "content": "Hi"}]},
            "messages[0].role",
            "role is 'robot'; it must be 'assistant', 'developer', ",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0]", "needs content"),
        ({"max_tokens": "five"}, "max_tokens", "max_tokens is a text; it must be an integer or null"),
        ({"temprature": 1}, "temprature", "unknown field `temprature`"),
        ({"temperature": -1}, "temperature", "temperature is -1"),
        ({"max_tokens": -3}, "max_tokens", "max_tokens is -3"),
        ({"n": 0}, "n", "n is 0"),
        ({"n": 129}, "n", "n is 129"),
        ({"cache_match": "similar"}, "cache_match", "similar"),
        ({"cache_salt": "x" * 1025}, "cache_salt", "1024"),
        ({"prompt_cache_key": "x" * 1025}, "prompt_cache_key", "1024"),
        ({"prompt_cache_key": 7}, "prompt_cache_key", "prompt_cache_key is an integer; it must be a text or null"),
        ({"top_logprobs": 2}, "top_logprobs", "set logprobs to true"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream_options is for streams"),
        ({"messages": []}, "messages", "messages must be a list of at least 1 entry"),
        ({"max_completion_tokens": -2}, "max_completion_tokens", "max_completion_tokens is -2"),
        ({"max_tokens": 5, "max_completion_tokens": -3}, "max_completion_tokens", "max_completion_tokens is -3"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21"),
        ({"top_k": -2}, "top_k", "top_k is -2"),
    ],
)
def test_bad_input_is_400_in_openais_shape(
    client: TestClient, body: dict[str, object], param: str | None, says: str
) -> None:
    response = ask(client, **body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]


@pytest.mark.parametrize("text", ["", "{", "nul", '{"messages": NaN}', '"\\ud800"', "\xff", '{"messages": "\xff"}'])
def test_a_body_that_is_no_request_is_400(client: TestClient, text: str) -> None:
    response = client.post("/v1/chat/completions", content=text.encode("latin-1"))
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("the body is")


def test_a_failing_step_is_500_in_openais_shape(client: TestClient, engine: FakeEngine) -> None:
    engine.words = ["Hello", StepFailed("the step failed; send the request again")]
    response = ask(client)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "the step failed" in response.json()["error"]["message"]


def test_an_error_in_a_stream_is_its_last_event_and_nothing_is_done(client: TestClient, engine: FakeEngine) -> None:
    engine.words = ["Hello", StepFailed("the step failed; send the request again")]
    lines = [line for line in ask(client, stream=True).text.split("\n\n") if line]
    assert "the step failed" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
    assert "[DONE]" not in lines[-1]


def test_an_engine_that_is_closed_under_a_request_is_503(client: TestClient, engine: FakeEngine) -> None:
    engine.go_on.clear()
    submit = engine.stream

    def submit_and_close(*args: Any, **kwargs: Any) -> Any:
        stream = submit(*args, **kwargs)
        stream.cancel()
        return stream

    engine.stream = submit_and_close  # type: ignore[method-assign]
    assert ask(client).status_code == 503


def test_an_unforeseen_error_keeps_its_text_to_the_log(client: TestClient, engine: FakeEngine) -> None:
    engine.default_params = None  # type: ignore[assignment]
    response = ask(client)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error; see the server's log"


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, None),
        ({"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"effort": "none"}}, {"enable_thinking": False}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ({"reasoning": {"enabled": True, "effort": "high"}}, {"enable_thinking": True, "reasoning_effort": "high"}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        (
            {"thinking": {"type": "enabled"}, "reasoning_effort": "low"},
            {"enable_thinking": True, "reasoning_effort": "low"},
        ),
        ({"thinking": {"type": "auto"}}, None),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
        ),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
    ],
)
def test_the_template_gets_the_requests_variables(
    client: TestClient, engine: FakeEngine, fields: dict[str, object], variables: dict[str, object] | None
) -> None:
    assert ask(client, **fields).status_code == 200
    assert engine.options[-1].template_kwargs == variables


def test_a_variable_that_the_server_sets_itself_is_400(client: TestClient) -> None:
    error = ask(client, chat_template_kwargs={"messages": []}).json()["error"]
    assert error["param"] == "chat_template_kwargs" and "leave it out" in error["message"]


def test_built_in_tools_of_llama_are_400(client: TestClient) -> None:
    response = ask(client, chat_template_kwargs={"builtin_tools": ["brave_search"]})
    assert response.status_code == 400 and "describe these tools in tools" in response.json()["error"]["message"]
    assert ask(client, chat_template_kwargs={"builtin_tools": []}).status_code == 200


def test_what_asks_for_nothing_may_be_there(client: TestClient) -> None:
    nothing = {
        "modalities": ["text"],
        "service_tier": "flex",
        "functions": [],
        "store": False,
        "safety_identifier": "a",
    }
    assert ask(client, **nothing, reasoning_effort=None, prediction=None, function_call=None).status_code == 200


@pytest.mark.parametrize("field", [{"modalities": ["audio"]}, {"prediction": {"a": 1}}, {"audio": {"a": 1}}])
def test_what_asks_for_something_that_is_not_there_is_400(client: TestClient, field: dict[str, object]) -> None:
    assert ask(client, **field).status_code == 400
