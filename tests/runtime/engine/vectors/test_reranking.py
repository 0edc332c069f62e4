"""Documents are scored by two logits after a prompt, whose shared beginning is computed once."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.vectors.score_readers import sigmoid
from radixlm.runtime.errors import ContextLengthExceeded, EngineError, InvalidArgument, InvalidParameter, InvalidRequest
from radixlm.runtime.model.batch import Batch

from .fake_vectors import NO, PAIRS, RERANKING, VOCAB_SIZE, YES, states_alone, vector_engine

WORDS = "once upon a time there was little girl who lived in the big house with her dog and cat".split()  # noqa: SIM905
DOCUMENTS = ["a dog", "the cat was big", "a dog", "once upon a time there was a house", ""]


def text_of(num_words: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))


def prompt_ids(engine: Engine, query: str, document: str, instruction: str = "useful") -> list[int]:
    """The prompt's ids, by parts between control tokens."""
    inside = f"Is it {instruction}?\nQuery: {query}\nDocument: {document}"
    return [1, *engine.encode(inside, add_bos=False), 2, *engine.encode("answer", add_bos=False)]


def oracle(ids: Sequence[int]) -> float:
    logits = states_alone(ids, VOCAB_SIZE)[-1]
    yes, no = math.exp(logits[YES]), math.exp(logits[NO])
    return yes / (yes + no)


def test_documents_come_best_first_with_the_probability_of_yes() -> None:
    with vector_engine(reranking=RERANKING) as (engine, _):
        found = engine.rerank("dog", DOCUMENTS)
        expected = [oracle(prompt_ids(engine, "dog", document)) for document in DOCUMENTS]
        assert [each.score for each in sorted(found, key=lambda each: each.index)] == pytest.approx(expected, rel=1e-12)
        order = sorted(range(len(DOCUMENTS)), key=lambda index: (-expected[index], index))
        assert [each.index for each in found] == order
        assert [each.index for each in engine.rerank("dog", DOCUMENTS, top_n=2)] == order[:2]
        [other] = engine.rerank("dog", ["a dog"], instruction="about cats")
        assert other.score == pytest.approx(oracle(prompt_ids(engine, "dog", "a dog", "about cats")), rel=1e-12)


def test_a_reranker_writes_text_too() -> None:
    with vector_engine(reranking=RERANKING) as (engine, _):
        assert len(engine.generate("once", max_tokens=3, ignore_eos=True).token_ids) == 3


def test_control_tokens_of_clients_are_text_and_placeholders_of_theirs_stay() -> None:
    with vector_engine(reranking=RERANKING) as (engine, _):
        prompt = engine.vector_prompts.pair("</s>{document}", "<s> {query} x")
        assert list(prompt.ids).count(2) == 1 and list(prompt.ids).count(1) == 1
        assert (
            engine.decode(prompt.ids) == "<s> Is it useful?\nQuery: </s>{document}\nDocument: <s> {query} x</s> answer"
        )


def test_what_documents_share_is_computed_once() -> None:
    """Of 50 documents of about 200 tokens behind 300: at most 1.01 of the tokens that a tree of all prompts has."""
    query, documents = text_of(72, 0), [text_of(46, 1 + number) for number in range(50)]
    options = {"context_length": 1024, "num_pages": 1200, "max_num_batched_tokens": 64}
    with vector_engine(reranking=RERANKING, **options) as (engine, model):  # type: ignore[arg-type]
        prompts = [prompt_ids(engine, query, document) for document in documents]
        assert all(400 < len(prompt) < 700 for prompt in prompts)
        found = engine.rerank(query, documents)
        least = len({tuple(prompt[: length + 1]) for prompt in prompts for length in range(len(prompt))})
        assert least < sum(map(len, prompts)) / 2
        assert model.num_tokens <= 1.01 * least
        assert sum(each.prompt_tokens - each.cached_tokens for each in found) == model.num_tokens
        for each in found[::10]:
            assert each.score == pytest.approx(oracle(prompts[each.index]), rel=1e-12)


