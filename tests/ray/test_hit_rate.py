"""Conversations of OASST on two replicas: what is found cached, beside turns that go round and beside one engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.data import Conversation, oasst

from .conftest import REPOSITORY, Client
from .engines import open_silent_engine

NUM_CONVERSATIONS = 60
Choice = Callable[[int], str | None]  # of a replica, by the number of a request; None: the router's


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    data = Path(os.environ.get("RADIXLM_DATA", REPOSITORY.parent / "shared" / "data"))
    if not data.is_dir():
        pytest.skip(f"OASST's conversations are not at {data}; set RADIXLM_DATA")
    return oasst(data, NUM_CONVERSATIONS)


@pytest.fixture(scope="module")
def client(run_app: Callable[..., Client]) -> Client:
    return run_app(open_silent_engine, num_replicas=2)


def questions(conversations: list[Conversation]) -> Iterator[list[dict[str, str]]]:
    """The first of each conversation, then the second of each, and so on; with all that was said before."""
    for turn in range(max(conversation.num_questions for conversation in conversations)):
        for conversation in conversations:
            texts = conversation.texts[: 2 * turn + 1]
            if len(texts) == 2 * turn + 1:
                yield [
                    {"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)
                ]


def hit_rate(client: Client, conversations: list[Conversation], choose: Choice) -> float:
    """The share of all prompt tokens that were cached, beginning with nothing."""
    client.json("DELETE", "/v1/cache")
    num_prompt = num_cached = 0
    for number, messages in enumerate(questions(conversations)):
        name = choose(number)
        headers = {} if name is None else {"x-radixlm-replica": name}
        body = {"messages": messages, "max_tokens": 1}
        usage = client.json("POST", "/v1/chat/completions", body, **headers)["usage"]
        num_prompt += usage["prompt_tokens"]
        num_cached += usage["prompt_tokens_details"]["cached_tokens"]
    return num_cached / num_prompt


def test_a_front_without_keys_answers_to_no_name_that_a_web_page_may_have_made_up(client: Client) -> None:
    refused = client.ask("GET", "/v1/models", host="evil.example")
    assert refused.status == 403 and json.loads(refused.read())["error"]["code"] == "host_not_allowed"
    assert client.ask("GET", "/v1/models").status == 200


def test_two_replicas_find_what_one_would_and_going_round_finds_less(
    client: Client, conversations: list[Conversation], capsys: pytest.CaptureFixture[str]
) -> None:
    one = hit_rate(client, conversations, lambda _: "engine-0")
    round_robin = hit_rate(client, conversations, lambda number: f"engine-{number % 2}")
    routed = hit_rate(client, conversations, lambda _: None)
    with capsys.disabled():
        print(f"\nprompt tokens found: one engine {one:.1%}, by prefix {routed:.1%}, round-robin {round_robin:.1%}")
    assert routed > round_robin + 0.05
    assert routed > 0.97 * one
