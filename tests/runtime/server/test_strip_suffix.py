"""Completions over HTTP whose prompt ends in a space: what is fed, what is sent, and what is said of both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.server import create_app
from starlette.testclient import TestClient

from ..fake_artifact import fake_artifact
from ..fake_model import FakeModel
from .real_server import TOKENIZER

VOCAB_SIZE = 412
PROMPT = "The answer is: "
BODY = {"prompt": PROMPT, "max_tokens": 6, "seed": 3, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    text = TOKENIZER.read_text(encoding="utf-8")
    artifact: Any = fake_artifact(text, None, vocab_size=VOCAB_SIZE, bos_token_id=1, eos_token_id=2)
    with Engine(
        artifact, max_num_seqs=8, open_runner=lambda _, num_pages, __: FakeModel(num_pages, VOCAB_SIZE)
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: Engine) -> TestClient:
    return TestClient(create_app(engine))


def ask(client: TestClient, **fields: object) -> Any:
    response = client.post("/v1/completions", json=BODY | fields)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(client: TestClient, **fields: object) -> list[Any]:
    text = client.post("/v1/completions", json=BODY | fields | {"stream": True}).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [json.loads(line)["choices"][0] for line in lines if line != "[DONE]"]


def test_the_prompts_ids_and_tokens_are_those_that_were_fed(client: TestClient, engine: Engine) -> None:
    reply = ask(client)
    [choice] = reply["choices"]
    assert [*choice["prompt_token_ids"], 259] == engine.encode(PROMPT)
    assert reply["usage"]["prompt_tokens"] == len(choice["prompt_token_ids"])
    assert reply["usage"]["completion_tokens"] == len(choice["token_ids"]) == 6
    said = engine.decode([*choice["prompt_token_ids"], *choice["token_ids"]])
    assert said == PROMPT + choice["text"]


def test_an_echo_is_the_clients_text(client: TestClient, engine: Engine) -> None:
    plain = ask(client)["choices"][0]["text"]
    assert ask(client, echo=True)["choices"][0]["text"] == PROMPT + plain
    assert "".join(choice["text"] for choice in streamed(client, echo=True)) == PROMPT + plain
    ids = engine.encode(PROMPT)
    assert ask(client, echo=True, prompt=ids, strip_suffix=True)["choices"][0]["text"].endswith(PROMPT + plain)


def test_log_probabilities_name_the_token_itself_and_count_what_is_sent(client: TestClient) -> None:
    [choice] = ask(client, logprobs=1, logit_bias={"398": 100})["choices"]
    assert choice["text"] == "the the the the the the"
    names = choice["logprobs"]["tokens"]
    assert len(names) == 6 and len(set(names)) == 1  # the first one's is that of the same token elsewhere
    assert choice["logprobs"]["text_offset"] == [0, 3, 7, 11, 15, 19]
    chunks = streamed(client, logprobs=1, logit_bias={"398": 100})
    assert [offset for chunk in chunks for offset in chunk["logprobs"]["text_offset"]] == [0, 3, 7, 11, 15, 19]
    assert [name for chunk in chunks for name in chunk["logprobs"]["tokens"]] == names


def test_each_of_several_replies_brings_the_space_back(client: TestClient, engine: Engine) -> None:
    choices = ask(client, n=4, prompt=[PROMPT, PROMPT])["choices"]
    assert len(choices) == 8 and len({choice["text"] for choice in choices}) > 1
    for choice in choices:
        assert engine.tokenizer.token_bytes(choice["token_ids"][0])[:1] == b" "
        assert engine.decode([*choice["prompt_token_ids"], *choice["token_ids"]]) == PROMPT + choice["text"]


def test_token_ids_are_taken_as_they_are_unless_the_request_says_otherwise(client: TestClient, engine: Engine) -> None:
    ids = engine.encode(PROMPT)
    assert ask(client, prompt=ids)["choices"][0]["prompt_token_ids"] == ids
    assert ask(client, prompt=ids, strip_suffix=True)["choices"][0]["prompt_token_ids"] == ids[:-1]
    assert ask(client, strip_suffix=False)["choices"][0]["prompt_token_ids"] == ids
    assert client.post("/v1/completions", json=BODY | {"strip_suffix": "text"}).status_code == 400


def test_a_text_that_loses_its_middle_is_fed_without_its_last_space(client: TestClient, engine: Engine) -> None:
    """It was cut as token ids, which keep the space's token: the next turn's prompt would not have it."""
    prompt = "the tree has " * 80 + PROMPT
    [choice] = ask(client, prompt=prompt, truncation="middle")["choices"]
    whole, fed, num_dropped = engine.encode(prompt), choice["prompt_token_ids"], choice["truncation"]
    start, stop = num_dropped["start"], num_dropped["start"] + num_dropped["num_dropped_tokens"]
    assert fed == whole[:start] + whole[stop:-1]
    assert engine.decode([*fed, *choice["token_ids"]]).endswith(PROMPT + choice["text"])
    for kept in ({"strip_suffix": False}, {"prompt": whole}, {"guided_choice": ["7"], "ignore_eos": False}):
        [choice] = ask(client, **{"prompt": prompt, "truncation": "middle", **kept})["choices"]
        assert choice["prompt_token_ids"][-1] == whole[-1] and choice["truncation"]["num_dropped_tokens"] > 0


def test_a_text_that_fits_without_its_last_space_keeps_its_middle(client: TestClient, engine: Engine) -> None:
    text = next(text for n in range(engine.context_length) if len(engine.encode(text := "x" * n + ": ")) == 256)
    assert engine.context_length == 256
    [choice] = ask(client, prompt=text, truncation="middle")["choices"]
    assert choice["truncation"]["num_dropped_tokens"] == 0
    assert choice["prompt_token_ids"] == ask(client, prompt=text)["choices"][0]["prompt_token_ids"]
