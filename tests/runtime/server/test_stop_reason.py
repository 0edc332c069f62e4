"""Replies say which of the request's own stops ended them, in vLLM's words, whole and streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from .real_server import RealServer, real_server

PATHS = ("/v1/chat/completions", "/v1/completions")
ENDS = {"seed": 1, "max_tokens": 30}


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server() as server:
        yield server


def post(server: RealServer, path: str, **fields: Any) -> Any:
    prompt = {"messages": [{"role": "user", "content": "once"}]} if "chat" in path else {"prompt": "once there was"}
    return server.client.post(server.url + path, json=prompt | ENDS | fields)


def choice(server: RealServer, path: str, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = post(server, path, **fields).json()["choices"][0]
    return found


def chunks(server: RealServer, path: str, **fields: Any) -> list[dict[str, Any]]:
    lines = post(server, path, stream=True, **fields).text.split("\n\n")
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line and "[DONE]" not in line]


@pytest.mark.parametrize("path", PATHS)
def test_the_stop_that_ended_a_reply_is_named_whole_and_in_the_last_chunk(server: RealServer, path: str) -> None:
    token_ids = choice(server, path, ignore_eos=True, return_token_ids=True)["token_ids"]
    text = choice(server, path, ignore_eos=True)["message" if "chat" in path else "text"]
    text = text["content"] if isinstance(text, dict) else text
    for stop, named in (
        ({"stop": ["\x00", text[6:9]]}, text[6:9]),
        ({"stop_token_ids": [token_ids[9]]}, token_ids[9]),
        ({}, None),
    ):
        whole = choice(server, path, ignore_eos=True, **stop)
        *first, last = chunks(server, path, ignore_eos=True, **stop)
        assert whole["stop_reason"] == last["stop_reason"] == named
        assert whole["finish_reason"] == last["finish_reason"] == ("length" if named is None else "stop")
        assert not any("stop_reason" in chunk for chunk in first)


@pytest.mark.parametrize("path", PATHS)
def test_min_tokens_hold_back_the_end(server: RealServer, path: str) -> None:
    end = {"logit_bias": {"2": 100}, "temperature": 0, "return_token_ids": True}  # </s>
    assert choice(server, path, **end)["token_ids"] == [2]
    held = choice(server, path, min_tokens=7, **end)
    assert len(held["token_ids"]) == 8 and held["token_ids"].index(2) == 7
    assert (held["finish_reason"], held["stop_reason"]) == ("stop", None)


@pytest.mark.parametrize(
    ("path", "field"), [*((path, "max_tokens") for path in PATHS), (PATHS[0], "max_completion_tokens")]
)
def test_more_min_tokens_than_may_come_are_400(server: RealServer, path: str, field: str) -> None:
    response = post(server, path, min_tokens=31, **{field: 30})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "min_tokens")
    assert "31" in error["message"] and "30" in error["message"]


def test_min_tokens_hold_back_the_end_of_a_response(server: RealServer) -> None:
    body = {"input": "once", "seed": 1, "max_output_tokens": 30, "min_tokens": 30}
    usage = server.client.post(server.url + "/v1/responses", json=body).json()["usage"]
    assert usage["output_tokens"] == 30
    refused = server.client.post(server.url + "/v1/responses", json=body | {"min_tokens": 31})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "min_tokens")


@pytest.mark.parametrize("path", PATHS)
def test_min_tokens_hold_a_grammar_open_until_it_is_complete(server: RealServer, path: str) -> None:
    wish = {"logit_bias": {"2": 100}, "temperature": 0, "min_tokens": 12, "return_token_ids": True}
    open_end = choice(server, path, guided_regex="[a-z]+", **wish)
    assert open_end["token_ids"].index(2) == 12 and open_end["stop_reason"] is None
    fixed = choice(server, path, guided_choice=["a", "b"], **wish)
    assert len(fixed["token_ids"]) <= 3 and fixed["finish_reason"] == "stop"


DIALECTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "once"}]} | ENDS,
    "/v1/completions": {"prompt": "once there was"} | ENDS,
    "/v1/messages": {"messages": [{"role": "user", "content": "once"}]} | ENDS,
    "/v1/responses": {"input": "once", "seed": 1, "max_output_tokens": 30},
}


def said(path: str, reply: Any) -> tuple[str, Any]:
    """The text of a reply, and what it names as its stop where the dialect has a place for that."""
    if path == "/v1/messages":
        return "".join(part["text"] for part in reply["content"]), reply["stop_sequence"]
    if path == "/v1/responses":
        parts = (part for item in reply["output"] if item["type"] == "message" for part in item["content"])
        return "".join(part["text"] for part in parts), None
    choice = reply["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"], choice["stop_reason"]


@pytest.mark.parametrize("path", DIALECTS)
def test_an_expression_ends_a_reply_in_every_dialect(server: RealServer, path: str) -> None:
    def ask(**fields: Any) -> tuple[str, Any]:
        return said(path, server.client.post(server.url + path, json=DIALECTS[path] | fields).json())

    text, _ = ask()
    letter = text[5]
    pattern = f"[{re.escape(letter)}]"
    named = None if path == "/v1/responses" else pattern
    assert ask(stop_regex=pattern) == (text[: text.index(letter)], named)
    assert ask(stop_regex=["\x00+", pattern]) == (text[: text.index(letter)], named)
    assert ask(stop_regex=[]) == ask(stop_regex=None) == ask()


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("wrong", ["(", "a*", "a$", 7, ["a", 7], {"a": 1}, ["a"] * 17, "a" * 1025, "a{999}"])
def test_an_expression_that_cannot_be_followed_is_400_in_every_dialect(
    server: RealServer, path: str, wrong: Any
) -> None:
    response = server.client.post(server.url + path, json=DIALECTS[path] | {"stop_regex": wrong})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert "stop_regex" in error["message"]
    if path == "/v1/messages":
        assert (response.json()["type"], error["type"]) == ("error", "invalid_request_error")
    elif isinstance(wrong, str):
        assert error["param"] == "stop_regex"


@pytest.mark.parametrize("path", PATHS)
def test_no_chunk_has_text_that_becomes_a_match(server: RealServer, path: str) -> None:
    text = said(path, post(server, path, ignore_eos=True).json())[0]
    pattern = "".join(f"[{re.escape(letter)}]" for letter in text[8:13])
    sent = [
        chunk.get("text") or chunk.get("delta", {}).get("content") or ""
        for chunk in chunks(server, path, ignore_eos=True, stop_regex=pattern)
    ]
    assert "".join(sent) == text[:8]
