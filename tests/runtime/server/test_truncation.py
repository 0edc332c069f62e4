"""Histories that outgrow the context: an error, or without whole turns of their middle, and said so."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from radixlm.runtime.errors import ContextLengthExceeded
from radixlm.runtime.server.truncation import Truncated, drop_middle

from .real_server import RealServer, real_server


def message(role: str, num_tokens: int) -> dict[str, Any]:
    return {"role": role, "num_tokens": num_tokens}


def count(messages: Sequence[Any]) -> int:
    return sum(each["num_tokens"] for each in messages)


def history(num_turns: int, system: int = 10, user: int = 10, assistant: int = 20) -> list[dict[str, Any]]:
    turns = [message(role, n) for _ in range(num_turns - 1) for role, n in (("user", user), ("assistant", assistant))]
    return [message("system", system), *turns, message("user", user)]


def fitted(messages: Sequence[Any], context_length: int = 400, max_tokens: int | None = None) -> Truncated:
    return drop_middle(messages, count=count, context_length=context_length, max_tokens=max_tokens)


def test_what_fits_stays_whole() -> None:
    messages = history(10)
    assert count(messages) == 290
    assert fitted(messages) == Truncated(messages)


def test_the_system_prompt_and_the_newest_turns_stay() -> None:
    messages = history(12)
    left = fitted(messages)
    assert list(left.dropped) == list(range(1, 9)) and left.num_dropped_tokens == 120
    assert list(left.messages) == [messages[0], *messages[9:]]


def test_the_same_is_dropped_for_many_turns_so_that_the_cache_has_the_prefix() -> None:
    num_dropped = [len(fitted(history(num_turns)).dropped) for num_turns in range(1, 41)]
    assert num_dropped == sorted(num_dropped)
    assert len(set(num_dropped)) <= 1 + 40 * 30 // 100 and all(n % 2 == 0 for n in num_dropped)
    for num_turns in range(1, 41):
        left = fitted(history(num_turns))
        assert count(left.messages) + left.num_dropped_tokens == count(history(num_turns))
        assert count(left.messages) <= 300


def test_a_turn_with_its_tool_calls_goes_as_a_whole() -> None:
    turn = [message(role, 10) for role in ("user", "assistant", "tool", "tool", "assistant")]
    left = fitted([*turn * 9, message("user", 10)])
    assert len(left.dropped) % 5 == 0 and left.messages[0]["role"] == "user"


def test_room_is_left_for_the_reply_that_is_asked_for() -> None:
    assert count(fitted(history(12), max_tokens=250).messages) <= 150
    assert count(fitted(history(12), max_tokens=1).messages) == 350
    assert count(fitted(history(12), max_tokens=10_000).messages) == 20


def test_a_newest_turn_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ContextLengthExceeded, match="have 400 tokens, the context holds 400"):
        fitted([*history(5)[:-1], message("user", 390)])
    with pytest.raises(ContextLengthExceeded):
        fitted([message("system", 500)])
    assert count(fitted([*history(5)[:-1], message("user", 389)]).messages) == 399


def test_a_long_history_is_not_counted_thirteen_times() -> None:
    """Small turns and, at the end, long ones: all of it was counted again for each step of a bisection."""
    num_counted = 0

    def counted(messages: Sequence[Any]) -> int:
        nonlocal num_counted
        num_counted += count(messages)
        return count(messages)

    messages = [*history(2000, user=1, assistant=1), *history(3, user=4000, assistant=4000)[1:]]
    left = drop_middle(messages, count=counted, context_length=5000, max_tokens=None)
    assert list(left.messages) == [messages[0], messages[-1]]
    assert num_counted < 3 * count(messages)


def test_turns_that_are_shorter_in_a_history_than_alone_are_dropped_until_the_rest_fits() -> None:
    """As with templates that leave out what was thought in old turns; with tokens that every conversation has."""

    def counted(messages: Sequence[Any]) -> int:
        shortened = [each["num_tokens"] // 5 if each["role"] == "assistant" else 10 for each in messages[:-2]]
        return 25 + sum(shortened) + count(messages[-2:])

    messages = history(60, assistant=100)
    left = drop_middle(messages, count=counted, context_length=400, max_tokens=None)
    assert 150 < counted(left.messages) <= 300 and left.messages[0] == messages[0]
    assert counted(left.messages) + left.num_dropped_tokens == counted(messages)


def test_a_history_of_megabytes_is_refused_before_it_is_counted() -> None:
    with pytest.raises(ContextLengthExceeded, match=r"history has \d+ bytes, at most 4194304"):
        message = {"role": "user", "content": "a" * (4 << 20)}
        drop_middle([message], count=lambda _: pytest.fail(), context_length=9, max_tokens=1)


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server(context_length=1024, num_pages=300) as server:
        yield server


def talk(num_turns: int) -> list[dict[str, str]]:
    turns = [{"role": role, "content": f"the {role} once"} for _ in range(num_turns) for role in ("user", "assistant")]
    return [{"role": "system", "content": "you are old"}, *turns, {"role": "user", "content": "and then"}]


def test_without_it_a_history_that_does_not_fit_is_400(server: RealServer) -> None:
    for fields in ({}, {"truncation": "none"}):
        refused = server.chat(messages=talk(40), max_tokens=5, **fields)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    assert server.chat(messages=talk(1), truncation="left").status_code == 400


def test_with_it_the_reply_says_what_was_dropped(server: RealServer) -> None:
    reply = server.chat(messages=talk(40), max_tokens=5, truncation="middle").json()
    dropped = reply["truncation"]["dropped_messages"]
    assert reply["truncation"]["strategy"] == "middle" and reply["truncation"]["num_dropped_tokens"] > 0
    assert dropped == list(range(1, 1 + len(dropped))) and len(dropped) % 2 == 0
    kept = [each for place, each in enumerate(talk(40)) if place not in dropped]
    whole = server.chat(messages=kept, max_tokens=5).json()
    assert whole["usage"]["prompt_tokens"] == reply["usage"]["prompt_tokens"]
    assert whole["choices"] == reply["choices"] and "truncation" not in whole
    nothing = server.chat(messages=talk(1), max_tokens=5, truncation="middle").json()
    assert nothing["truncation"]["dropped_messages"] == []


def test_a_stream_says_it_first(server: RealServer) -> None:
    text = server.chat(messages=talk(40), max_tokens=5, truncation="middle", stream=True, n=2).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert chunks[0]["truncation"]["dropped_messages"]
    assert not any("truncation" in chunk for chunk in chunks[1:])


def test_the_next_turns_find_the_truncated_prefix_cached(server: RealServer) -> None:
    replies = [server.chat(messages=talk(turns), max_tokens=5, truncation="middle").json() for turns in range(60, 66)]
    num_same = 0
    for reply, following in pairwise(replies):
        if following["truncation"]["dropped_messages"] == reply["truncation"]["dropped_messages"]:
            num_same += 1
            cached = following["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached > reply["usage"]["prompt_tokens"] - 32  # all but the question, which is another now
    assert num_same >= 3
