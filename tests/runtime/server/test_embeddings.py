"""`/v1/embeddings`, `/v1/rerank` and `/v1/score`, with real engines over fake models."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from radixlm.runtime.artifact.text_vectors import EmbeddingInfo
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.server import create_app
from starlette.testclient import TestClient

from ..engine.vectors.fake_vectors import PAIRS, RERANKING, vector_engine
from ..fake_artifact import HIDDEN_SIZE

TEXTS = ["once there was", "a dog", "once there was a cat"]
PROMPTS = {"query": "find: "}
DOCUMENTS = ["a dog", "the big cat", "a house"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    info = EmbeddingInfo(pooling="last", prompts=PROMPTS)
    with vector_engine(info, max_num_seqs=2, max_queue=6) as (engine, _):
        yield engine


@pytest.fixture(scope="module")
def vectors(engine: Engine) -> TestClient:
    return TestClient(create_app(engine, model_ids=["small"]))


@pytest.fixture(scope="module")
def reranker() -> Iterator[Engine]:
    with vector_engine(reranking=RERANKING) as (engine, _):
        yield engine


@pytest.fixture(scope="module")
def scores(reranker: Engine) -> TestClient:
    return TestClient(create_app(reranker))


def embedded(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def test_texts_and_ids_have_their_vectors_in_order(vectors: TestClient, engine: Engine) -> None:
    expected = [each.vector.tolist() for each in engine.embed(TEXTS)]
    reply = embedded(vectors, input=TEXTS, model="small")
    assert [each["embedding"] for each in reply["data"]] == expected
    assert [(each["index"], each["object"]) for each in reply["data"]] == [(n, "embedding") for n in range(3)]
    assert (reply["model"], reply["object"]) == ("small", "list")
    ids = [engine.encode(text) for text in TEXTS]
    assert [each["embedding"] for each in embedded(vectors, input=ids)["data"]] == expected
    for one in (TEXTS[0], ids[0], [TEXTS[0]], [ids[0]]):
        assert [each["embedding"] for each in embedded(vectors, input=one)["data"]] == expected[:1]


def test_base64_is_the_same_numbers(vectors: TestClient) -> None:
    """The openai library asks for it where its caller says nothing."""
    floats, coded = (embedded(vectors, input=TEXTS, encoding_format=each)["data"] for each in ("float", "base64"))
    for one, other in zip(floats, coded, strict=True):
        decoded = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
        assert decoded.tolist() == one["embedding"] and len(decoded) == HIDDEN_SIZE


def test_tokens_are_counted_with_those_that_were_cached(vectors: TestClient, engine: Engine) -> None:
    engine.clear_cache()
    text = "once upon a time there was a little girl who lived in the big house"
    num_tokens = len(engine.encode(text))
    salted = {"input": [text], "cache_salt": "of this test"}
    for num_cached in (0, num_tokens - 1):
        assert embedded(vectors, **salted)["usage"] == {
            "prompt_tokens": num_tokens,
            "total_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }
    other = {"input": [text], "cache_salt": "of another"}
    assert embedded(vectors, **other)["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert embedded(vectors, input=[text, text], cache_match="off")["usage"]["prompt_tokens"] == 2 * num_tokens


def test_vectors_are_cut_and_texts_get_the_prompt_that_is_named(vectors: TestClient, engine: Engine) -> None:
    [found] = embedded(vectors, input="a dog", dimensions=2, prompt_name="query")["data"]
    assert found["embedding"] == engine.embed("find: a dog", dimensions=2).vector.tolist()


def test_a_request_may_have_more_texts_than_the_queue_takes(vectors: TestClient, engine: Engine) -> None:
    texts = [f"{number} dogs" for number in range(70)]
    found = [each["embedding"] for each in embedded(vectors, input=texts)["data"]]
    assert found == [each.vector.tolist() for each in engine.embed(texts)]
    assert engine.stats().num_running == 0


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": []}, "input", "empty list"),
        ({"input": [1, "a"]}, "input", "mixes"),
        ({"input": [[]]}, None, "0 token ids"),
        ({"input": "a", "dimensions": 5}, "dimensions", "have 4"),
        ({"input": "a", "dimensions": 0}, None, "at least 1"),
        ({"input": "a", "encoding_format": "int8"}, None, "encoding_format"),
        ({"input": "a", "prompt_name": "document"}, "prompt_name", "'query'"),
        ({"input": [[5], [7] * 300]}, None, "prompt 1: .*maximum context length is 256"),
        ({"input": ["a"] * 2049}, "input", "2048"),
        ({"input": [[499, 500]]}, None, "token id 499"),
    ],
)
def test_a_body_that_cannot_be_answered_is_refused(
    body: dict[str, Any], param: str | None, message: str, vectors: TestClient, engine: Engine
) -> None:
    response = vectors.post("/v1/embeddings", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert param is None or error["param"] == param
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error["message"])
    engine.check()


def test_each_model_answers_what_it_was_made_for(vectors: TestClient, scores: TestClient) -> None:
    chat = {"messages": [{"role": "user", "content": "a dog"}]}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "a dog"})):
        response = vectors.post(path, json=body)
        assert response.status_code == 400 and "makes embeddings" in response.json()["error"]["message"]
    pair = {"query": "dog", "documents": DOCUMENTS}
    for client, path, body, message in (
        (vectors, "/v1/rerank", pair, "is no reranker"),
        (vectors, "/v1/score", {"text_1": "a", "text_2": "b"}, "is no reranker"),
        (scores, "/v1/embeddings", {"input": "a"}, "makes no embeddings"),
    ):
        response = client.post(path, json=body)
        assert response.status_code == 400 and message in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_documents_come_best_first(path: str, scores: TestClient, reranker: Engine) -> None:
    expected = [(each.index, each.score) for each in reranker.rerank("dog", DOCUMENTS)]
    mixed = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, {"text": DOCUMENTS[2], "title": "ours"}]
    for documents in (DOCUMENTS, mixed):
        reply = scores.post(path, json={"query": "dog", "documents": documents}).json()
        assert [(each["index"], each["relevance_score"]) for each in reply["results"]] == expected
        assert "document" not in reply["results"][0] and reply["id"] and reply["model"] == "fake"
    asked = {"query": "dog", "documents": mixed, "top_n": 2, "return_documents": True}
    reply = scores.post(path, json=asked).json()
    assert [each["document"] for each in reply["results"]] == [{"text": DOCUMENTS[index]} for index, _ in expected[:2]]
    assert reply["usage"]["prompt_tokens"] > reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    other = scores.post(path, json={**asked, "instruction": "about houses"}).json()
    assert other["results"] != reply["results"]


def test_pairs_are_scored_in_order(scores: TestClient, reranker: Engine) -> None:
    expected = {each.index: each.score for each in reranker.rerank("dog", DOCUMENTS)}
    one_for_all = scores.post("/v1/score", json={"text_1": "dog", "text_2": DOCUMENTS}).json()
    of_each = scores.post("/v1/score", json={"text_1": ["dog"] * 3, "text_2": DOCUMENTS}).json()
    for reply in (one_for_all, of_each):
        assert [(each["index"], each["score"]) for each in reply["data"]] == sorted(expected.items())
    single = scores.post("/v1/score", json={"text_1": "dog", "text_2": DOCUMENTS[1]}).json()
    assert [each["score"] for each in single["data"]] == [expected[1]]
    for wrong in ({"text_1": ["a", "b"], "text_2": DOCUMENTS}, {"text_1": "a", "text_2": []}):
        assert scores.post("/v1/score", json=wrong).status_code == 400
    assert scores.post("/v1/rerank", json={"query": "a", "documents": []}).status_code == 400


def test_a_cross_encoder_answers_the_same_requests() -> None:
    """Its score is the sigmoid of its number, which a fake one makes of the number of tokens."""

    def put_numbers(batch: Batch, rows: np.ndarray) -> None:
        lengths = np.bincount(batch.arrays.row_of_token)
        rows[:] = lengths[batch.arrays.row_of_token[batch.arrays.logit_rows]][:, None] / 10

    with vector_engine(pairs=PAIRS, bidirectional=True, context_length=64) as (engine, model):
        model.after = put_numbers
        client = TestClient(create_app(engine))
        body = {"query": "dog", "documents": DOCUMENTS, "return_documents": True}
        reply = client.post("/v1/rerank", json=body).json()
        lengths = {each.index: each.prompt_tokens for each in engine.rerank("dog", DOCUMENTS)}
        assert reply["usage"]["prompt_tokens"] == sum(lengths.values())
        for each in reply["results"]:
            assert each["document"] == {"text": DOCUMENTS[each["index"]]}
            expected = 1 / (1 + np.exp(-lengths[each["index"]] / 10))
            assert each["relevance_score"] == pytest.approx(expected, rel=1e-6)
        pairs = client.post("/v1/score", json={"text_1": "dog", "text_2": DOCUMENTS}).json()["data"]
        by_index = {each["index"]: each["relevance_score"] for each in reply["results"]}
        assert {each["index"]: each["score"] for each in pairs} == by_index
        for path, more, message in (
            ("/v1/rerank", {"instruction": "about cats"}, "takes no instruction"),
            ("/v1/rerank", {"documents": ["a " * 100]}, "maximum context length is 64 tokens"),
            ("/v1/embeddings", {}, "makes no embeddings"),
            ("/v1/chat/completions", {}, "scores documents, and writes no text"),
        ):
            bodies = {"/v1/rerank": body, "/v1/embeddings": {"input": "a"}}
            chat = {"messages": [{"role": "user", "content": "a"}]}
            response = client.post(path, json={**bodies.get(path, chat), **more})
            assert response.status_code == 400 and message in response.json()["error"]["message"]
