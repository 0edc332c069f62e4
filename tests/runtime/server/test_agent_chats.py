"""Chat completions as coding agents send them; the bodies have the fields of the clients that they are named after."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ..thought_templates import HYBRID
from .scripted import OSLO, TOOLS, USER, WEATHER, Scripted, events

SAYS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
CALL = {"id": "call_1", "type": "function", "function": {"name": OSLO[0], "arguments": OSLO[1]}}
MARK = {"type": "ephemeral"}
FUNCTIONS = [{"name": "get_weather", "description": "Rain?", "parameters": WEATHER}, {"name": "now"}]

BODIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "opencode": (
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                USER,
                {"role": "assistant", "content": "", "reasoning_content": "Ask.", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            ],
            "reasoning_effort": "medium",
            "max_tokens": 20,
            "stream": True,
            "stream_options": {"include_usage": True},
            "tool_choice": "auto",
            "store": False,
        },
        set(),
    ),
    "cline": (
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "Be brief.", "cache_control": MARK}]},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {
                    "role": "assistant",
                    "content": "Hm.",
                    "reasoning_details": [{"type": "reasoning.text", "text": "Ask."}],
                },
                USER,
            ],
            "temperature": 0,
            "reasoning_effort": "high",
            "parallel_tool_calls": False,
        },
        {"messages.content.cache_control", "messages.reasoning_details"},
    ),
    "litellm": (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "annotations": [],
                    "function_call": None,
                    "reasoning_content": "Ask.",
                    "thinking_blocks": [{"type": "thinking", "thinking": "Ask.", "signature": ""}],
                    "provider_specific_fields": {"refusal": None},
                    "tool_calls": [{**CALL, "index": 0}],
                },
                {"role": "tool", "tool_call_id": "call_1", "name": OSLO[0], "content": [{"type": "text", "text": "a"}]},
            ],
            "verbosity": "low",
            "service_tier": "flex",
        },
        {"messages.thinking_blocks", "messages.provider_specific_fields", "service_tier", "verbosity"},
    ),
    "continue": (
        {
            "messages": [{"role": "developer", "content": "Be brief."}, USER],
            "max_completion_tokens": 9,
            "stop": ["xyzzy"],
            "chat_template_kwargs": {"enable_thinking": False},
            "user": "a",
        },
        {"user"},
    ),
    "openhands": (
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "Be brief.", "cache_control": MARK}]},
                {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": MARK}]},
                {"role": "assistant", "content": [{"type": "text", "text": "b"}], "tool_calls": [CALL]},
                {
                    "role": "tool",
                    "tool_call_id": "call_1",
                    "name": OSLO[0],
                    "content": [{"type": "text", "text": "rain"}],
                    "cache_control": MARK,
                },
            ],
            "seed": 1,
            "reasoning_effort": "xhigh",
            "metadata": {"trace": "a"},
        },
        {"messages.content.cache_control", "messages.cache_control", "metadata"},
    ),
    "openrouter": (
        {
            "messages": [USER],
            "reasoning": {"max_tokens": 2000, "effort": "low"},
            "thinking": {"type": "enabled", "budget_tokens": 2000},
        },
        {"reasoning.max_tokens", "thinking.budget_tokens"},
    ),
    "aider": ({"messages": [USER], "temperature": 0, "reasoning_effort": "minimal", "tools": None, "n": 1}, set()),
}


@pytest.fixture(scope="module")
def model() -> Iterator[Scripted]:
    with Scripted.serving(HYBRID) as model:
        yield model


@pytest.mark.parametrize("name", BODIES)
def test_what_an_agent_sends_is_answered_and_what_is_ignored_is_listed(model: Scripted, name: str) -> None:
    body, ignored = BODIES[name]
    response = model.ask("Yes.", **{"tools": TOOLS, **body})
    assert response.status_code == 200, response.text
    listed = response.headers.get("x-radixlm-ignored", "")
    assert set(listed.split(", ") if listed else ()) == ignored


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_every_effort_is_known(model: Scripted, effort: str) -> None:
    assert model.ask("Yes.", reasoning_effort=effort).status_code == 200


def test_thoughts_go_round_in_a_loop_of_tools_and_nothing_is_computed_twice(model: Scripted) -> None:
    talk: list[dict[str, Any]] = [{"role": "developer", "content": "Be brief."}, USER]
    num_before = 0
    for turn in range(3):
        reply = model.ask(f"<think>\nTurn {turn}.\n</think>\n\n{SAYS}", talk).json()
        message = reply["choices"][0]["message"]
        assert message["reasoning_content"] == f"Turn {turn}."
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= num_before
        num_before = reply["usage"]["total_tokens"] - 1  # its last token is not computed
        calls = [{**call, "function": {**call["function"]}} for call in message["tool_calls"]]
        talk += [
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": message["reasoning_content"],
                "tool_calls": calls,
            },
            {"role": "tool", "tool_call_id": calls[0]["id"], "content": f"rain {turn}"},
        ]


def test_parts_make_the_prompt_of_their_text(model: Scripted) -> None:
    parts = [{"type": "text", "text": "Weather ", "cache_control": MARK}, {"type": "text", "text": "in Oslo?"}]
    plain, split = (
        model.ask("Yes.", [{"role": "user", "content": content}], return_token_ids=True).json()["prompt_token_ids"]
        for content in (USER["content"], parts)
    )
    assert plain == split


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"image_url": {"url": "data:"}, "type": "image_url"},
        {"type": "input_audio", "input_audio": {}},
        {"type": "file", "file": {}},
    ],
)
def test_a_part_that_is_no_text_is_refused_by_its_name(model: Scripted, part: dict[str, Any]) -> None:
    response = model.ask("Yes.", [{"role": "user", "content": [part]}])
    assert response.status_code == 400 and repr(part["type"]) in response.json()["error"]["message"]


def test_functions_are_called_as_before_there_were_tools(model: Scripted) -> None:
    choice = model.reply(SAYS, tools=None, functions=FUNCTIONS)
    assert choice["finish_reason"] == "function_call"
    assert choice["message"] == {
        "content": None,
        "role": "assistant",
        "refusal": None,
        "function_call": {"name": OSLO[0], "arguments": OSLO[1]},
    }
    chunks = events(model.ask(SAYS, tools=None, functions=FUNCTIONS, stream=True))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    made = [choice["delta"]["function_call"] for choice in choices if "function_call" in choice["delta"]]
    assert made[0] == {"name": OSLO[0], "arguments": ""}
    assert "".join(each["arguments"] for each in made) == OSLO[1]
    assert choices[-1]["finish_reason"] == "function_call" and not any("tool_calls" in c["delta"] for c in choices)
    named = model.reply(SAYS, tools=None, functions=FUNCTIONS, function_call={"name": "get_weather"})
    assert named["message"]["function_call"]["name"] == "get_weather"
    assert model.reply("Yes.", tools=None, functions=FUNCTIONS, function_call="none")["message"]["content"] == "Yes."


def test_the_result_of_a_function_is_that_of_a_tool(model: Scripted) -> None:
    made = {"role": "assistant", "content": None, "function_call": {"name": OSLO[0], "arguments": OSLO[1]}}
    result = {"role": "function", "name": OSLO[0], "content": "rain"}
    legacy = model.ask("Yes.", [USER, made, result], tools=None, functions=FUNCTIONS, return_token_ids=True).json()
    newer = [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    tools = model.ask("Yes.", [USER, *newer], return_token_ids=True).json()
    assert legacy["prompt_token_ids"] == tools["prompt_token_ids"]


def test_a_function_whose_schema_cannot_be_followed_is_listed(model: Scripted) -> None:
    odd = [{"name": "a", "parameters": {"type": "object", "properties": 5}}]
    response = model.ask("Yes.", tools=None, functions=odd)
    assert response.status_code == 200, response.text
    assert response.headers["x-radixlm-ignored"] == "functions.a.parameters"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"functions": FUNCTIONS, "tools": TOOLS}, "functions"),
        ({"functions": [{"name": "now"}, {"name": "now"}]}, "now"),
        ({"functions": FUNCTIONS, "function_call": {"name": "no"}}, "no"),
        ({"functions": [{"name": "a", "parameters": {"type": "string"}, "strict": True}]}, "functions[0].parameters"),
        ({"functions": [{"name": "a", "parameters": {"properties": 5}, "strict": True}]}, "functions[0].parameters"),
        ({"messages": [USER, {"role": "function", "content": "a"}]}, "function"),
        ({"messages": [{"role": "user", "content": "a", "function_call": {"name": "now"}}]}, "assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "refusal"}]}]}, "part"),
    ],
)
def test_what_is_wrong_with_functions_is_named(model: Scripted, body: dict[str, Any], param: str) -> None:
    response = model.ask("Yes.", **{"tools": None, **body})
    assert response.status_code == 400 and param in json.dumps(response.json())
