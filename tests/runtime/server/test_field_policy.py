"""Fields that no endpoint knows: ignored and listed, refused, or refused because the server is strict."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.runtime import SamplingParams
from radixlm.runtime.server import create_app, field_policy
from radixlm.runtime.server.anthropic.requests import MessagesRequest
from radixlm.runtime.server.errors import HTTPError
from radixlm.runtime.server.field_policy import HARMLESS, MAX_UNKNOWN, REFUSED, is_near, judge
from radixlm.runtime.server.openai.chat_request import ChatRequest
from radixlm.runtime.server.openai.requests import CompletionRequest
from radixlm.runtime.server.openai.response_requests import ResponseRequest
from starlette.testclient import TestClient

if TYPE_CHECKING:
    from .conftest import FakeEngine

HEADER = "x-radixlm-ignored"
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 4},
}


@pytest.fixture
def strict(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(create_app(engine, is_strict=True)) as client:  # type: ignore[arg-type]
        yield client


def chat(client: TestClient, **fields: object) -> Any:
    return client.post("/v1/chat/completions", json={"messages": [USER], **fields})


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ["cache_control", "priority", "x_of_my_own"])
def test_a_field_that_changes_nothing_is_ignored_and_listed(client: TestClient, path: str, name: str) -> None:
    response = client.post(path, json=BODIES[path] | {name: {"a": 1}})
    assert response.status_code == 200
    assert response.headers[HEADER] == name


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "name", ["cache_contrl", "cache_isolation", "kv_budgt", "kv_transfer_params", "modle", "typical_p", "mcp_servers"]
)
def test_a_field_that_may_change_the_answer_is_refused_by_name(client: TestClient, path: str, name: str) -> None:
    response = client.post(path, json=BODIES[path] | {name: 0.5})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error.get("param", name) == name and name in error["message"]  # Anthropic's errors have no param


@pytest.mark.parametrize(
    "path, name",
    [
        ("/v1/chat/completions", "max_output_tokens"),
        ("/v1/completions", "messages"),
        ("/v1/responses", "stop"),
        ("/v1/responses", "max_tokens"),
    ],
)
def test_a_field_of_another_endpoint_is_refused(client: TestClient, path: str, name: str) -> None:
    assert client.post(path, json=BODIES[path] | {name: 5}).json()["error"]["param"] == name
    assert client.post(path, json=BODIES[path] | {name: None}).status_code == 200


def test_a_mistyped_salt_is_never_ignored(client: TestClient) -> None:
    for name in ("cache_slat", "cach_salt", "cache-salt", "prompt_cach_key", "cahce_salt"):
        assert chat(client, **{name: "of a tenant"}).status_code == 400, name


@pytest.mark.parametrize("name", ["cacheSalt", "CACHE_SALT", "promptCacheKey", "Prompt-Cache-Key", "kvBudget"])
def test_a_salt_in_another_case_is_never_ignored(client: TestClient, name: str) -> None:
    assert chat(client, **{name: "of a tenant"}).status_code == 400


def test_fields_that_clients_send_in_an_object_of_their_library_are_refused(client: TestClient) -> None:
    response = chat(client, extra_body={"cache_salt": "of a tenant"})
    assert response.status_code == 400 and "body itself" in response.json()["error"]["message"]


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, ResponseRequest, MessagesRequest])
def test_what_one_endpoint_acts_on_no_other_ignores(kind: Any) -> None:
    known = set(kind.__struct_fields__)
    others = (ChatRequest, CompletionRequest, ResponseRequest, MessagesRequest)
    for name in {name for other in others for name in other.__struct_fields__} - known - HARMLESS.keys():
        with pytest.raises(HTTPError):
            judge(name, "x", known)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_any_number_of_fields_that_ask_for_nothing_costs_no_comparison_of_names(
    client: TestClient, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They held the event loop for a millisecond each."""
    num_compared = 0

    def counted(name: str, other: str) -> bool:
        nonlocal num_compared
        num_compared += 1
        return is_near(name, other)

    monkeypatch.setattr(field_policy, "is_near", counted)
    nothing = {f"x{number}": None for number in range(400)}
    tool = {"type": "function", "name": "f", **nothing}
    tools = {"tools": [tool], "tool_choice": "none"} if path == "/v1/responses" else {}
    assert client.post(path, json=BODIES[path] | nothing | tools).status_code == 200
    assert num_compared == 0


