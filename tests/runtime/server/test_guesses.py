"""A stream says which tokens were guessed, to clients that ask for it and to no others."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from radixlm.runtime.engine.step import drafts

from ..guess_oracle import Oracle
from .real_server import CHAT, RealServer, real_server

PATHS = ("/v1/chat/completions", "/v1/completions")
NUM_TOKENS = 30


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RealServer]:
    monkeypatch.setattr(drafts, "Drafter", Oracle)
    Oracle.replies, Oracle.right, Oracle.chance = {}, 0.7, random.Random(1)
    with real_server() as server:
        yield server


def body_of(path: str) -> dict[str, Any]:
    own = CHAT if "chat" in path else {"prompt": "once there was", "seed": 1, "ignore_eos": True}
    return own | {"max_tokens": NUM_TOKENS, "return_token_ids": True}


def chunks(server: RealServer, path: str, **fields: Any) -> list[dict[str, Any]]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    text = server.client.post(server.url + path, json=body_of(path) | options | fields).text
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def teach(server: RealServer, path: str) -> list[int]:
    """Have the reply to the body guessed from now on."""
    whole = server.client.post(server.url + path, json=body_of(path)).json()
    (choice,) = whole["choices"]
    prompt_ids = whole.get("prompt_token_ids") or choice["prompt_token_ids"]
    Oracle.replies = {tuple(prompt_ids): choice["token_ids"]}
    ids: list[int] = choice["token_ids"]
    return ids


@pytest.mark.parametrize("path", PATHS)
def test_each_token_is_said_to_be_guessed_or_not(server: RealServer, path: str) -> None:
    expected = teach(server, path)
    sent = chunks(server, path, return_guesses=True)
    choices = [chunk["choices"][0] for chunk in sent if chunk["choices"]]
    told = [
        (id, guess)
        for c in choices
        if c.get("token_ids")
        for id, guess in zip(c["token_ids"], c["guessed"], strict=True)
    ]
    assert [id for id, _ in told] == expected
    details = sent[-1]["usage"]["completion_tokens_details"]
    assert 0 < details["accepted_prediction_tokens"] == sum(guess for _, guess in told) < NUM_TOKENS
    assert [guess for _, guess in told[:1]] == [False], "nothing is guessed before a prompt is there"
    alone = chunks(server, path, return_guesses=True, return_token_ids=False)
    assert sum(len(chunk["choices"][0].get("guessed", ())) for chunk in alone[:-1]) == NUM_TOKENS


@pytest.mark.parametrize("path", PATHS)
def test_the_others_see_nothing_of_it_and_the_same_text(server: RealServer, path: str) -> None:
    teach(server, path)
    sent = chunks(server, path)
    assert not any("guessed" in choice for chunk in sent for choice in chunk["choices"])
    asked = chunks(server, path, return_guesses=True, speculate=False)
    told = [guess for chunk in asked for choice in chunk["choices"] for guess in choice.get("guessed", ())]
    assert told == [False] * NUM_TOKENS
    assert _text(asked) == _text(sent) != ""


@pytest.mark.parametrize("path", PATHS)
def test_what_no_stream_has_is_refused(server: RealServer, path: str) -> None:
    answer = server.client.post(server.url + path, json=body_of(path) | {"return_guesses": True})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "return_guesses"


def _text(sent: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in sent for choice in chunk["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
