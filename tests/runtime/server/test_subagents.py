"""A main conversation and three subagents by turns, as Claude Code sends them: nothing is computed twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ..tool_templates import QWEN
from .scripted import OSLO, WEATHER, Scripted

NUM_AGENTS, NUM_TURNS = 4, 4
TOOL = {"name": OSLO[0], "description": "Rain?", "input_schema": WEATHER}


@pytest.fixture(scope="module")
def model() -> Iterator[Scripted]:
    with Scripted.serving(QWEN, context_length=4096) as model:
        yield model


def bill(agent: int, turn: int) -> dict[str, str]:
    """Claude Code's line, with a number of its own for each request."""
    return {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.330; cch={agent}{turn:05x};"}


def test_each_later_turn_of_four_agents_finds_all_of_its_prompt_before(model: Scripted) -> None:
    histories: list[list[Any]] = [
        [{"role": "user", "content": f"Task of agent {agent}."}] for agent in range(NUM_AGENTS)
    ]
    held = [0] * NUM_AGENTS  # tokens of an agent's last prompt and reply that have keys and values
    for turn in range(NUM_TURNS):
        for agent, history in enumerate(histories):
            model.say(f"Turn {turn}.\n" + model.format.text_of([(OSLO[0], f'{{"city": "Oslo", "days": {turn + 1}}}')]))
            rules = {"type": "text", "text": f"You are agent {agent}. " + "Be brief, and do as you are told. " * 9}
            body = {"system": [bill(agent, turn), rules], "messages": history, "tools": [TOOL], "max_tokens": 200}
            response = model.client.post("/v1/messages", json={**body, "temperature": 0})
            assert response.status_code == 200, response.text
            usage, content = response.json()["usage"], response.json()["content"]
            assert usage["cache_read_input_tokens"] >= held[agent], (agent, turn)
            held[agent] = sum(usage[name] for name in usage if name.endswith("_tokens")) - 1
            call = content[-1]
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": f"Rain {turn}, for {agent}."}
            history += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    assert all(num > 0 for num in held)
