"""Tools of several MCP servers at once: more than there were, and longer, in all dialects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from radixlm.runtime.chat.grammar import MAX_GRAMMAR_LENGTH
from radixlm.runtime.server.openai.tools import MAX_TOOLS

from ..tool_templates import CALLS, QWEN, calling
from .scripted import Scripted

PATHS = {
    "chat": ("/v1/chat/completions", "tools.{}.function.parameters", "tools[{}].function.parameters"),
    "responses": ("/v1/responses", "tools.{}.parameters", "tools[{}].parameters"),
    "messages": ("/v1/messages", "tools.{}.input_schema", "tools[{}].input_schema"),
}
FORMATS = {"hermes": QWEN, "qwen-coder": calling(CALLS["qwen-coder"])}


@pytest.fixture(scope="module", params=FORMATS)
def model(request: pytest.FixtureRequest) -> Iterator[Scripted]:
    with Scripted.serving(FORMATS[request.param], context_length=1 << 18) as model:
        yield model


def schema(number: int, *, num_arguments: int = 8, words: str = "About this. " * 15, values: int = 0) -> dict[str, Any]:
    enum = {"enum": [f"value {number} {place}" for place in range(values)]} if values else {}
    each = {"type": "string", "description": words, **enum}
    properties = {f"argument_{place}": each for place in range(num_arguments)}
    return {"type": "object", "properties": properties, "required": ["argument_0"], "additionalProperties": False}


def ask(model: Scripted, dialect: str, says: str, schemas: dict[str, Any], **fields: object) -> Any:
    """A request with tools by their names. `strict` of these is a field, too."""
    own = {name: value for name, value in fields.items() if name == "strict"}
    others = {name: value for name, value in fields.items() if name != "strict"}
    model.say(says)
    if dialect == "chat":
        tools: list[Any] = [
            {"type": "function", "function": {"name": name, "parameters": each, **own}}
            for name, each in schemas.items()
        ]
        body: dict[str, object] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300}
    elif dialect == "responses":
        tools = [{"type": "function", "name": name, "parameters": each, **own} for name, each in schemas.items()]
        body = {"input": "Hi", "max_output_tokens": 300}
    else:
        tools = [{"name": name, "input_schema": each, **own} for name, each in schemas.items()]
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300}
    return model.client.post(PATHS[dialect][0], json={**body, "temperature": 0, "tools": tools, **others})


def called(reply: Any) -> list[tuple[str, Any]]:
    """The calls of a reply in any dialect."""
    if "choices" in reply:
        calls = [call["function"] for call in reply["choices"][0]["message"].get("tool_calls", ())]
        return [(call["name"], json.loads(call["arguments"])) for call in calls]
    if "output" in reply:
        return [(each["name"], json.loads(each["arguments"])) for each in reply["output"] if "arguments" in each]
    return [(each["name"], each["input"]) for each in reply["content"] if each["type"] == "tool_use"]


@pytest.mark.parametrize("dialect", PATHS)
def test_a_hundred_tools_with_long_descriptions_are_called(model: Scripted, dialect: str) -> None:
    """Their descriptions counted, too, and the request was refused in the name of another field."""
    schemas = {f"tool_{number}": schema(number) for number in range(100)}
    assert len(json.dumps(schemas)) > MAX_GRAMMAR_LENGTH
    response = ask(model, dialect, model.format.text_of([("tool_99", '{"argument_0": "x"}')]), schemas)
    assert response.status_code == 200, response.text
    assert called(response.json()) == [("tool_99", {"argument_0": "x"})]
    if model.format.arguments.texts == "":  # in JSON all have room
        assert "x-radixlm-ignored" not in response.headers


@pytest.mark.parametrize("dialect", PATHS)
def test_the_longest_schemas_are_let_go_of_where_there_is_no_room(model: Scripted, dialect: str) -> None:
    short = schema(0, num_arguments=1, words="", values=2)
    schemas = {f"tool_{number}": schema(number, num_arguments=3, values=100 + number) for number in range(40)}
    schemas["short"] = short
    response = ask(model, dialect, model.format.text_of([("tool_39", '{"argument_0": "any"}')]), schemas)
    assert called(response.json()) == [("tool_39", {"argument_0": "any"})]
    listed = set(response.headers["x-radixlm-ignored"].split(", "))
    assert PATHS[dialect][1].format("tool_39") in listed
    assert not listed & {PATHS[dialect][1].format(name) for name in ("tool_0", "short")}
    assert set(listed) == {PATHS[dialect][1].format(f"tool_{number}") for number in range(40 - len(listed), 40)}
    for name in ("tool_0", "short"):
        wrong = model.format.text_of([(name, '{"argument_0": "any"}')])
        assert "any" not in ask(model, dialect, wrong, schemas).text


@pytest.mark.parametrize("dialect", PATHS)
def test_strict_schemas_that_have_no_room_are_named(model: Scripted, dialect: str) -> None:
    schemas = {f"tool_{number}": schema(number, num_arguments=3, values=100 + number) for number in range(40)}
    response = ask(model, dialect, "Hi.", schemas, strict=True)
    error = response.json()["error"]
    field = PATHS[dialect][2].format(39)
    assert response.status_code == 400 and error["message"].startswith(f"{field}: ") and "shorten" in error["message"]
    assert dialect == "messages" or error["param"] == field


@pytest.mark.parametrize("dialect", PATHS)
def test_no_tool_is_one_too_many_up_to_the_limit(model: Scripted, dialect: str) -> None:
    schemas = {f"mcp__server_{number % 9}__do_something_number_{number}": {} for number in range(MAX_TOOLS)}
    name = list(schemas)[-1]
    response = ask(model, dialect, model.format.text_of([(name, "{}")]), schemas)
    assert called(response.json()) == [(name, {})], response.text
    refused = ask(model, dialect, "Hi.", {**schemas, "one_more": {}})
    assert refused.status_code == 400 and "513 entries" in refused.json()["error"]["message"]
