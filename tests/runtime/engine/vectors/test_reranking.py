"""Documents are scored by two logits after a prompt, whose shared beginning is computed once."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.vectors.token_scores import sigmoid
from radixlm.runtime.errors import ContextLengthExceeded, InvalidArgument

from .fake_vectors import NO, RERANKING, VOCAB_SIZE, YES, states_alone, vector_engine

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


def test_a_score_neither_overflows_nor_leaves_its_range() -> None:
    assert [sigmoid(x) for x in (-1e6, -745.0, 0.0, 40.0, 1e6)] == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.0])
    assert sigmoid(1.5) == pytest.approx(1 / (1 + math.exp(-1.5)), rel=1e-15)