def test_a_document_that_is_too_long_is_named() -> None:
    with vector_engine(reranking=RERANKING) as (engine, _):
        with pytest.raises(ContextLengthExceeded, match="prompt 1: "):
            engine.rerank("dog", ["a dog", text_of(400, 0)])
        with pytest.raises(InvalidArgument, match="a list of texts"):
            engine.rerank("dog", "a dog")


def number_of(ids: Sequence[int]) -> float:
    """What the head of a fake cross-encoder makes of a pair."""
    return float(np.float32(sum(ids) % 997 / 100 - 5))


def put_numbers(batch: Batch, rows: np.ndarray) -> None:
    """Put the number of each pair into the row of its first token, and others into those of later ones."""
    arrays = batch.arrays
    for row, first in enumerate(arrays.logit_rows):
        ids = arrays.token_ids[arrays.row_of_token == arrays.row_of_token[first]].tolist()
        rows[row] = number_of(ids) + arrays.positions[first]


@pytest.fixture(scope="module")
def cross_encoder() -> Iterator[Engine]:
    with vector_engine(pairs=PAIRS, bidirectional=True, context_length=64) as (engine, model):
        model.after = put_numbers
        yield engine


@settings(deadline=None, max_examples=15)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=20), query=st.integers(0, 4))
def test_a_cross_encoder_scores_each_pair_between_its_tokens(
    cross_encoder: Engine, lengths: list[int], query: int
) -> None:
    asked, documents = text_of(query, 99), [text_of(length, seed) for seed, length in enumerate(lengths)]
    encode = partial(cross_encoder.encode, add_bos=False)
    pairs = [[1, *encode(asked), 2, 2, *encode(document), 2] for document in documents]
    expected = [sigmoid(number_of(ids)) for ids in pairs]
    found = cross_encoder.rerank(asked, documents)
    assert {each.index: each.score for each in found} == dict(enumerate(expected))
    assert [each.index for each in found] == sorted(range(len(pairs)), key=lambda index: (-expected[index], index))
    assert {each.index: each.prompt_tokens for each in found} == {index: len(ids) for index, ids in enumerate(pairs)}
    assert all(each.cached_tokens == 0 for each in found)
    cross_encoder.check()


def test_control_tokens_in_a_pair_are_text(cross_encoder: Engine) -> None:
    prompt = cross_encoder.vector_prompts.pair("</s><s>", "a</s>")
    assert (list(prompt.ids).count(1), list(prompt.ids).count(2)) == (1, 3)


def test_a_cross_encoder_refuses_what_it_cannot_do(cross_encoder: Engine) -> None:
    with pytest.raises(InvalidParameter, match="takes no instruction"):
        cross_encoder.rerank("dog", ["a dog"], instruction="about cats")
    with pytest.raises(InvalidRequest, match=r"scores documents, and writes no text; ask for these \(/v1/rerank"):
        cross_encoder.generate("once")
    with pytest.raises(InvalidRequest, match="makes no embeddings"):
        cross_encoder.embed("once")
    with pytest.raises(ContextLengthExceeded, match=r"prompt 1: .* 64 tokens"):
        cross_encoder.rerank("dog", ["a dog", text_of(80, 0)])


def test_a_number_that_is_not_finite_fails_its_pair() -> None:
    with vector_engine(pairs=PAIRS, bidirectional=True, context_length=64) as (engine, model):
        model.after = lambda batch, rows: rows.fill(np.nan)
        with pytest.raises(EngineError, match="not finite"):
            engine.rerank("dog", ["a dog"])


def test_a_score_neither_overflows_nor_leaves_its_range() -> None:
    assert [sigmoid(x) for x in (-1e6, -745.0, 0.0, 40.0, 1e6)] == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.0])
    assert sigmoid(1.5) == pytest.approx(1 / (1 + math.exp(-1.5)), rel=1e-15)
