"""Vectors of texts are those of the model alone, whatever is cached, computed beside them or in which steps."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.runtime.artifact.text_vectors import EmbeddingInfo, Pooling
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.request_options import RequestOptions
from radixlm.runtime.engine.vectors.results import embedding_of
from radixlm.runtime.errors import (
    ContextLengthExceeded,
    EmptyPrompt,
    EngineClosed,
    InvalidArgument,
    InvalidParameter,
    InvalidRequest,
)
from radixlm.runtime.model.batch import Batch

from ...fake_artifact import HIDDEN_SIZE
from .fake_vectors import states_alone, vector_engine

POOLINGS: list[Pooling] = ["last", "mean", "cls"]
LAST = EmbeddingInfo(pooling="last")
TEXTS = st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=60), min_size=1, max_size=12)


def oracle(
    ids: Sequence[int], pooling: Pooling, dimensions: int | None = None, *, normalize: bool = True
) -> np.ndarray:
    """A text's vector, slowly: all hidden states, then pooled, cut and normalized."""
    states = states_alone(ids, HIDDEN_SIZE)
    pooled = {"last": states[-1], "cls": states[0], "mean": sum(states[1:], states[0]) / len(states)}[pooling]
    pooled = pooled[:dimensions]
    return (pooled / math.sqrt(float(np.square(pooled).sum())) if normalize else pooled).astype(np.float32)


@pytest.fixture(scope="module", params=POOLINGS)
def pooled(request: pytest.FixtureRequest) -> Iterator[tuple[Pooling, Engine]]:
    """A pooling, and an engine that computes at most 11 tokens a step: opening one takes longer than all its texts."""
    with vector_engine(EmbeddingInfo(pooling=request.param), max_num_batched_tokens=11) as (engine, _):
        yield request.param, engine


@settings(deadline=None, max_examples=60)
@given(texts=TEXTS, is_cold=st.booleans())
def test_a_vector_is_the_same_bits_in_any_company(
    pooled: tuple[Pooling, Engine], texts: list[list[int]], is_cold: bool
) -> None:
    """Few different ids, so that texts begin alike and find each other cached, those of earlier examples, too."""
    pooling, engine = pooled
    if is_cold:
        engine.clear_cache()
    for ids, found in zip(texts, engine.embed(texts), strict=True):
        np.testing.assert_array_equal(found.vector, oracle(ids, pooling))
        assert found.vector.dtype == np.float32 and found.prompt_tokens == len(ids)
    engine.check()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_text_that_gave_its_pages_back_has_the_same_vector(pooling: Pooling) -> None:
    texts = [[3 + number, *range(10, 100)] for number in range(6)]
    with vector_engine(EmbeddingInfo(pooling=pooling), num_pages=18, max_num_batched_tokens=16) as (engine, _):
        for ids, found in zip(texts, engine.embed(texts), strict=True):
            np.testing.assert_array_equal(found.vector, oracle(ids, pooling))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_text_that_was_cached_is_computed_as_little_as_its_pooling_allows(pooling: Pooling) -> None:
    ids = [*range(10, 90)]
    with vector_engine(EmbeddingInfo(pooling=pooling)) as (engine, model):
        first, before = engine.embed(ids), model.num_tokens
        second = engine.embed(ids)
        assert first.cached_tokens == 0 and second.cached_tokens == (79 if pooling == "last" else 0)
        assert model.num_tokens - before == 80 - second.cached_tokens
        np.testing.assert_array_equal(second.vector, first.vector)


def test_a_text_whose_tokens_see_those_after_them_is_computed_in_one_step() -> None:
    """Nothing of it is found cached or kept; short texts share a step of 64 tokens."""
    lengths = np.random.default_rng(0).integers(1, 60, 30).tolist()
    texts = [[3 + place % 2 for place in range(length)] for length in lengths]
    steps: list[list[int]] = []
    with vector_engine(EmbeddingInfo(pooling="mean"), bidirectional=True, context_length=64) as (engine, model):

        def note(batch: Batch) -> None:
            rows = batch.arrays.row_of_token
            steps.append(np.bincount(rows).tolist())
            starts = [int(batch.arrays.positions[rows == row][0]) for row in range(rows.max() + 1)]
            assert starts == [0] * len(starts)

        model.before = note
        for _ in range(2):
            for ids, found in zip(texts, engine.embed(texts), strict=True):
                np.testing.assert_array_equal(found.vector, oracle(ids, "mean"))
                assert found.cached_tokens == 0
        engine.check()
    computed = [num for step in steps for num in step]
    assert sorted(computed) == sorted(2 * [len(ids) for ids in texts])
    assert all(sum(step) <= 64 for step in steps)


def test_a_step_that_has_no_room_for_a_text_is_refused() -> None:
    with (
        pytest.raises(InvalidParameter, match="in one step"),
        vector_engine(LAST, bidirectional=True, max_num_batched_tokens=32),
    ):
        pass


def test_nothing_is_reused_or_kept_where_a_request_says_so() -> None:
    with vector_engine(LAST) as (engine, _):
        for _ in range(2):
            assert engine.embed([*range(10, 90)], options=RequestOptions(cache_match="off")).cached_tokens == 0


