"""Histories that no server gave, over chats and responses: clients cut theirs, and join those of others.

Over Messages each of them but for the roles is an error, as it is at Anthropic's: test_messages.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ..tool_templates import HARMONY, LLAMA, NO_TOOLS, QWEN
from .scripted import Scripted

Said = tuple[str, ...]
ASKED: Said = ("user", "ASKED")
HISTORIES: dict[str, list[Said]] = {
    "a result without its call": [ASKED, ("result", "1", "RAIN")],
    "a result first": [("result", "1", "RAIN"), ASKED],
    "a call without its result": [ASKED, ("call", "1"), ("user", "MORE")],
    "a call last": [ASKED, ("call", "1")],
    "a result twice": [ASKED, ("call", "1"), ("result", "1", "RAIN"), ("result", "1", "SUN")],
    "a result of another call": [ASKED, ("call", "1"), ("result", "2", "RAIN")],
    "a call of what is no name": [ASKED, ("call", "1", "get weather:größe"), ("result", "1", "RAIN")],
    "an id twice in one reply": [ASKED, ("call", "1"), ("call", "1"), ("result", "1", "RAIN"), ("result", "1", "SUN")],
    "an id twice": [ASKED, ("call", "1"), ("result", "1", "RAIN"), ("call", "1"), ("result", "1", "SUN")],
    "results in another order": [
        *(ASKED, ("call", "1"), ("call", "2")),
        *(("result", "2", "RAIN"), ("result", "1", "SUN")),
    ],
    "empty ids": [ASKED, ("call", ""), ("result", "", "RAIN")],
    "a reply first": [("assistant", "DONE"), ASKED],
    "a reply last": [ASKED, ("assistant", "DONE")],
    "two replies": [ASKED, ("assistant", "ONE"), ("assistant", "TWO"), ("user", "MORE")],
    "two questions": [ASKED, ("user", "MORE")],
    "the system last": [ASKED, ("system", "RULES")],
    "the system alone": [("system", "RULES")],
    "an empty reply": [ASKED, ("assistant", ""), ("user", "MORE")],
}


@pytest.fixture(scope="module", params=[QWEN, LLAMA, NO_TOOLS, HARMONY], ids=["hermes", "llama3", "plain", "harmony"])
def model(request: pytest.FixtureRequest) -> Iterator[Scripted]:
    with Scripted.serving(request.param) as model:
        yield model


def called(said: list[str]) -> str:
    """The name in a call of a history."""
    return said[1] if len(said) > 1 else "look"


def messages_of(history: list[Said]) -> list[Any]:
    messages: list[Any] = []
    is_open = False  # the last message is a reply with calls
    for kind, *said in history:
        if kind == "call":
            call = {"id": said[0], "type": "function", "function": {"name": called(said), "arguments": "{}"}}
            if not is_open:
                messages.append({"role": "assistant", "content": None, "tool_calls": []})
            messages[-1]["tool_calls"].append(call)
        elif kind == "result":
            messages.append({"role": "tool", "tool_call_id": said[0], "content": said[1]})
        else:
            messages.append({"role": kind, "content": said[0]})
        is_open = kind == "call"
    return messages


def items_of(history: list[Said]) -> list[Any]:
    items: list[Any] = []
    for kind, *said in history:
        if kind == "call":
            items.append({"type": "function_call", "call_id": said[0], "name": called(said), "arguments": "{}"})
        elif kind == "result":
            items.append({"type": "function_call_output", "call_id": said[0], "output": said[1]})
        else:
            items.append({"role": kind, "content": said[0]})
    return items


@pytest.mark.parametrize("dialect", ["chat", "responses"])
@pytest.mark.parametrize("name", HISTORIES)
def test_a_history_is_taken_however_it_was_cut(
    model: Scripted, dialect: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, prompts = HISTORIES[name], list[str]()
    prepare = model.engine.prompts.chat

    def chat(*args: Any, **options: Any) -> Any:
        prompt = prepare(*args, **options)
        prompts.append(model.engine.decode(prompt.ids))
        return prompt

    monkeypatch.setattr(model.engine.prompts, "chat", chat)
    model.say("Hm.")
    if dialect == "chat":
        function = {"name": "look", "parameters": {"type": "object"}}
        body = {"messages": messages_of(history), "tools": [{"type": "function", "function": function}]}
        response = model.client.post("/v1/chat/completions", json={**body, "max_tokens": 4, "temperature": 0})
    else:
        tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
        body = {"input": items_of(history), "tools": tools, "max_output_tokens": 4, "temperature": 0}
        response = model.client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    words = [said[-1] for kind, *said in history if kind != "call" and said[-1]]
    assert any(all(word in prompt for word in words) for prompt in prompts), prompts  # others are of idle work
