"""Anthropic's messages: whole, as events, and counted; with the fake engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from radixlm.runtime.chat.tools.arguments import read_cut
from radixlm.runtime.errors import EngineOverloaded, StepFailed
from radixlm.runtime.server import create_app
from starlette.testclient import TestClient

if TYPE_CHECKING:
    from .conftest import FakeEngine

HEADER = "x-radixlm-ignored"
USER = {"role": "user", "content": "Hi"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.328.9d0; cc_entrypoint=cli; cch=fa690;"


def call(call_id: str, name: str = "now", **arguments: object) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def result(call_id: str, content: object = "noon", **fields: object) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def said(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def asked(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def ask(client: TestClient, messages: list[Any] | None = None, **fields: object) -> Any:
    body = {"model": "fake", "messages": [USER] if messages is None else messages, "max_tokens": 100, **fields}
    return client.post("/v1/messages", json={name: value for name, value in body.items() if value is not ...})


def told(engine: FakeEngine, client: TestClient, messages: list[Any], **fields: object) -> Any:
    """What the chat template gets."""
    response = ask(client, messages, **fields)
    assert response.status_code == 200, response.text
    return engine.asked[-1][0]


def events(client: TestClient, **fields: object) -> list[Any]:
    """The values of a stream; asserts that each event has the name that its value says."""
    response = ask(client, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    values = []
    for event in filter(None, response.text.split("\n\n")):
        name, data = event.split("\n")
        values.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {values[-1]['type']}"
    return values


def test_a_whole_message_has_blocks_a_reason_and_usage(client: TestClient) -> None:
    reply = ask(client, temperature=0.5).json()
    assert reply.pop("id").startswith("msg_")
    usage = reply.pop("usage")
    assert usage.pop("prompt_tokens_details")["cached_tokens"] == 2
    assert usage == {
        "input_tokens": 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 3,
        "service_tier": "standard",
    }
    assert reply == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "Hello wörld!", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }


def test_a_stream_has_anthropics_events_in_their_order(client: TestClient) -> None:
    values = events(client)
    assert [value["type"] for value in values] == [
        *("message_start", "ping", "content_block_start"),
        *["content_block_delta"] * 3,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    start = values[0]["message"]
    assert (start["content"], start["stop_reason"], start["role"]) == ([], None, "assistant")
    assert start["usage"]["cache_read_input_tokens"] == 2 and start["usage"]["input_tokens"] == 1
    assert values[2] == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": "", "citations": None},
    }
    deltas = [value["delta"] for value in values if value["type"] == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"text_delta"}
    assert "".join(delta["text"] for delta in deltas) == "Hello wörld!"
    assert values[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert values[-2]["usage"]["output_tokens"] == 3


def test_pings_tell_how_far_the_prompt_is_if_that_is_asked_for(client: TestClient) -> None:
    assert events(client)[1] == {"type": "ping"}
    told = events(client, return_progress=True)[1]["prompt_progress"]
    assert (told["total"], told["processed"]) == (3, 3)


def test_a_prompt_whose_match_is_off_is_not_said_to_be_kept(client: TestClient) -> None:
    usage = ask(client, cache_match="off").json()["usage"]
    assert (usage["input_tokens"], usage["cache_creation_input_tokens"]) == (1, 0)
    assert sum(usage[name] for name in usage if name.endswith("input_tokens")) == 3


def test_a_reply_that_was_cut_says_by_what(engine: FakeEngine, client: TestClient) -> None:
    assert ask(client, max_tokens=1).json()["stop_reason"] == "max_tokens"
    assert events(client, max_tokens=1)[-2]["delta"]["stop_reason"] == "max_tokens"


def test_a_reply_without_text_has_no_block(engine: FakeEngine, client: TestClient) -> None:
    engine.words = [""]
    assert ask(client).json()["content"] == []
    assert [value["type"] for value in events(client)][2:] == ["message_delta", "message_stop"]


def test_sampling_fields_reach_the_engine(engine: FakeEngine, client: TestClient) -> None:
    ask(client, temperature=0.1, top_p=0.9, top_k=5, stop_sequences=["a", "b"], max_tokens=7, seed=3)
    params = engine.asked[-1][1]
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (0.1, 0.9, 5, ("a", "b"))
    assert (params.max_tokens, params.seed) == (7, 3)


# Conversations.


def test_the_system_is_a_text_or_blocks(engine: FakeEngine, client: TestClient) -> None:
    for system in ("Be brief.", [text("Be "), text("brief.") | {"cache_control": {"type": "ephemeral"}}]):
        assert told(engine, client, [USER], system=system) == [{"role": "system", "content": "Be brief."}, USER]
    assert told(engine, client, [USER], system=[]) == [USER]


def test_words_of_the_system_stand_where_they_stood(engine: FakeEngine, client: TestClient) -> None:
    later = {"role": "system", "content": [text("Stay brief.")]}
    history = [USER, said(text("Ho")), {"role": "user", "content": "Go on"}, later]
    assert told(engine, client, history, system="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "Go on"},
        {"role": "system", "content": "Stay brief."},
    ]


def test_words_of_the_system_may_be_for_one_turn_alone(engine: FakeEngine, client: TestClient) -> None:
    for_now = {"role": "system", "content": "Rain today.", "clear_at": "next_user_message"}
    for_ever = {"role": "system", "content": "Stay brief.", "clear_at": "never"}
    assert [message["content"] for message in told(engine, client, [USER, for_now, for_ever])] == [
        *("Hi", "Rain today.", "Stay brief.")
    ]
    history = [USER, for_now, for_ever, said(text("Ho")), USER]
    assert [message["content"] for message in told(engine, client, history)] == ["Hi", "Stay brief.", "Ho", "Hi"]


def test_calls_and_results_become_messages_as_templates_know_them(engine: FakeEngine, client: TestClient) -> None:
    history = [
        asked(text("What time "), text("is it?")),
        said(text("Let me see."), call("t1", zone="CET", at=[1, 1.0, True]), call("t2", "look")),
        asked(result("t2", [text("a "), text("b")]), result("t1", "no", is_error=True), text("Well?")),
    ]
    assert told(engine, client, history) == [
        {"role": "user", "content": "What time is it?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {
                    "id": "t1",
                    "type": "function",
                    "function": {"name": "now", "arguments": '{"zone":"CET","at":[1,1.0,true]}'},
                },
                {"id": "t2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "t2", "name": "look", "content": "a b"},
        {"role": "tool", "tool_call_id": "t1", "name": "now", "content": "Error: no"},
        {"role": "user", "content": "Well?"},
    ]


@pytest.mark.parametrize("content", [None, "", []])
def test_a_result_may_be_empty(engine: FakeEngine, client: TestClient, content: object) -> None:
    history = [USER, said(call("t1")), asked(result("t1", content))]
    assert told(engine, client, history)[-1]["content"] == ""


def test_results_may_come_in_several_messages_and_a_word_of_the_system_between(
    engine: FakeEngine, client: TestClient
) -> None:
    reminder = {"role": "system", "content": "Stay brief."}
    history = [USER, said(call("t1"), call("t2")), asked(result("t1")), reminder, asked(result("t2"))]
    assert [message["role"] for message in told(engine, client, history)][2:] == ["tool", "system", "tool"]


def test_thoughts_are_taken_back_as_they_were_and_hidden_ones_left_out(engine: FakeEngine, client: TestClient) -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "abc"}
    hidden = {"type": "redacted_thinking", "data": "xyz"}
    history = [USER, said(thought, hidden, text("Ho")), {"role": "user", "content": "So?"}]
    assert told(engine, client, history)[1] == {"role": "assistant", "content": "Ho", "reasoning_content": "Hm."}


def test_a_reply_can_be_sent_back_as_it_came(engine: FakeEngine, client: TestClient) -> None:
    reply = ask(client).json()
    history = [USER, {"role": reply["role"], "content": reply["content"]}, USER]
    assert told(engine, client, history)[1] == {"role": "assistant", "content": "Hello wörld!"}
    assert HEADER not in ask(client, history).headers


# The billing line.


def test_the_billing_line_is_dropped_and_listed(engine: FakeEngine, client: TestClient) -> None:
    response = ask(client, system=[text(BILLING), text("Be brief.")])
    assert engine.asked[-1][0] == [{"role": "system", "content": "Be brief."}, USER]
    assert response.headers[HEADER] == "system.x-anthropic-billing-header"
    assert told(engine, client, [USER], system=[text(BILLING)]) == [USER]


@pytest.mark.parametrize(
    "system",
    [
        BILLING,
        [text("Be brief."), text(BILLING)],
        [text(f"{BILLING}\nBe brief.")],
        [text(f" {BILLING}")],
        [text("x-anthropic-billing: a")],
    ],
)
def test_nothing_else_is_taken_for_the_billing_line(engine: FakeEngine, client: TestClient, system: Any) -> None:
    response = ask(client, system=system)
    whole = system if isinstance(system, str) else "".join(block["text"] for block in system)
    assert engine.asked[-1][0][0]["content"] == whole  # type: ignore[index]
    assert HEADER not in response.headers


# Fields.


def test_what_is_ignored_is_listed(client: TestClient) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    tools = [
        {"name": "now", "input_schema": {"type": "object"}, **mark},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
    ]
    response = ask(
        client,
        [asked(text("Hi") | mark)],
        system=[text("Be brief.") | mark],
        tools=tools,
        tool_choice={"type": "none"},
        metadata={"user_id": "me"},
        thinking={"type": "enabled", "budget_tokens": 2000},
        context_management={"edits": []},
    )
    assert response.status_code == 200
    assert response.headers[HEADER].split(", ") == [
        *("context_management", "messages.content.cache_control", "metadata", "system.cache_control"),
        *("thinking.budget_tokens", "tools.cache_control", "tools.max_uses", "tools.web_search_20250305"),
    ]


def test_thinking_and_effort_are_variables_of_the_template(engine: FakeEngine, client: TestClient) -> None:
    for thinking, kwargs in (
        ({"type": "enabled", "budget_tokens": 9}, {"enable_thinking": True}),
        ({"type": "adaptive"}, {"enable_thinking": True}),
        ({"type": "between_tools"}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        (None, None),
    ):
        ask(client, thinking=thinking)
        assert engine.options[-1].template_kwargs == kwargs
    ask(client, output_config={"effort": "low"})
    assert engine.options[-1].template_kwargs == {"reasoning_effort": "low"}


def test_a_key_has_one_namespace_in_all_dialects(engine: FakeEngine) -> None:
    client = TestClient(create_app(engine, api_keys=("sk-one", "sk-two")))  # type: ignore[arg-type]
    body = {"messages": [USER], "max_tokens": 5}
    for headers in ({"x-api-key": "sk-one"}, {"authorization": "Bearer sk-one"}):
        assert client.post("/v1/messages", json=body, headers=headers).status_code == 200
        assert client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    both = {"x-api-key": "sk-one", "authorization": "Bearer of-another-server"}
    assert client.post("/v1/messages", json=body, headers=both).status_code == 200
    assert len(set(engine.namespaces_asked)) == 1
    client.post("/v1/messages", json=body, headers={"x-api-key": "sk-two"})
    client.post("/v1/messages", json=body | {"cache_salt": "a"}, headers={"x-api-key": "sk-one"})
    assert len(set(engine.namespaces_asked)) == 3


# Counting.


def test_tokens_are_counted_without_being_computed(engine: FakeEngine, client: TestClient) -> None:
    body = {"model": "fake", "messages": [USER, said(text("Ho")), USER], "system": "Be brief."}
    response = client.post("/v1/messages/count_tokens", json=body)
    assert response.json() == {"input_tokens": 4}
    assert not engine.asked


# Mistakes.


def error_of(response: Any) -> tuple[int, str, str]:
    body = response.json()
    assert set(body) == {"type", "error"} and body["type"] == "error" and set(body["error"]) == {"type", "message"}
    return response.status_code, body["error"]["type"], body["error"]["message"]


LOOKED = [USER, said(call("t1")), asked(result("t1"))]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": ...}, "`max_tokens`"),
        ({"max_tokens": -3}, "max_tokens is -3"),
        ({"messages": []}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "robot"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [asked({"type": "video"})]}, "video"),
        ({"messages": [asked({"type": "image", "source": {"type": "url", "url": "x"}})]}, "image blocks cannot be"),
        ({"messages": [asked({"type": "document", "source": {}})]}, "document blocks cannot be read"),
        ({"messages": [USER, said({"type": "image"}), USER]}, "messages[1].content[0]: image blocks cannot be"),
        ({"messages": [asked(call("t1"))]}, "messages[0].content[0]: a tool_use block is not allowed"),
        ({"messages": [USER, said(result("t1")), USER]}, "messages[1].content[0]: a tool_result block is not allowed"),
        ({"messages": [{"role": "system", "content": [call("t1")]}, USER]}, "a message of role system"),
        ({"messages": [asked(result("t1"))]}, "there is no open tool call with the id 't1'"),
        (
            {"messages": [*LOOKED, said(text("Noon.")), asked(result("t1"))]},
            "there is no open tool call with the id 't1'",
        ),
        ({"messages": [USER, said(call("t1")), asked(result("t1"), result("t1"))]}, "messages[2].content[1]"),
        ({"messages": [USER, said(call("t1")), USER]}, "calls have no results: 't1'"),
        ({"messages": [USER, said(call("t1")), USER, said(text("Ho")), USER]}, "messages[2]: tool calls have no"),
        ({"messages": [USER, said(call("t1"), call("t1")), asked(result("t1"))]}, "ids must be unique"),
        ({"messages": [USER, said(text("Once upon"))]}, "the last message is the assistant's"),
        ({"messages": [USER, said({**call("t1"), "input": "[1"}), asked(result("t1"))]}, "input"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"system": [{"type": "text", "text": {}}]}, "system[0]"),
        ({"system": 5}, "system"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "name"),
        ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
        (
            {"tools": [{"name": "f", "input_schema": {"type": "string"}, "strict": True}]},
            "tools[0].input_schema has the type",
        ),
        ({"tools": [{"name": "f", "input_schema": {}}] * 2}, "'f' twice"),
        ({"tool_choice": {"type": "any"}}, "tools is not"),
        ({"tool_choice": {"type": "sometimes"}}, "sometimes"),
        ({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "g"}}, "'g'"),
        ({"stop_sequences": [5]}, "stop_sequences"),
        ({"temperature": -1}, "temperature is -1"),
        ({"thinking": {"type": "always"}}, "always"),
        ({"return_progress": True}, "return_progress"),
        ({"cache_slat": "x"}, "cache_slat"),
        ({"n": 2}, "unsupported field `n`"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "yaml"}}}, "yaml"),
        ({"output_config": {"of_mine": 1}}, "output_config.of_mine"),
    ],
)
def test_what_is_wrong_is_a_400_in_anthropics_shape(client: TestClient, fields: dict[str, Any], words: str) -> None:
    status, kind, message = error_of(ask(client, **fields))
    assert (status, kind) == (400, "invalid_request_error")
    assert words in message


def test_other_mistakes_have_types_of_their_own(engine: FakeEngine, client: TestClient) -> None:
    assert error_of(ask(client, model="claude"))[:2] == (404, "not_found_error")
    assert error_of(client.post("/v1/messages/batches", json={}))[:2] == (404, "not_found_error")
    assert error_of(client.get("/v1/messages"))[:2] == (405, "invalid_request_error")
    assert error_of(client.post("/v1/messages", content=b"{"))[:2] == (400, "invalid_request_error")
    assert error_of(client.post("/v1/messages", content=b"[" * 9000))[:2] == (400, "invalid_request_error")
    assert error_of(ask(client, [{"role": "user", "content": "x" * 20_000}]))[:2] == (413, "request_too_large")
    engine.words = [StepFailed("out of luck")]
    assert error_of(ask(client))[:2] == (500, "api_error")
    engine.words = [EngineOverloaded(5, 5, 7)]
    response = ask(client)
    assert error_of(response)[:2] == (429, "rate_limit_error") and response.headers["retry-after"] == "7"
    keyed = TestClient(create_app(engine, api_keys=("sk-one",)))  # type: ignore[arg-type]
    assert error_of(ask(keyed))[:2] == (401, "authentication_error")
    known = TestClient(create_app(engine, hosts=("localhost",)))  # type: ignore[arg-type]
    assert error_of(ask(known))[:2] == (403, "permission_error")


def test_other_endpoints_keep_openais_shape(client: TestClient) -> None:
    assert set(client.post("/v1/chat/completions", json={}).json()["error"]) == {"message", "type", "param", "code"}


def test_a_failure_on_the_way_is_an_event(engine: FakeEngine, client: TestClient) -> None:
    engine.words = ["Hel", StepFailed("out of luck")]
    *before, last = events(client)
    assert [value["type"] for value in before][-1] == "content_block_delta"
    assert last == {"type": "error", "error": {"type": "api_error", "message": "out of luck"}}


def test_deep_arguments_are_an_error_and_not_a_failure(client: TestClient) -> None:
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    response = ask(client, [USER, said(call("t1", x=deep)), asked(result("t1"))])
    assert response.status_code in (200, 400)


# Cut calls.


@pytest.mark.parametrize(
    ("cut", "read"),
    [
        ("", {}),
        ("{", {}),
        ('{"pa', {}),
        ('{"path"', {}),
        ('{"path": ', {}),
        ('{"path": "a', {"path": "a"}),
        ('{"path": "a\\', {"path": "a"}),
        ('{"path": "a", "n', {"path": "a"}),
        ('{"path": "a", "n": 1', {"path": "a"}),
        ('{"path": "a", "n": [1, 2', {"path": "a", "n": [1]}),
        ('{"path": "a", "n": {"b": tru', {"path": "a", "n": {}}),
        ('{"path": "a", "n": {"b": "x"}', {"path": "a", "n": {"b": "x"}}),
        ('{"path": "a"}', {"path": "a"}),
    ],
)
def test_what_can_be_read_of_a_cut_call_is_kept(cut: str, read: dict[str, Any]) -> None:
    assert read_cut(cut) == read


def test_a_cut_of_any_call_is_read_as_some_of_it() -> None:
    whole = json.dumps({"path": 'a"b\\', "lines": [1, {"x": None}, []], "é": {"y": "z\n", "w": True}})
    for length in range(len(whole)):
        assert set(read_cut(whole[:length])) <= {"path", "lines", "é"}
    assert read_cut(whole) == json.loads(whole)


@pytest.fixture
def quiet(engine: FakeEngine) -> Iterator[TestClient]:
    """A server whose streams that wait are kept alive very often."""
    with TestClient(create_app(engine, keep_alive_s=0.02)) as client:  # type: ignore[arg-type]
        yield client


def test_a_stream_that_waits_is_kept_alive_by_pings(engine: FakeEngine, quiet: TestClient) -> None:
    import threading

    engine.go_on.clear()
    threading.Timer(1.0, engine.go_on.set).start()
    values = events(quiet)
    assert [value["type"] for value in values].count("ping") > 2


def test_a_thread_that_the_server_is_to_hold_is_refused_in_the_words_by_which_packages_go_on_without(
    client: TestClient,
) -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        refused = ask(client, thread=thread)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["type"] == "invalid_request_error" and "send the whole conversation" in error["message"]
        assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert "details" not in ask(client, n=2).json()["error"]
    assert ask(client, thread=None).status_code == 200
