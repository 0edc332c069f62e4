"""Messages of refused requests name what is wrong in words of JSON, and what the endpoint takes instead."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import inspect
from radixlm.runtime.server import create_app
from radixlm.runtime.server.app import OF_A_MODEL, OF_ALL
from radixlm.runtime.server.errors import HTTPError
from radixlm.runtime.server.field_policy import HARMLESS, REFUSED, judge
from radixlm.runtime.server.page import PAGE_PATHS
from starlette.testclient import TestClient

if TYPE_CHECKING:
    from .conftest import FakeEngine

USER = {"role": "user", "content": "Hi"}
CHAT, RESPONSES, TEXTS = "/v1/chat/completions", "/v1/responses", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    TEXTS: {"prompt": "Hi"},
    RESPONSES: {"input": "Hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 4},
}
ANTHROPIC = {"anthropic-version": "2023-06-01"}
OTHER_NAMES = {  # of fields in other APIs, near to names that mean something else
    *("content", "contents", "texts", "prefix", "state", "stops", "tokens", "token_ids", "input_ids", "inputs", "top_n")
}


def refusal(client: TestClient, path: str, body: object) -> str:
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    message = response.json()["error"]
    return str(message if isinstance(message, str) else message["message"])


@pytest.mark.parametrize(
    ("path", "body", "advice"),
    [
        ("/tokenize", {"content": "Hi"}, "send `prompt`"),
        ("/tokenize", {"text": "Hi"}, "send `prompt`"),
        (CHAT, {"prompt": "Hi"}, "send `messages`"),
        (CHAT, {"input": "Hi"}, "send `messages`"),
        (CHAT, {"messages": [USER], "max_output_tokens": 5}, "send `max_completion_tokens`"),
        (TEXTS, {"messages": [USER]}, f"send `prompt`, or use {CHAT}"),
        (TEXTS, {"prompt": "Hi", "stop_sequences": ["a"]}, "send `stop`"),
        (RESPONSES, {"messages": [USER]}, f"send `input`, or use {CHAT}"),
        (RESPONSES, {"prompt": "Hi"}, "send `input`"),
        (RESPONSES, {"input": "Hi", "max_tokens": 5}, "send `max_output_tokens`"),
        (RESPONSES, {"input": "Hi", "system": "Be brief."}, "send `instructions`"),
        ("/v1/messages", {"prompt": "Hi"}, "send `messages`"),
        ("/v1/messages", {"input": "Hi"}, "send `messages`"),
        ("/api/chat", {"prompt": "Hi"}, "send `messages`"),
    ],
)
def test_a_field_of_another_api_is_answered_with_this_ones(
    client: TestClient, path: str, body: dict[str, Any], advice: str
) -> None:
    assert refusal(client, path, body).endswith(advice)


@pytest.mark.parametrize("path", OF_A_MODEL)
def test_no_field_of_one_endpoint_is_taken_for_a_misspelt_one_of_another(path: str) -> None:
    known = set(OF_A_MODEL[path].body.__struct_fields__)
    others = {name for each in OF_A_MODEL.values() for name in each.body.__struct_fields__}
    same = {"instruction"}  # means `instructions`
    for name in sorted((others | HARMLESS.keys() | REFUSED.keys() | OTHER_NAMES) - known - same):
        try:
            judge(name, {"a": 1}, known)
        except HTTPError as error:
            assert "you mean" not in str(error), error


TAKE_NOTHING = {CHAT: {"audio", "prediction", "web_search_options"}, RESPONSES: {"prompt"}}


@pytest.mark.parametrize("path", OF_A_MODEL)
def test_a_field_that_takes_nothing_is_refused_with_the_advice_of_the_table(client: TestClient, path: str) -> None:
    found = set()
    for each in inspect.type_info(OF_A_MODEL[path].body).fields:  # type: ignore[attr-defined]  # a struct
        members = each.type.types if isinstance(each.type, inspect.UnionType) else (each.type,)
        values = [member.values if isinstance(member, inspect.LiteralType) else member for member in members]
        if all(value == (False,) or isinstance(value, inspect.NoneType) for value in values):
            found.add(each.name)
            message = refusal(client, path, BODIES.get(path, {}) | {each.name: {"a": 1}})
            assert message.startswith(f"unsupported field `{each.name}`; "), message
            assert message.endswith(REFUSED[each.name].advice) or "; send `" in message
    assert found == TAKE_NOTHING.get(path, set())


def test_a_misspelt_field_of_a_message_is_named(client: TestClient) -> None:
    message = refusal(client, CHAT, {"messages": [{"role": "user", "contents": "Hi"}]})
    assert message == "unknown field `messages.contents`; did you mean `content`?"


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (CHAT, {"messages": [{"role": "usr", "content": ""}]}, "messages[0].role is 'usr'; it must be 'assistant', "),
        (CHAT, {"messages": [{"content": "Hi"}]}, "messages[0] has no `role`, which is required"),
        (CHAT, {"messages": []}, "messages must be a list of at least 1 entry"),
        (CHAT, {"tools": [{"type": "x"}]}, "tools[0].type is 'x'; it must be 'function'"),
        (CHAT, {"tool_choice": {"type": "x"}}, "tool_choice.type is 'x'; it must be 'function' or 'allowed_tools'"),
        (CHAT, {"reasoning_effort": True}, "reasoning_effort is a boolean; it must be a text or null"),
        (CHAT, {"stream": "maybe"}, "stream is a text; it must be true, false or null"),
        (CHAT, {"logit_bias": {"a": 1}}, "a name in logit_bias is a text; it must be an integer"),
        (CHAT, {"cache_salt": "x" * 2000}, "cache_salt must be a text of at most 1024 characters"),
        (CHAT, {"cache_match": "x" * 2000}, "cache_match is 'xxx"),
        (CHAT, {"modalities": ["audio"]}, "modalities[0] is 'audio'; it must be 'text'"),
        (TEXTS, {"prompt": [-1]}, "prompt[0] must be an integer, at least 0"),
        (RESPONSES, {"text": {"format": {"type": "x"}}}, "text.format.type is 'x'; it must be 'text', 'json_object' "),
        (RESPONSES, {"tools": [{"type": "function"}]}, "tools[0] has no `name`, which is required"),
        (RESPONSES, {"tools": [{"type": "function", "name": ["f"]}]}, "tools[0].name is a list; it must be a text"),
        (RESPONSES, {"tool_choice": {"type": True}}, 'tool_choice is {"type": true}; send "auto", '),
        ("/v1/messages", {"max_tokens": "many"}, "max_tokens is a text; it must be an integer"),
    ],
)
def test_a_value_that_does_not_match_is_described_in_words_of_json(
    client: TestClient, path: str, fields: dict[str, Any], message: str
) -> None:
    found = refusal(client, path, BODIES[path] | fields)
    assert found.startswith(message) and len(found) < 300
    assert not re.search(r"\b(True|False|None|int|str|bool|array)\b|\$", found)


def test_a_missing_field_is_named(client: TestClient) -> None:
    assert refusal(client, CHAT, {}) == "the body has no `messages`, which is required"
    assert refusal(client, CHAT, [1]) == "the body is a list; it must be an object"


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/chat/completions", CHAT),
        ("/v1/chat/completion", CHAT),
        ("/v1/v1/chat/completions", CHAT),
        ("/openai/v1/chat/completions", CHAT),
        ("/V1/Chat/Completions", CHAT),
        ("/completions", TEXTS),
        ("/v1/model", "/v1/models"),
        ("/v1/chat", CHAT),
        ("/v1", None),
        ("/v1/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/api/embeding", "/api/embeddings"),
        ("/nothing/like/it", None),
        ("/static", None),
    ],
)
def test_a_path_that_does_not_exist_is_answered_with_the_nearest(
    client: TestClient, method: str, path: str, near: str | None
) -> None:
    response = client.request(method, path, follow_redirects=False)
    assert response.status_code == 404
    hint = "see /openapi.json" if near is None else f"did you mean {near}?"
    said = response.json()["error"]
    message = said if isinstance(said, str) else said["message"]
    assert message == f"there is no endpoint {path}; {hint}"


def test_an_error_on_a_path_of_two_apis_has_the_form_that_the_header_names(client: TestClient) -> None:
    for path in ("/v1/models/nope", "/v1/nothing"):
        assert client.get(path, headers=ANTHROPIC).json()["error"]["type"] == "not_found_error"
        assert client.get(path, headers=ANTHROPIC).json()["type"] == "error"
        assert "code" in client.get(path).json()["error"]
    own = client.post(CHAT, json={}, headers=ANTHROPIC).json()
    assert own["error"]["param"] == "messages"  # the endpoint is OpenAI's alone
    assert isinstance(client.post("/api/chat", json={"prompt": 1}, headers=ANTHROPIC).json()["error"], str)


def test_how_to_accept_any_name_depends_on_the_number_of_models(engine: FakeEngine, client: TestClient) -> None:
    several = TestClient(create_app({"a": engine, "b": engine}))  # type: ignore[dict-item]
    assert "--model-id '*'" in client.get("/v1/models/nope").json()["error"]["message"]
    message = several.get("/v1/models/nope").json()["error"]["message"]
    assert 'aliases = ["*"]' in message and "--model-id" not in message


def test_a_model_without_chat_template_is_listed_as_such(engine: FakeEngine, client: TestClient) -> None:
    assert client.get("/v1/models").json()["data"][0]["has_chat_template"] is True
    engine.prompts.chat_template = None
    assert client.get("/v1/models/fake").json()["has_chat_template"] is False


def test_files_of_the_web_ui_are_logged_at_debug_unless_they_fail(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "radixlm.requests")
    for path in PAGE_PATHS:
        client.get(path)
    client.get("/static/nothing.js")
    levels = {record.fields["path"]: record.levelno for record in caplog.records if hasattr(record, "fields")}
    assert {path for path, level in levels.items() if level > logging.DEBUG} == {"/", "/static/nothing.js"}


def test_every_endpoint_is_near_to_itself_misspelt(client: TestClient) -> None:
    for path in [*OF_A_MODEL, *(path for path, *_ in OF_ALL)]:
        if "{" not in path and path.count("/") > 1:
            said = client.get(f"{path}x").json()["error"]
            assert f"did you mean {path}?" in (said if isinstance(said, str) else said["message"]), path