def test_the_likely_name_is_said(client: TestClient) -> None:
    error = chat(client, temprature=1).json()["error"]
    assert error["message"] == "unknown field `temprature`; did you mean `temperature`?"


NEVER_IGNORED = {
    "think": [True, False],
    "thinking_budget": [100, 0],
    "allowed_token_ids": [[1]],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "add_special_tokens": [False],
    "truncate_prompt_tokens": [5],
    "length_penalty": [2],
    "no_repeat_ngram_size": [3],
    "logits_processors": [["x"]],
    "lora_path": ["x"],
    "lora_request": [{"a": 1}],
    "regex": ["a+"],
    "ebnf": ["x"],
    "structural_tag": [{"a": 1}],
    "options": [{"temperature": 0}],
    "format": ["json"],
    "system_prompt": ["Be brief."],
    "assistant_prefill": ["Sure"],
    "add_generation_prompt": [False],
}


@pytest.mark.parametrize("name", NEVER_IGNORED)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_what_other_servers_act_on_is_never_ignored_in_silence(client: TestClient, path: str, name: str) -> None:
    """These stood in no table, and the answer was another than was asked for."""
    for value in NEVER_IGNORED[name]:
        response = client.post(path, json=BODIES[path] | {name: value})
        assert response.status_code == 400, value
        error = response.json()["error"]
        assert f"unsupported field `{name}`" in error["message"] and REFUSED[name].advice in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"skip_special_tokens": True, "add_special_tokens": True, "add_generation_prompt": True},
        {"length_penalty": 1.0, "no_repeat_ngram_size": 0, "thinking_budget": -1},
        {"include_stop_str_in_output": False, "options": {}, "lora_request": None},
    ],
)
def test_what_is_so_anyway_may_be_said(client: TestClient, fields: dict[str, object]) -> None:
    response = chat(client, **fields)
    assert response.status_code == 200 and HEADER not in response.headers


def test_whether_the_model_thinks_is_a_variable_of_the_template(client: TestClient, engine: FakeEngine) -> None:
    for path in ("/v1/chat/completions", "/v1/responses"):
        for value in (True, False):
            assert client.post(path, json=BODIES[path] | {"enable_thinking": value}).status_code == 200
            assert engine.options[-1].template_kwargs == {"enable_thinking": value}
    chat(client, enable_thinking=True, chat_template_kwargs={"enable_thinking": False, "a": 1})
    assert engine.options[-1].template_kwargs == {"enable_thinking": False, "a": 1}
    chat(client, enable_thinking=True, reasoning_effort="low")
    assert engine.options[-1].template_kwargs == {"enable_thinking": True, "reasoning_effort": "low"}
    for path in ("/v1/completions", "/v1/messages"):
        assert client.post(path, json=BODIES[path] | {"enable_thinking": False}).status_code == 400


def test_no_name_that_is_refused_is_proposed(client: TestClient) -> None:
    """`best` was said to be `best_of`, which chats refuse."""
    advice = {"best_of": REFUSED["best_of"].advice, "typical_p": REFUSED["typical_p"].advice}
    advice["stop_sequences"] = "send `stop`"
    for name, near in (("best_ofs", "best_of"), ("typical_q", "typical_p"), ("stop_sequence", "stop_sequences")):
        error = chat(client, **{name: 5}).json()["error"]
        assert "did you mean" not in error["message"]
        assert f"if you mean `{near}`: {advice[near]}" in error["message"]
    for name in ("best", "conf", "thing", "model_config"):  # but for short ones, to which too many names are near
        assert chat(client, **{name: 5}).headers[HEADER] == name, name


