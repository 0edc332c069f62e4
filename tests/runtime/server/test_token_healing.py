"""`token_healing` over HTTP: text, echo, usage, offsets and streams agree; what it does not go with is 400."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from .real_server import RealServer, real_server

PROMPT = "once there w"
WISH = {"prompt": PROMPT, "seed": 1, "max_tokens": 9, "token_healing": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server() as server:
        yield server


def post(server: RealServer, path: str = "/v1/completions", **fields: Any) -> Any:
    return server.client.post(server.url + path, json=WISH | fields)


def test_echo_has_the_prompt_once_and_offsets_are_those_of_the_text(server: RealServer) -> None:
    whole = post(server, return_token_ids=True).json()
    choice = whole["choices"][0]
    ids = server.engine.encode(PROMPT)
    assert choice["prompt_token_ids"] == ids[:-1]
    assert whole["usage"]["prompt_tokens"] == len(ids) - 1 and whole["usage"]["completion_tokens"] == 9
    assert post(server, echo=True).json()["choices"][0]["text"] == PROMPT + choice["text"]
    logprobs = post(server, logprobs=1).json()["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 9 and logprobs["text_offset"][0] == 0
    healed = server.engine.tokenizer.token_bytes(choice["token_ids"][0])
    assert healed.startswith(server.engine.tokenizer.token_bytes(ids[-1])[:1])
    assert logprobs["text_offset"][-1] <= len(choice["text"])


def test_a_stream_joined_is_the_whole_reply(server: RealServer) -> None:
    lines = [line for line in post(server, stream=True).text.split("\n\n") if line and "[DONE]" not in line]
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines]
    assert "".join(chunks) == post(server).json()["choices"][0]["text"]


@pytest.mark.parametrize(
    "fields",
    [
        {"token_healing": 2},
        {"token_healing": "yes"},
        {"strip_suffix": True},
        {"prompt_logprobs": 0},
        {"echo": True, "logprobs": 1},
        {"guided_regex": "a+"},
    ],
)
def test_what_does_not_go_together_is_400(server: RealServer, fields: dict[str, Any]) -> None:
    response = post(server, **fields)
    assert response.status_code == 400 and "token_healing" in response.json()["error"]["message"], response.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_conversation_has_none(server: RealServer, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "once"}], "max_tokens": 3, "token_healing": True}
    response = server.client.post(server.url + path, json=body)
    assert response.status_code == 400 and "token_healing" in response.json()["error"]["message"]
