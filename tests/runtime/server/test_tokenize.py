"""`/tokenize` and `/detokenize`: what the model is fed, and back; with the fake engine and with a real one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.server import create_app
from radixlm.runtime.server.served import Served
from starlette.testclient import TestClient

from .real_server import real_engine

if TYPE_CHECKING:
    from .conftest import FakeEngine

TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a tree?"}]


@pytest.fixture(scope="module")
def real(tiny_artifact: Path) -> Iterator[TestClient]:
    with Engine(tiny_artifact, max_num_seqs=2, kv_cache_bytes=32 << 20, num_threads=1) as engine:
        yield TestClient(create_app(engine))


def test_a_text_has_ids_a_count_and_the_length_that_there_is_room_for(client: TestClient) -> None:
    reply = client.post("/tokenize", json={"prompt": "a b"}).json()
    assert reply == {"count": 3, "max_model_len": 512, "tokens": [0, 1, 2]}
    reply = client.post("/tokenize", json={"prompt": "a b", "add_special_tokens": False}).json()
    assert reply["tokens"] == [1, 2]


def test_a_conversation_has_ids_too(client: TestClient) -> None:
    assert client.post("/tokenize", json={"messages": TALK}).json()["tokens"] == [0, 1]


def test_the_text_of_each_token_is_there_if_asked(client: TestClient) -> None:
    reply = client.post("/tokenize", json={"prompt": "a b", "return_token_strs": True}).json()
    assert reply["token_strs"] == ["Hello", " wörld", "!"]


def test_the_tokenizer_is_told_as_vllm_tells_it(real: TestClient) -> None:
    """lm-evaluation-harness asks for the first two, and encodes by /tokenize then."""
    told = real.get("/tokenizer_info").json()
    for name in ("bos_token", "eos_token"):
        [token_id] = real.post("/tokenize", json={"prompt": told[name], "add_special_tokens": False}).json()["tokens"]
        assert real.post("/detokenize", json={"tokens": [token_id]}).json()["prompt"] == told[name]
    assert "add_generation_prompt" in told["chat_template"] and told["model_max_length"] > 0


def test_the_event_loop_does_not_spell_the_tokens_of_a_long_text(
    client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_loop = []

    def token_text(served: Served, token_id: int) -> str:
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # this thread has none
            has_loop.append(False)
        else:
            has_loop.append(True)
        return str(engine.words[token_id])

    monkeypatch.setattr(Served, "token_text", token_text)
    reply = client.post("/tokenize", json={"prompt": "a b", "return_token_strs": True}).json()
    assert reply["token_strs"] == ["Hello", " wörld", "!"] and has_loop == [False] * 3


def test_a_word_and_the_word_behind_a_space_have_names_of_their_own() -> None:
    """Decoding a token of SentencePiece's by itself strips its space: `the` and ` the` were both `the`."""
    engine, _ = real_engine()
    with engine:
        client = TestClient(create_app(engine))
        reply = client.post("/tokenize", json={"prompt": "the the\nthe", "return_token_strs": True}).json()
        assert reply["token_strs"] == [" the", " the", "\n", "the"]
        assert reply["tokens"][0] == reply["tokens"][1] != reply["tokens"][3]
        for token_id, name in zip(reply["tokens"], reply["token_strs"], strict=True):
            asked = {"prompt": "the", "max_tokens": 1, "logprobs": 5, "logit_bias": {str(token_id): 100.0}}
            logprobs = client.post("/v1/completions", json=asked).json()["choices"][0]["logprobs"]
            assert logprobs["tokens"] == [name] and len(logprobs["top_logprobs"][0]) == 5


def test_ids_have_a_text(client: TestClient) -> None:
    assert client.post("/detokenize", json={"tokens": [0, 1]}).json() == {"prompt": "Hello wörld"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": TALK}),
        ("/tokenize", {"prompt": ["a"]}),
        ("/tokenize", {"prompt": "a", "cache_salt": "a"}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [2**31]}),
    ],
)
def test_bad_input_is_400(client: TestClient, path: str, body: Any) -> None:
    assert client.post(path, json=body).status_code == 400


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_another_model_is_404(client: TestClient, path: str) -> None:
    response = client.post(path, json={"model": "other", **({"prompt": ""} if path == "/tokenize" else {"tokens": []})})
    assert response.status_code == 404


def test_the_ids_are_those_that_the_model_is_fed(real: TestClient) -> None:
    asked = {"messages": TALK, "max_tokens": 1, "return_token_ids": True}
    fed = real.post("/v1/chat/completions", json=asked).json()["prompt_token_ids"]
    assert real.post("/tokenize", json={"messages": TALK}).json()["tokens"] == fed
    asked = {"prompt": "Once upon a time", "max_tokens": 1, "return_token_ids": True}
    fed = real.post("/v1/completions", json=asked).json()["choices"][0]["prompt_token_ids"]
    assert real.post("/tokenize", json={"prompt": "Once upon a time"}).json()["tokens"] == fed


def test_detokenizing_gives_the_text_back(real: TestClient) -> None:
    text = "Grüße, 世界! 🎉 <|im_start|>"
    ids = real.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert real.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}


def test_an_id_that_no_token_has_is_400(real: TestClient) -> None:
    response = real.post("/detokenize", json={"tokens": [2**31 - 1]})
    assert response.status_code == 400
    assert "2147483647" in response.json()["error"]["message"]


def test_texts_of_many_megabytes_are_refused_although_nothing_is_computed(real: TestClient) -> None:
    for path, body in (("/tokenize", {"prompt": "a " * (2 << 20)}), ("/detokenize", {"tokens": [1] * (2 << 20)})):
        response = real.post(path, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