COUNTED = {"messages": [USER], "tools": [{"name": "f", "input_schema": {}}]}
OF_REPLIES: dict[str, object] = {
    "max_tokens": 4,
    "stop_sequences": ["a"],
    "temperature": 0,
    "top_k": 5,
    "top_p": 0.5,
    "stream": True,
    "cache_salt": "of a tenant",
    "metadata": {"user_id": "a"},
}


def test_the_body_of_messages_is_counted_as_it_is(client: TestClient, strict: TestClient) -> None:
    """Clients send it there, and some of its fields were refused."""
    whole = client.post("/v1/messages/count_tokens", json=COUNTED | OF_REPLIES)
    assert whole.status_code == 200, whole.text
    assert whole.json() == client.post("/v1/messages/count_tokens", json=COUNTED).json()
    assert whole.headers[HEADER].split(", ") == sorted(OF_REPLIES)
    nothing = {**dict.fromkeys(OF_REPLIES), "stream": False}
    assert HEADER not in client.post("/v1/messages/count_tokens", json=COUNTED | nothing).headers
    assert client.post("/v1/messages/count_tokens", json=COUNTED | {"mcp_servers": [1]}).status_code == 400
    assert strict.post("/v1/messages/count_tokens", json=COUNTED | {"max_tokens": 4}).status_code == 400


def test_fields_inside_of_messages_parts_and_tools_are_listed_once_without_their_places(
    client: TestClient, engine: FakeEngine
) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "Hi", "of_mine": 1, **mark}
    messages = [{"role": "user", "content": [part, part]}, USER | mark]
    response = chat(client, messages=messages, tools=[TOOL | mark], tool_choice="none")
    assert response.headers[HEADER] == (
        "messages.cache_control, messages.content.cache_control, messages.content.of_mine, tools.cache_control"
    )
    assert engine.asked[0][0] == [{"role": "user", "content": "HiHi"}, {"role": "user", "content": "Hi"}]


def test_what_a_schema_or_an_argument_holds_is_none_of_our_fields(client: TestClient, engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"cache_salt": {"type": "string"}}, "cache_control": 1}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "of_mine": 1}}]
    response = chat(client, tools=tools, tool_choice="none", logit_bias={"5": 1.5})
    assert response.headers[HEADER] == "tools.function.of_mine"
    assert engine.options[0].tools[0].parameters == schema
    assert engine.asked[0][1].logit_bias == {5: 1.5}


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"xml": "<a/>"}},
        {"response_format": {"type": "json_object", "indent": 4}},
        {"tool_choice": {"type": "function", "function": {"name": "f", "of_mine": 1}}},
    ],
)
def test_no_unknown_wish_of_how_an_answer_looks_is_ignored(client: TestClient, fields: dict[str, Any]) -> None:
    response = chat(client, tools=[TOOL], **fields)
    assert response.status_code == 400 and "would change the reply" in response.json()["error"]["message"]


def test_no_guess_is_made_where_the_known_name_is_short(client: TestClient) -> None:
    """Two letters make any name of up to three letters one of `n`'s."""
    response = chat(client, id="abc", tag="b", m=1)
    assert (response.status_code, response.headers[HEADER]) == (200, "id, m, tag")


def test_what_is_missing_is_named_with_its_place(client: TestClient) -> None:
    calls = [{"id": "a", "type": "function", "function": {}}]
    error = chat(client, messages=[USER, {"role": "assistant", "tool_calls": calls}]).json()["error"]
    assert error["param"] == "messages[1].tool_calls[0].function.name"


def test_a_mistyped_field_is_found_in_a_message_too(client: TestClient) -> None:
    error = chat(client, messages=[USER | {"contnt": "x"}]).json()["error"]
    assert error["param"] == "messages.contnt" and "`content`" in error["message"]


