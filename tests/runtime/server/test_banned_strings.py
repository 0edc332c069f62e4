"""No dialect's answer has a banned string, whole or streamed, and what cannot be banned is 400."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from .real_server import RealServer, real_server
from .test_stop_reason import DIALECTS, PATHS, chunks, post, said


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server() as server:
        yield server


def usage_of(path: str, reply: Any) -> int:
    usage = reply["usage"]
    return int(usage["completion_tokens"] if "completion_tokens" in usage else usage["output_tokens"])


@pytest.mark.parametrize("path", DIALECTS)
def test_an_answer_has_no_banned_string_in_any_dialect(server: RealServer, path: str) -> None:
    def ask(**fields: Any) -> Any:
        return server.client.post(server.url + path, json=DIALECTS[path] | fields).json()

    free, _ = said(path, ask())
    letters = re.findall("[a-z]", free)
    assert letters, "the model says some"
    banned = [letters[0].upper(), free[-3:]]
    reply = ask(banned_strings=banned)
    text, _ = said(path, reply)
    assert not any(each.lower() in text.lower() for each in banned)
    assert usage_of(path, reply) == usage_of(path, ask()) == 30
    assert said(path, ask(banned_strings=banned[0]))[0] == said(path, ask(banned_strings=banned[:1]))[0]
    assert said(path, ask(banned_strings=[]))[0] == said(path, ask(banned_strings=None))[0] == free


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_joined_is_the_whole_answer(server: RealServer, path: str) -> None:
    free = said(path, post(server, path).json())[0]
    wish = {"banned_strings": [free[5:7], free[12:15]], "return_token_ids": True, "speculate": False}
    if "chat" in path:
        wish |= {"logprobs": True, "top_logprobs": 1}
    reply = post(server, path, **wish).json()
    sent = chunks(server, path, **wish)
    texts = [chunk.get("text") or chunk.get("delta", {}).get("content") or "" for chunk in sent]
    assert "".join(texts) == said(path, reply)[0]
    ids = [token_id for chunk in sent for token_id in chunk.get("token_ids") or ()]
    assert ids == reply["choices"][0]["token_ids"]
    if "chat" in path:
        logprobs = [each for chunk in sent if chunk.get("logprobs") for each in chunk["logprobs"]["content"]]
        assert logprobs == reply["choices"][0]["logprobs"]["content"] and len(logprobs) == len(ids)


def test_several_choices_keep_to_it_beside_a_grammar(server: RealServer) -> None:
    wish = {"guided_regex": "([a-f]{2,5} ){3,6}!", "banned_strings": ["a", "bc", "ED"], "n": 4, "temperature": 1.0}
    choices = post(server, PATHS[0], **wish).json()["choices"]
    texts = [choice["message"]["content"] for choice in choices]
    for text, choice in zip(texts, choices, strict=True):
        assert not re.search("a|bc|ed", text)
        assert choice["finish_reason"] == "length" or re.fullmatch("([a-f]{2,5} ){3,6}!", text)
    assert len(set(texts)) > 1


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("wrong", [7, ["a", 7], {"a": 1}, ["a"] * 513, "a" * 257, ["a" * 256] * 65])
def test_what_cannot_be_banned_is_400_in_every_dialect(server: RealServer, path: str, wrong: Any) -> None:
    response = server.client.post(server.url + path, json=DIALECTS[path] | {"banned_strings": wrong})
    assert response.status_code == 400, response.text
    assert "banned_strings" in response.json()["error"]["message"]


def test_a_reply_that_nothing_is_left_for_is_400(server: RealServer) -> None:
    response = post(server, PATHS[1], guided_choice=["a", "b"], banned_strings=["a", "B"])
    assert response.status_code == 400 and "banned string" in response.json()["error"]["message"]
