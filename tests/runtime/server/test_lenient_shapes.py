"""Shapes with one obvious meaning are served, the same as what they mean, and listed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from radixlm.runtime.chat.conversations import Conversations
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.server.anthropic.requests import MessagesRequest
from radixlm.runtime.server.lenient.foreign_messages import for_chat, for_messages, for_responses
from radixlm.runtime.server.lenient.shapes import CHAT, COMPLETIONS, MESSAGES, RESPONSES, relax
from radixlm.runtime.server.lenient.values import VALUES, relax_values
from radixlm.runtime.server.openai.chat_request import ChatRequest
from radixlm.runtime.server.openai.requests import CompletionRequest
from radixlm.runtime.server.openai.response_requests import ResponseRequest

from ..compared_id import Id
from ..tool_templates import CALLS, QWEN, calling
from .scripted import Scripted

CALL: dict[str, Any] = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "x", "content": "2"}
ADD: dict[str, Any] = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {}}}}
TOOL: dict[str, Any] = {"type": "function", "function": ADD}
HEADER = "x-radixlm-ignored"


@pytest.fixture(scope="module")
def model() -> Iterator[Scripted]:
    with Scripted.serving(QWEN) as model:
        yield model


def talk(call: dict[str, Any] = CALL, result: dict[str, Any] = RESULT, **assistant: Any) -> list[dict[str, Any]]:
    said = {"role": "assistant", "content": None, "tool_calls": [call], **assistant}
    return [{"role": "user", "content": "add"}, said, result, {"role": "user", "content": "thanks"}]


def without(value: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: each for key, each in value.items() if key != name}


def asked(model: Scripted, path: str, **body: Any) -> Any:
    model.say("Yes.")
    response = model.client.post(path, json={"temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response


def prompt_of(model: Scripted, messages: list[Any], **body: Any) -> tuple[list[int], str]:
    body = {"messages": messages, "tools": [TOOL], "max_tokens": 8, "return_token_ids": True, **body}
    response = asked(model, "/v1/chat/completions", **body)
    return response.json()["prompt_token_ids"], response.headers.get(HEADER, "")


NONE = {"id": None}
FUNCTION = {"name": "add", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    ("sent", "meant", "listed"),
    [
        (talk(without(CALL, "id")), talk(), "messages"),
        (talk({**CALL, **NONE}), talk(), "messages"),
        (talk(result=without(RESULT, "tool_call_id")), talk(), "messages"),
        (talk({**CALL, **NONE}, {**RESULT, "tool_call_id": None}), talk(), "messages"),
        (talk(result={**RESULT, "content": None}), talk(result={**RESULT, "content": ""}), "messages.content"),
        (talk(result=without(RESULT, "content")), talk(result={**RESULT, "content": ""}), "messages.content"),
        (talk(result={**RESULT, "content": 42}), talk(result={**RESULT, "content": "42"}), "messages.content"),
        (
            talk(result={**RESULT, "content": {"r": 2}}),
            talk(result={**RESULT, "content": '{"r":2}'}),
            "messages.content",
        ),
        (
            talk(result={**RESULT, "content": ["a", "b"]}),
            talk(result={**RESULT, "content": '["a","b"]'}),
            "messages.content",
        ),
        (talk({**CALL, "function": FUNCTION}), talk(), "messages.tool_calls.function.arguments"),
        (talk({"id": "x", **CALL["function"]}), talk(), "messages.tool_calls"),
        (talk({**CALL, "type": None}), talk(), "messages.tool_calls.type"),
        (
            talk(result={**RESULT, "content": [{"type": "text", "text": None}]}),
            talk(result={**RESULT, "content": ""}),
            "messages.content.text",
        ),
        (
            [{"role": "system", "content": None}, {"role": "user", "content": "a"}],
            [{"role": "system", "content": ""}, {"role": "user", "content": "a"}],
            "messages.content",
        ),
        (
            [*talk()[:1], {"role": "assistant", "content": None}, {"role": "user", "content": "a"}],
            [*talk()[:1], {"role": "assistant", "content": ""}, {"role": "user", "content": "a"}],
            "messages.content",
        ),
        (
            [*talk()[:1], {"role": "assistant", "tool_calls": []}, {"role": "user", "content": "a"}],
            [*talk()[:1], {"role": "assistant", "content": ""}, {"role": "user", "content": "a"}],
            "messages.content",
        ),
        (
            [{"role": "user", "content": ["a", "b"]}],
            [{"role": "user", "content": "ab"}],
            "messages.content",
        ),
    ],
)
def test_a_history_is_read_as_what_it_means(model: Scripted, sent: list[Any], meant: list[Any], listed: str) -> None:
    ids, header = prompt_of(model, sent)
    assert (ids, header.split(", ")) == (prompt_of(model, meant)[0], [listed])


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ("null", "{}"),
        ("", "{}"),
        ('""', "{}"),
        (json.dumps('{"a": 1}'), '{"a": 1}'),
        (r'{"a": "b\ud83d"}', '{"a": "b\ufffd"}'),
        (r'{"a": "b\ud83d', '{"a": "b\ufffd"}'),
    ],
)
def test_arguments_of_calls_end_no_conversation(model: Scripted, sent: str, meant: str) -> None:
    calls = [talk({**CALL, "function": {"name": "add", "arguments": text}}) for text in (sent, meant)]
    assert prompt_of(model, calls[0])[0] == prompt_of(model, calls[1])[0]


ITEMS: list[tuple[Any, Any]] = [
    ({"type": None, "role": "user", "content": "a"}, {"role": "user", "content": "a"}),
    ({"role": "assistant"}, {"role": "assistant", "content": ""}),
    ({"role": "user", "content": ["a", "b"]}, {"role": "user", "content": "ab"}),
    ({"role": "assistant", "content": ["a"]}, {"role": "assistant", "content": "a"}),
    ({"role": "user", "content": {"type": "input_text", "text": "a"}}, {"role": "user", "content": "a"}),
]
BLOCKS: list[tuple[Any, Any]] = [
    (["a", "b"], "ab"),
    ({"type": "text", "text": "a"}, "a"),
    ([{"type": "text", "text": None}, {"type": "text", "text": "a"}], "a"),
]


@pytest.mark.parametrize(("sent", "meant"), ITEMS)
def test_an_item_is_read_as_what_it_means(model: Scripted, sent: Any, meant: Any) -> None:
    body = {"max_output_tokens": 8}
    first, second = (
        asked(
            model,
            "/v1/responses",
            input=[{"role": "user", "content": "q"}, item, {"role": "user", "content": "r"}],
            **body,
        )
        for item in (meant, sent)
    )
    assert first.json()["usage"]["input_tokens"] == second.json()["usage"]["input_tokens"]
    assert second.headers[HEADER].startswith("input.")


@pytest.mark.parametrize(("sent", "meant"), BLOCKS)
def test_the_content_of_a_message_is_read_as_what_it_means(model: Scripted, sent: Any, meant: Any) -> None:
    asks = [
        asked(model, "/v1/messages", messages=[{"role": "user", "content": each}], max_tokens=8)
        for each in (meant, sent)
    ]
    assert len({sum(ask.json()["usage"][f"{kind}input_tokens"] for kind in ("", "cache_read_")) for ask in asks}) == 1
    assert asks[1].headers[HEADER].startswith("messages.content")


def test_results_without_ids_belong_to_calls_by_their_order(model: Scripted) -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": f'{{"a":{n}}}'}} for n in (1, 2)]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    sent = [*talk()[:1], said, without(RESULT, "tool_call_id"), {"role": "tool", "content": "3"}]
    named = [{**call, "id": name} for call, name in zip(calls, "xy", strict=True)]
    meant = [*talk()[:1], {**said, "tool_calls": named}, RESULT, {**RESULT, "tool_call_id": "y", "content": "3"}]
    assert prompt_of(model, sent)[0] == prompt_of(model, meant)[0]


CHOICES = [
    ("any", "required"),
    ({"type": "any"}, "required"),
    ({"type": "auto"}, "auto"),
    ({"type": "none"}, "none"),
    ({"type": "tool", "name": "add"}, "add"),
    ({"type": "function", "name": "add"}, "add"),
    ({"type": "function", "function": {"name": "add"}}, "add"),
]
SHAPES_OF_TOOLS = [
    TOOL,
    {"type": "function", **ADD},
    {"name": "add", "description": "Adds.", "input_schema": ADD["parameters"]},
]


@pytest.mark.parametrize(("choice", "meant"), CHOICES)
@pytest.mark.parametrize("tool", SHAPES_OF_TOOLS, ids=["chat", "responses", "messages"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_tools_and_their_choice_may_have_the_shape_of_any_api(
    model: Scripted, path: str, tool: Any, choice: Any, meant: str
) -> None:
    says = model.format.text_of([("add", "{}")])
    model.say(says if meant in ("required", "add") else "Yes.")
    said: dict[str, Any] = {"input": "add"} if path == "/v1/responses" else {"messages": talk()[:1]}
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**said, "tools": [tool], "tool_choice": choice, most: 60, "temperature": 0}
    response = model.client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert ("Yes." in response.text) == (meant in ("auto", "none"))


def test_only_some_tools_may_be_called_in_chats_too(model: Scripted) -> None:
    tools = [TOOL, {"type": "function", "function": {"name": "now"}}]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    for choice in ({"type": "allowed_tools", "allowed_tools": allowed}, {"type": "allowed_tools", **allowed}):
        choice = model.reply(model.format.text_of([("now", "{}")]), tools=tools, tool_choice=choice)
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]


@pytest.mark.parametrize(
    ("change", "listed"),
    [
        ({"call_id": None}, "input"),
        ({"arguments": {"a": 1}}, "input.arguments"),
        ({"output": None}, "input.output"),
        ({"output": {"r": 2}}, "input.output"),
    ],
)
def test_items_are_read_as_what_they_mean(model: Scripted, change: dict[str, Any], listed: str) -> None:
    call = {"type": "function_call", "call_id": "x", "name": "add", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "x", "output": "2"}
    items = [{**each, **{name: value for name, value in change.items() if name in each}} for each in (call, result)]
    body = {"input": [{"role": "user", "content": "add"}, *items], "tools": [{"type": "function", **ADD}]}
    assert asked(model, "/v1/responses", **body, max_output_tokens=8).headers[HEADER] == listed


@pytest.mark.parametrize(
    ("call", "result", "listed"),
    [
        ({"id": None}, {"tool_use_id": None}, "messages"),
        ({"input": '{"a": 1}'}, {}, "messages.content.input"),
        ({"input": None}, {}, "messages.content.input"),
        ({}, {"content": {"r": 2}}, "messages.content.content"),
        ({}, {"content": 2}, "messages.content.content"),
    ],
)
def test_blocks_are_read_as_what_they_mean(
    model: Scripted, call: dict[str, Any], result: dict[str, Any], listed: str
) -> None:
    messages = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "add", "input": {}, **call}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "2", **result}]},
    ]
    tools = [{"name": "add", "input_schema": ADD["parameters"]}]
    response = asked(model, "/v1/messages", messages=messages, tools=tools, max_tokens=8)
    assert response.headers[HEADER] == listed


@pytest.mark.parametrize(
    "half", ["\\\\ud83d\\ude00", "\\\\\\\\\\ude00", "\\ud83d", "\\ude00", "\\uD83D x \\ud83d", "\\\\\\ud83d"]
)
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions", "/tokenize"]
)
def test_half_an_emoji_is_a_replacement_character(model: Scripted, path: str, half: str) -> None:
    """Clients cut texts by units of UTF-16, and send the half with every later request."""
    words = f'"cut {half}"'
    bodies = {"/v1/responses": '"input": ', "/v1/completions": '"prompt": ', "/tokenize": '"prompt": '}
    said = bodies.get(path, '"messages": ') + (words if path in bodies else f'[{{"role": "user", "content": {words}}}]')
    limit = {"/tokenize": "", "/v1/responses": ', "max_output_tokens": 4'}.get(path, ', "max_tokens": 4')
    for text in (said, said + ', "of_mine": 1'):
        response = model.client.post(path, content=f"{{{text}{limit}}}".encode())
        assert response.status_code == 200, response.text
        assert "surrogates" in response.headers[HEADER]
    pair = model.client.post(
        path, content=f"{{{said.replace(half, chr(92) + 'ud83d' + chr(92) + 'ude00')}{limit}}}".encode()
    )
    assert HEADER not in pair.headers


@pytest.mark.parametrize("name", ["cache_salt", "prompt_cache_key"])
def test_half_a_character_makes_no_two_caches_one(model: Scripted, name: str) -> None:
    """Halves that are unlike would all be U+FFFD, so that clients with them shared a cache."""
    for half in ("\\ud83d", "\\ude00"):
        body = f'{{"prompt": "a", "max_tokens": 1, "{name}": "mine {half}"}}'
        response = model.client.post("/v1/completions", content=body.encode())
        assert response.status_code == 400 and name in response.json()["error"]["message"]


@pytest.mark.parametrize("off", [{"max_tokens": -1}, {"max_completion_tokens": -1}, {"stop": ""}, {"stop": []}])
def test_values_that_mean_off_are_off(model: Scripted, off: dict[str, Any]) -> None:
    body = {"max_tokens": None, **off}
    assert model.reply("Yes.", **body)["message"]["content"] == "Yes."


def test_long_names_of_tools_are_served(model: Scripted) -> None:
    name = "mcp__plugin_chrome-devtools-mcp_chrome-devtools__get_console_message"
    tools = [{"type": "function", "function": {"name": name}}]
    choice = model.reply(model.format.text_of([(name, "{}")]), tools=tools)
    assert choice["message"]["tool_calls"][0]["function"]["name"] == name


def test_new_tokens_are_input_where_nothing_is_marked(model: Scripted) -> None:
    system = [{"type": "text", "text": "Count the tokens of this."}]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    plain = asked(model, "/v1/messages", system=system, **body).json()["usage"]
    assert plain["input_tokens"] > 0 and plain["cache_creation_input_tokens"] == 0
    marked_system = [{**system[0], "text": "Another.", "cache_control": {"type": "ephemeral"}}]
    marked = asked(model, "/v1/messages", system=marked_system, **body).json()["usage"]
    assert marked["input_tokens"] == 0 and marked["cache_creation_input_tokens"] > 0


DECIMAL = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}
UNFOLLOWED = [
    {"type": "object", "properties": {"x": DECIMAL}, "required": ["x"]},
    {"type": "object", "properties": {"x": {"$ref": "#/$defs/Nope"}}, "required": ["x"]},
    {"type": "object", "properties": {"x": {"$ref": "#foo"}}, "required": ["x"]},
    {"type": "object", "properties": {"x": {"type": "string", "minLength": 5, "maxLength": 2}}, "required": ["x"]},
    {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
    {
        "type": "object",
        "properties": {"x": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}},
        "required": ["x"],
    },
    {"type": "object", "properties": {"x": {"not": {"type": "string"}}}, "required": ["x"]},
    {"type": "object", "properties": {"x": {}}, "if": {"required": ["x"]}, "then": {"required": ["x"]}},
    {"type": "object", "properties": {"x": {}}, "dependentRequired": {"x": ["x"]}},
]


@pytest.mark.parametrize("schema", UNFOLLOWED, ids=range(len(UNFOLLOWED)))
def test_what_of_a_schema_cannot_be_followed_is_left_out_alike_everywhere(model: Scripted, schema: Any) -> None:
    text = '{"x": 1}' if "$ref" not in str(schema["properties"]["x"]) else '{"x": {}}'
    text = '{"x": []}' if "minItems" in str(schema) else '{"x": "a"}' if "minLength" in str(schema) else text
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for body in ({"tools": None}, {}):
        response = model.ask(text, response_format=format, **body)
        assert response.status_code == 200, response.text
        assert response.headers[HEADER] == "response_format"
        assert json.loads(response.json()["choices"][0]["message"]["content"]).keys() <= {"x"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    response = model.ask(model.format.text_of([("f", text)]), tools=tools, tool_choice="required")
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "tools.f.function.parameters"
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("name", ["hermes", "qwen-coder", "lfm"])
def test_a_value_that_is_the_whole_schema_again_ends_no_reply(name: str) -> None:
    array = {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}
    either = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    template = QWEN if name == "hermes" else calling(CALLS[name])
    with Scripted.serving(template) as model:
        for schema in (array, {"allOf": [{"$ref": "#"}]}, either, {"type": "array", "items": either}):
            asks = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
            tools = [{"type": "function", "function": {"name": "f", "parameters": asks}}]
            response = model.ask(model.format.text_of([("f", '{"x": null}')]), tools=tools)
            assert response.status_code == 200, response.text
        asks = {"type": "object", "properties": {"x": either}, "required": ["x"]}
        tools = [{"type": "function", "function": {"name": "f", "parameters": asks}}]
        choice = model.reply(model.format.text_of([("f", '{"x": {"x": null}}')]), tools=tools)
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"x": {"x": None}}


def test_a_strict_schema_that_no_value_with_an_end_fits_is_refused(model: Scripted) -> None:
    schema = UNFOLLOWED[4]
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    for body in ({"response_format": format}, {"tools": tools}):
        response = model.ask("Hm.", **body)
        assert response.status_code == 400 and "without end" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "draft", ["https://json-schema.org/draft-07/schema#", "http://json-schema.org/draft-07/schema", "x:y"]
)
def test_the_name_of_a_draft_decides_nothing(model: Scripted, draft: str) -> None:
    schema = {"$schema": draft, "type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]}
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    response = model.ask('{"x": 1}', response_format=format, tools=None)
    assert response.status_code == 200, response.text
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    listed = None if "json-schema.org" in draft else "tools.f.function.parameters"
    assert model.ask("Hm.", tools=tools).headers.get(HEADER) == listed


def test_the_table_is_the_documentation() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "agents.md").read_text()
    for shape in (*CHAT, *RESPONSES, *MESSAGES, *COMPLETIONS):
        assert f"| `{shape.path}` | {shape.sent} | {shape.meaning} |" in page, shape
    for value in VALUES:
        assert f"| any field | {value.sent} | {value.meaning} |" in page, value


APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": ("messages", {"max_tokens": 4}),
    "/v1/responses": ("input", {"max_output_tokens": 4}),
    "/v1/messages": ("messages", {"max_tokens": 4}),
}
THANKS = {"role": "user", "content": "thanks"}
BLOCK_CALLS = [{"type": "tool_use", "id": name, "name": "add", "input": {"a": 1}} for name in "xy"]
BLOCK_RESULTS = [{"type": "tool_result", "tool_use_id": name, "content": name} for name in "xy"]
ITEM_CALLS = [{"type": "function_call", "call_id": name, "name": "add", "arguments": '{"a":1}'} for name in "xy"]
ITEM_RESULTS = [{"type": "function_call_output", "call_id": name, "output": name} for name in "xy"]
CHAT_RESULTS = [{"role": "tool", "tool_call_id": name, "content": name} for name in "xy"]
HISTORIES = {
    "chat": [
        {"role": "assistant", "content": "Hm.", "tool_calls": [{**CALL, "id": name} for name in "xy"]},
        *CHAT_RESULTS,
        THANKS,
    ],
    "items": [{"role": "assistant", "content": "Hm."}, *ITEM_CALLS, *ITEM_RESULTS, THANKS],
    "blocks": [
        {"role": "assistant", "content": [{"type": "text", "text": "Hm."}, *BLOCK_CALLS]},
        {"role": "user", "content": BLOCK_RESULTS},
        THANKS,
    ],
    "blocks with words": [
        {"role": "assistant", "content": [{"type": "text", "text": "Hm."}, *BLOCK_CALLS]},
        {"role": "user", "content": [*BLOCK_RESULTS, {"type": "text", "text": "thanks"}]},
    ],
}
OWN = {"/v1/chat/completions": "chat", "/v1/responses": "items", "/v1/messages": "blocks"}


@pytest.mark.parametrize("shape", HISTORIES)
@pytest.mark.parametrize("path", APIS)
def test_calls_and_results_may_have_the_shape_of_any_api(
    model: Scripted, monkeypatch: pytest.MonkeyPatch, path: str, shape: str
) -> None:
    field, body = APIS[path]
    rendered, render = list[str](), Conversations.rendered  # longer ones are of turns that may follow

    def note(*args: Any) -> str:
        text = render(*args)
        rendered.append(text)
        return text

    monkeypatch.setattr(Conversations, "rendered", note)

    def prompt(history: list[Any]) -> tuple[str, str]:
        said = {field: [{"role": "user", "content": "add"}, *history], "tools": [TOOL]}
        rendered.clear()
        response = asked(model, path, **said, **body)
        own = [text for text in rendered if "Adds." in text]  # not those of what a request before this one expects
        return min(own, key=len), response.headers.get(HEADER, "")

    meant, _ = prompt(HISTORIES[OWN[path]])
    sent, listed = prompt(HISTORIES[shape])
    assert sent == meant and "Hm." in meant
    assert (field in listed.split(", ")) == (not shape.startswith(OWN[path]))


def test_ids_of_calls_may_be_counted_anew_in_each_reply(model: Scripted) -> None:
    turn = [{"role": "assistant", "content": BLOCK_CALLS}, {"role": "user", "content": BLOCK_RESULTS}]
    asked(model, "/v1/messages", messages=[{"role": "user", "content": "add"}, *turn, *turn], max_tokens=4)


VALUES_SENT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": "0.5"}, {"temperature": 0.5}),
    ({"temperature": ""}, {}),
    ({"top_k": 5.0}, {"top_k": 5}),
    ({"top_k": " 5 "}, {"top_k": 5}),
    ({"stream": "False"}, {"stream": False}),
    ({"stream": 0}, {"stream": False}),
    ({"metadata": []}, {}),
    ({"metadata": ""}, {}),
    ({"tools": {}}, {}),
    ({"tools": False}, {}),
    ({"tools": [None]}, {"tools": []}),
    ({"tools": TOOL}, {"tools": [TOOL]}),
    ({"tools": [{**TOOL, "type": ""}]}, {"tools": [TOOL]}),
    ({"tools": [{"name": "add", "input_schema": None}]}, {"tools": [{"name": "add", "input_schema": {}}]}),
    ({"tools": [{"name": "add", "strict": "false"}]}, {"tools": [{"name": "add", "strict": False}]}),
    ({"tools": [{"name": "add"}]}, {"tools": [{"name": "add", "input_schema": {}}]}),
    ({"tool_choice": ""}, {}),
    ({"tool_choice": {}}, {}),
    ({"stop": [""]}, {}),
    ({"stop": ""}, {}),
    ({"banned_strings": ["", None]}, {}),
    ({"stop_sequences": ""}, {}),
]


@pytest.mark.parametrize(("sent", "meant"), VALUES_SENT, ids=str)
@pytest.mark.parametrize("path", APIS)
def test_a_value_is_read_as_what_it_means_in_every_api(
    model: Scripted, path: str, sent: dict[str, Any], meant: dict[str, Any]
) -> None:
    field, body = APIS[path]
    body = {**body, field: [{"role": "user", "content": "add"}]}
    model.say("Yes.")
    expected = model.client.post(path, json={**body, **meant})
    model.say("Yes.")
    response = model.client.post(path, json={**body, **sent})
    assert (response.status_code, expected.status_code) == (200, 200), response.text
    (name,) = sent
    is_known = not (name == "stop" and path != "/v1/chat/completions") and name != "stop_sequences"
    assert not is_known or HEADER in response.headers or (name, sent[name]) in (("tool_choice", {}), ("metadata", ""))


UNCLEAR: list[dict[str, Any]] = [
    {"cache_salt": []},
    {"cache_salt": 5},
    {"temperature": False},
    {"temperature": "warm"},
    {"temperature": "1,5"},
    {"top_k": 5.5},
    {"top_k": "5.5"},
    {"stream": "yes"},
    {"stream": 2},
    {"tools": "add"},
    {"banned_strings": 7},
]


@pytest.mark.parametrize("sent", UNCLEAR, ids=str)
@pytest.mark.parametrize("path", APIS)
def test_what_may_mean_two_things_is_refused_in_every_api(model: Scripted, path: str, sent: dict[str, Any]) -> None:
    field, body = APIS[path]
    response = model.client.post(path, json={**body, field: [{"role": "user", "content": "add"}], **sent})
    assert response.status_code == 400 and next(iter(sent)) in response.text


def test_values_that_are_taken_stay() -> None:
    assert relax_values({"prompt": "a", "n": "1"}, CompletionRequest) == {"n"}
    for body in ({"prompt": "a", "n": 1}, {"prompt": [1, 2]}, {"prompt": ["a"], "stop": None, "logit_bias": {"5": 1}}):
        sent = json.loads(json.dumps(body))
        assert relax_values(sent, CompletionRequest) == set() and sent == body


@pytest.mark.parametrize("off", [{"min_tokens": -1}, {"seed": -1}, {"top_k": -1}, {"max_tokens": -1}])
def test_minus_one_is_off(off: dict[str, Any]) -> None:
    body = msgspec.convert({"prompt": "a", **off}, CompletionRequest)
    name = next(iter(off))
    params = body.sampling_params(SamplingParams())
    assert getattr(params, name) == getattr(SamplingParams(), name)


def test_calls_go_on_with_the_reply_before_them_and_the_clients_messages_stay() -> None:
    user, said = {"role": "user", "content": "add"}, {"role": "assistant", "content": "Hm."}
    history = [user, said, *ITEM_CALLS, *ITEM_RESULTS, *ITEM_CALLS]
    calls = [{**CALL, "id": name} for name in "xy"]
    assert for_chat(history) == [
        user,
        {**said, "tool_calls": calls},
        *CHAT_RESULTS,
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    blocks = [{**block, "input": '{"a":1}'} for block in BLOCK_CALLS]
    assert for_messages(history)[1] == {"role": "assistant", "content": [{"type": "text", "text": "Hm."}, *blocks]}
    assert history[:2] == [user, {"role": "assistant", "content": "Hm."}]
    for read in (for_chat, for_messages, for_responses):
        assert read([user, said]) == [user, said]


REQUESTS = (ChatRequest, ResponseRequest, MessagesRequest, CompletionRequest)
ODD = st.sampled_from(
    [None, "", "a", "5", "5.0", "true", 0, 1, 5, 5.0, 0.5, True, False, [], {}, ["a"], [None], [5], "auto"]
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_a_field_takes_is_never_changed_and_what_is_changed_is_taken(data: st.DataObject) -> None:
    type = data.draw(st.sampled_from(REQUESTS))
    needed = {"messages": [{"role": "user", "content": "a"}], "input": "a", "prompt": "a", "max_tokens": 4}
    fields = {field.encode_name: field.required for field in msgspec.structs.fields(type)}
    name, value = data.draw(st.sampled_from(sorted(fields.keys() - needed.keys()))), data.draw(ODD)
    body = {**{key: each for key, each in needed.items() if fields.get(key)}, name: value}
    sent = json.loads(json.dumps(body))
    found = relax_values(sent, type)
    if is_taken(body, type):
        assert (found, sent) == (set(), body)
    elif found:
        assert found == {name} and (is_taken(sent, type) or name in sent)


def is_taken(body: dict[str, Any], type: Any) -> bool:
    try:
        msgspec.json.decode(json.dumps(body), type=type)
    except msgspec.ValidationError:
        return False
    return True


def test_results_find_their_calls_at_once() -> None:
    """Each was looked for among all calls: twenty seconds for a body of megabytes."""
    ids = [Id(f"c{number}") for number in range(500)]
    calls = [{"type": "function_call", "call_id": each, "name": "f", "arguments": "{}"} for each in ids]
    results = [{"type": "function_call_output", "call_id": Id(each), "output": "x"} for each in reversed(ids)]
    before = Id.num_compared
    assert relax({"input": [*calls, *results]}, RESPONSES) == set()
    assert Id.num_compared - before < 20 * len(ids)


def test_results_without_an_id_belong_to_the_first_calls_that_have_none() -> None:
    ids: list[tuple[str, str | None]] = [("call", "a"), ("call", "b"), ("call", "a"), ("call", None)]
    ids += [("output", "a"), ("output", None), ("output", "a"), ("output", None), ("output", None)]
    items = [
        {"type": f"function_{kind}" if kind == "call" else "function_call_output", "call_id": i} for kind, i in ids
    ]
    body = {"input": [{**item, "name": "f", "arguments": "{}", "output": "x"} for item in items]}
    relax(body, RESPONSES)
    assert [item["call_id"] for item in body["input"]] == ["a", "b", "a", "call_4", "a", "b", "a", "call_4", "call_5"]