def test_known_fields_that_nothing_is_done_with_are_listed_too(client: TestClient) -> None:
    response = chat(client, user="me", metadata={"a": "b"}, store=False, safety_identifier=None)
    assert response.headers[HEADER] == "metadata, user"
    assert HEADER not in chat(client).headers


def test_what_asks_for_nothing_is_not_listed(client: TestClient) -> None:
    off = {"typical_p": 1, "typ_p": 1, "n_predict": -1, "num_predict": -1, "max_new_tokens": -1}
    response = chat(client, cache_control=None, mcp_servers=[], provider={}, **off)
    assert response.status_code == 200 and HEADER not in response.headers


def test_a_stream_and_an_error_list_them_too(client: TestClient) -> None:
    assert chat(client, stream=True, of_mine=1).headers[HEADER] == "of_mine"
    refused = chat(client, temperature=-1, of_mine=1)
    assert (refused.status_code, refused.headers[HEADER]) == (400, "of_mine")


def test_unknown_fields_are_logged_and_harmless_ones_are_not(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "radixlm.requests")
    chat(client, of_mine="a secret", user="me")
    assert "unknown_fields=of_mine" in caplog.text
    assert "a secret" not in caplog.text and "user" not in caplog.text


def test_a_name_cannot_add_a_header_or_a_line_to_the_log(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "radixlm.requests")
    response = chat(client, **{"évil\r\nset-cookie: a=b": 1})
    assert response.headers[HEADER] == "%C3%A9vil%0D%0Aset-cookie%3A%20a%3Db"
    assert "set-cookie" not in response.headers and len(caplog.records) == 1 and "\n" not in caplog.messages[0]


def test_the_header_has_a_bound(client: TestClient) -> None:
    names = [f"of_mine_{number}_{'x' * 100}" for number in range(MAX_UNKNOWN)]
    response = chat(client, **dict.fromkeys(names, 1))
    assert response.status_code == 200
    assert len(response.headers[HEADER]) < 2100 and response.headers[HEADER].endswith(", ...")


def test_too_many_unknown_fields_are_refused(client: TestClient) -> None:
    response = chat(client, **{f"of_mine_{number}": 1 for number in range(MAX_UNKNOWN + 1)})
    assert response.status_code == 400 and "64 unknown fields" in response.json()["error"]["message"]


def test_a_field_of_many_messages_is_listed_once(client: TestClient) -> None:
    messages = [USER | {"of_mine": 1}] * 100
    assert chat(client, messages=messages).headers[HEADER] == "messages.of_mine"


@pytest.mark.parametrize("name", ["cache_control", "x_of_my_own", "reasoning_budget"])
def test_a_strict_server_refuses_what_its_types_do_not_have(strict: TestClient, name: str) -> None:
    response = chat(strict, **{name: 1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name
    assert chat(strict, user="me").headers[HEADER] == "user"


def test_a_wrong_value_behind_an_unknown_field_is_still_refused(client: TestClient) -> None:
    assert chat(client, of_mine=1, temperature="hot").json()["error"]["param"] == "temperature"


def test_no_field_is_both_harmless_and_refused() -> None:
    assert not set(HARMLESS) & set(REFUSED)


def test_no_sampling_parameter_is_refused_as_one_that_there_is_not() -> None:
    refused = {name for name, field in REFUSED.items() if "no such sampler" in field.advice}
    assert refused and not refused & {field.name for field in fields(SamplingParams)}


def test_the_documentation_has_the_whole_table() -> None:
    text = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    missing = [name for name in (*HARMLESS, *REFUSED) if f"`{name}`" not in text]
    assert not missing


def distance(left: str, right: str) -> int:
    """Levenshtein's, as its definition has it."""
    if not left or not right:
        return len(left) + len(right)
    changed = distance(left[1:], right[1:])
    return changed if left[0] == right[0] else 1 + min(changed, distance(left[1:], right), distance(left, right[1:]))


@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_two_edits_are_counted_as_defined(left: str, right: str) -> None:
    assert is_near(left, right) == (distance(left, right) <= 2)
