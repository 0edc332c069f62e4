"""The `openai` package's structured outputs and tools: what is asked for comes, whatever the model would say."""

from __future__ import annotations

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from .conftest import MODEL

HI = [{"role": "user", "content": "Paris is the capital of France. How is the weather there?"}]
ASKED = {"model": MODEL, "messages": HI, "max_tokens": 120, "temperature": 0}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


class Capital(BaseModel):
    """What a reply is to be."""

    city: Literal["Paris", "Rome"]
    population: Literal["small", "large"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_reply_follows_a_schema(client: openai.OpenAI, streams: bool) -> None:
    if streams:
        with client.chat.completions.stream(**ASKED, response_format=Capital) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.parse(**ASKED, response_format=Capital).choices[0].message
    assert isinstance(message.parsed, Capital)


def test_a_reply_is_json_if_that_is_asked_for(client: openai.OpenAI) -> None:
    asked = {**ASKED, "max_tokens": 300, "messages": [{"role": "user", "content": 'Write {"a": 1} in JSON.'}]}
    reply = client.chat.completions.create(**asked, response_format={"type": "json_object"}).choices[0]
    if reply.finish_reason == "stop":  # a small model may go on inside a string up to the limit
        assert isinstance(json.loads(reply.message.content), dict)
    assert reply.message.content.lstrip().startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_is_called_as_it_is_declared(client: openai.OpenAI, choice: object, streams: bool) -> None:
    asked = {**ASKED, "tools": [WEATHER], "tool_choice": choice}
    if streams:
        with client.chat.completions.stream(**asked) as stream:
            reply = stream.get_final_completion().choices[0]
    else:
        reply = client.chat.completions.create(**asked).choices[0]
    call = reply.message.tool_calls[0]
    assert reply.finish_reason == "tool_calls" and call.function.name == "get_weather" and call.id
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Paris", "Rome") and arguments["unit"] in ("celsius", "fahrenheit")


def test_the_result_of_a_tool_is_a_part_of_the_history(client: openai.OpenAI) -> None:
    asked = {
        **ASKED,
        "tools": [WEATHER, TIME],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    }
    message = client.chat.completions.create(**asked).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny, 21 degrees."}
    reply = client.chat.completions.create(**{**asked, "messages": [*HI, message, result], "tool_choice": "none"})
    assert reply.choices[0].message.content and not reply.choices[0].message.tool_calls


NO_SCHEMA = {"name": "x", "schema": {"type": "no such"}}


@pytest.mark.parametrize(
    "wrong",
    [
        {"response_format": {"type": "json_schema", "json_schema": {**NO_SCHEMA, "strict": True}}},
        {"response_format": {"type": "yaml"}},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "no_such"}}},
        {"tool_choice": "required"},
    ],
)
def test_what_cannot_be_followed_is_refused_at_once(client: openai.OpenAI, wrong: dict) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**{**ASKED, **wrong})
