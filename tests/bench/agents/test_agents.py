"""A tool loop computes what is new and no more, in each dialect, whatever the client does to its history."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from radixlm.runtime.chat.follow_up_turns import FollowUpTurns
from radixlm.runtime.chat.tools.call_history import CallHistory
from radixlm.runtime.server.anthropic import conversation

from bench.agents.__main__ import BAR
from bench.agents.clients import DIALECTS, SHAPES, Shape
from bench.agents.loops import loop
from bench.agents.models import MODELS
from bench.agents.replay import AgentServer

NUM_TURNS = 8
REWRITES = next(shape for shape in SHAPES if shape.rewrites)
TRIMS = next(shape for shape in SHAPES if shape.trims)
DROPS = next(shape for shape in SHAPES if shape.drops_thoughts)
SUBAGENTS = next(shape for shape in SHAPES if shape.num_subagents)


@pytest.fixture(scope="module", params=MODELS)
def server(request: pytest.FixtureRequest) -> Iterator[AgentServer]:
    with AgentServer(request.param) as server:
        yield server


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_loop_computes_no_more_than_the_least(server: AgentServer, dialect: str, shape: Shape) -> None:
    replayed = server.play(dialect, shape, loop(NUM_TURNS))
    assert replayed.num_turns == NUM_TURNS
    assert 0.9 < replayed.ratio <= BAR
    assert replayed.num_computed < replayed.num_prompt_tokens / 4


def test_the_user_may_speak_again_in_a_loop(server: AgentServer) -> None:
    """Qwen3's template drops the thoughts of the turns before: that form was computed meanwhile."""
    turns = loop(12)
    assert any(turn.question for turn in turns)
    assert server.play("chat", SHAPES[0], turns).ratio <= BAR


# Each part of it is needed.


def test_calls_that_are_not_known_are_computed_again(server: AgentServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CallHistory, "note", lambda *_: None)
    assert server.play("chat", REWRITES, loop(NUM_TURNS)).ratio > 1.2


def test_replies_that_are_trimmed_and_unknown_are_computed_again(
    server: AgentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FollowUpTurns, "renderings", lambda *_, **__: [])
    assert server.play("messages", TRIMS, loop(NUM_TURNS)).ratio > 1.05


def test_thoughts_that_are_dropped_are_computed_again_without_idle_work() -> None:
    thinking = next(name for name in MODELS if "thinks" in name)
    with AgentServer(thinking, idle_work=False) as server:
        assert server.play("responses", DROPS, loop(NUM_TURNS)).ratio > 1.2


def test_a_conversation_that_takes_turns_with_others_asks_for_the_sum_of_all(server: AgentServer) -> None:
    """A main conversation and three subagents, each with words of the system's own."""
    alone = server.play("messages", SHAPES[0], loop(NUM_TURNS))
    together = server.play("messages", SUBAGENTS, loop(NUM_TURNS))
    assert together.num_prompt_tokens > 4 * alone.num_prompt_tokens
    assert 3.9 < together.num_least / alone.num_least < 4.1


def test_a_number_of_its_own_in_each_request_would_hide_all_behind_it(
    server: AgentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "is_billing_line", lambda text: False)
    assert (
        server.play("messages", SUBAGENTS, loop(4)).num_computed > 2 * server.play("chat", SUBAGENTS, loop(4)).num_least
    )


def test_the_least_counts_all_behind_a_change(server: AgentServer) -> None:
    """A client that changes its first words each turn has nothing else found."""

    def play(reminder: bool) -> int:
        shape = dataclasses.replace(SHAPES[0], moves_reminder=reminder)
        return server.play("chat", shape, loop(NUM_TURNS)).num_least

    assert play(reminder=True) > 1.5 * play(reminder=False)