def test_clients_share_no_prefixes() -> None:
    ids = [*range(10, 90)]
    with vector_engine(LAST) as (engine, _):
        engine.embed(ids, options=RequestOptions(namespace=b"one"))
        assert engine.embed(ids, options=RequestOptions(namespace=b"two")).cached_tokens == 0
        assert engine.embed(ids, options=RequestOptions(namespace=b"one")).cached_tokens == 79


@pytest.mark.parametrize("normalize", [True, False])
def test_a_vector_is_cut_and_then_normalized(normalize: bool) -> None:
    ids = [*range(10, 30)]
    with vector_engine(EmbeddingInfo(pooling="last", normalize=normalize)) as (engine, _):
        for dimensions in (None, 1, 3, HIDDEN_SIZE):
            found = engine.embed(ids, dimensions=dimensions).vector
            np.testing.assert_array_equal(found, oracle(ids, "last", dimensions, normalize=normalize))
        for dimensions in (0, HIDDEN_SIZE + 1):
            with pytest.raises(InvalidParameter, match=f"vectors have {HIDDEN_SIZE}"):
                engine.embed(ids, dimensions=dimensions)


def test_a_text_stands_behind_the_prompt_that_is_named() -> None:
    info = EmbeddingInfo(pooling="last", prompts={"query": "find: ", "document": ""}, default_prompt="document")
    with vector_engine(info) as (engine, _):
        plain, asked = engine.embed("once there was"), engine.embed("once there was", prompt_name="query")
        spelled = engine.embed("find: once there was")
        np.testing.assert_array_equal(asked.vector, spelled.vector)
        assert asked.vector.tolist() != plain.vector.tolist()
        ids = engine.encode("find: once there was")
        np.testing.assert_array_equal(engine.embed(ids, prompt_name="query").vector, spelled.vector)
        with pytest.raises(InvalidParameter, match="prompt_name is 'other'; this model has 'query', 'document'"):
            engine.embed("x", prompt_name="other")


def test_many_texts_have_their_vectors_in_order_with_a_short_queue() -> None:
    texts = [[10 + number % 7, 20 + number] for number in range(60)]
    with vector_engine(LAST, max_num_seqs=2, max_queue=4) as (engine, _):
        for ids, found in zip(texts, engine.embed(texts), strict=True):
            np.testing.assert_array_equal(found.vector, oracle(ids, "last"))


def test_a_text_that_cannot_be_computed_is_named_and_harms_no_later_one() -> None:
    with vector_engine(LAST) as (engine, _):
        with pytest.raises(ContextLengthExceeded, match=r"prompt 1: .* 300"):
            engine.embed([[3], [4] * 300, [5]])
        with pytest.raises(InvalidRequest, match="prompt 0: "):
            engine.embed([[VOCABULARY_END]])
        with pytest.raises(EmptyPrompt):
            engine.embed([[3], []])
        with pytest.raises(InvalidArgument):
            engine.embed(7)  # type: ignore[call-overload]
        np.testing.assert_array_equal(engine.embed([3]).vector, oracle([3], "last"))
        engine.check()


VOCABULARY_END = 500


def test_a_number_that_is_not_finite_fails_its_text_alone() -> None:
    with vector_engine(LAST) as (engine, model):

        def damage(batch: object, rows: np.ndarray) -> None:
            rows[:, 1] = np.nan

        model.after = damage
        with pytest.raises(Exception, match="not finite"):
            engine.embed([3, 4, 5])
        model.after = lambda batch, rows: None
        np.testing.assert_array_equal(engine.embed([3, 4, 5]).vector, oracle([3, 4, 5], "last"))


def test_a_model_of_vectors_writes_no_text_and_one_that_writes_makes_no_vectors(chat_engine: Engine) -> None:
    with vector_engine(LAST) as (engine, _):
        with pytest.raises(InvalidRequest, match="makes embeddings, and writes no text"):
            engine.generate("once")
        with pytest.raises(InvalidRequest, match="makes embeddings, and writes no text"):
            engine.chat([{"role": "user", "content": "once"}])
        with pytest.raises(InvalidRequest, match="is no reranker"):
            engine.rerank("once", ["there was"])
    with pytest.raises(InvalidRequest, match="makes no embeddings"):
        chat_engine.embed("once")


@pytest.fixture
def chat_engine() -> object:
    with vector_engine() as (engine, _):
        yield engine


def test_an_event_loop_awaits_a_vector() -> None:
    async def awaited() -> np.ndarray:
        return embedding_of(await engine.stream_embedding([7, 8, 9]).aresult(), LAST, None).vector

    with vector_engine(LAST) as (engine, _):
        np.testing.assert_array_equal(asyncio.run(awaited()), oracle([7, 8, 9], "last"))


def test_a_text_whose_request_was_cancelled_has_no_vector() -> None:
    with vector_engine(LAST, max_num_batched_tokens=16) as (engine, model):
        is_cancelled = threading.Event()
        model.before = lambda batch: is_cancelled.wait(60)
        stream = engine.stream_embedding([10] * 200)
        stream.cancel()
        is_cancelled.set()
        completion = stream.result()
        assert completion.finish_reason == "cancelled"
        with pytest.raises(EngineClosed):
            embedding_of(completion, LAST, None)
