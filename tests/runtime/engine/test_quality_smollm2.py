"""SmolLM2 as its Q4_1 file has it says what transformers says with the same weights, closer than llama.cpp does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from radixlm.compile.sources import open_source
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.model.model_runner import ModelRunner

from ...compile.ragged import Rows
from ...goldens.smollm2_kl import Comparison, Passage, SmolLM2Golden, bootstrap_ratio, compare

NUM_PAGES = 127  # a prime, so that Rows can scatter pages
CHUNK = 64  # positions computed at a time, all with logits
MOST_KL = 0.8  # of llama.cpp's on the same file
CLOSE_CALL = 0.5  # logits: int8 activations move them by 0.3 (root mean square)


@pytest.fixture(scope="module")
def golden() -> SmolLM2Golden:
    return SmolLM2Golden.load()


@pytest.fixture(scope="module")
def runner(smollm2_artifact: Path) -> Iterator[ModelRunner]:
    runner = ModelRunner(Artifact.open(smollm2_artifact), num_pages=NUM_PAGES)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def embedding(smollm2_gguf: Path) -> np.ndarray:
    with open_source(smollm2_gguf) as source:
        return source.read("model.embed_tokens.weight").dequantize()


@pytest.fixture(scope="module")
def comparison(runner: ModelRunner, golden: SmolLM2Golden, embedding: np.ndarray) -> Comparison:
    return Comparison.joined([compare_passage(runner, passage, embedding) for passage in golden.passages])


def compare_passage(runner: ModelRunner, passage: Passage, embedding: np.ndarray) -> Comparison:
    return compare(passage, teacher_forced(runner, passage.ids), embedding)


def teacher_forced(runner: ModelRunner, token_ids: list[int]) -> np.ndarray:
    """Logits `[len(token_ids), vocab]`, in chunks."""
    rows = Rows(runner, NUM_PAGES)
    number = rows.add(token_ids)
    counts = [min(CHUNK, len(token_ids) - start) for start in range(0, len(token_ids), CHUNK)]
    return np.concatenate([rows.step({number: count})[number] for count in counts])


def test_the_passages_have_a_thousand_positions(golden: SmolLM2Golden) -> None:
    assert sum(len(passage.ids) for passage in golden.passages) >= 1000


def test_mean_kl_is_below_a_hundredth_of_a_nat(comparison: Comparison) -> None:
    assert comparison.kl.mean() < 0.01
    assert comparison.kl.min() > -1e-6


def test_the_most_likely_token_is_the_same_at_97_of_100_positions_and_no_less_often_than_llama_cpp_s(
    comparison: Comparison,
) -> None:
    assert comparison.agrees.mean() >= 0.97
    assert comparison.agrees.mean() >= comparison.llama_cpp_agrees.mean()


def test_attention_in_integers_costs_less_than_a_thousandth_of_a_nat(
    golden: SmolLM2Golden, embedding: np.ndarray, smollm2_codes_artifact: Path, smollm2_f16_artifact: Path
) -> None:
    codes, exact = (
        compare_artifact(path, golden, embedding) for path in (smollm2_codes_artifact, smollm2_f16_artifact)
    )
    assert abs(codes.kl.mean() - exact.kl.mean()) < 0.001
    assert codes.bootstrap.ratio <= MOST_KL
    assert codes.agrees.mean() >= codes.llama_cpp_agrees.mean()


def compare_artifact(path: Path, golden: SmolLM2Golden, embedding: np.ndarray) -> Comparison:
    runner = ModelRunner(Artifact.open(path), num_pages=NUM_PAGES)
    compared = Comparison.joined([compare_passage(runner, passage, embedding) for passage in golden.passages])
    runner.close()
    return compared


def test_mean_kl_is_at_most_0_8_times_that_of_llama_cpp(comparison: Comparison) -> None:
    bootstrap = comparison.bootstrap
    assert bootstrap.ratio <= MOST_KL, bootstrap
    assert bootstrap.high <= MOST_KL, bootstrap


def test_greedy_replies_differ_from_transformers_only_at_close_calls(
    runner: ModelRunner, golden: SmolLM2Golden
) -> None:
    for turn in (turn for chat in golden.chats for turn in chat):
        logits = teacher_forced(runner, turn.prompt + turn.reply[:-1])[len(turn.prompt) - 1 :]
        differs = logits.argmax(axis=-1) != np.array(turn.reply)
        assert (turn.margins[differs] < CLOSE_CALL).all()


def test_a_ratio_of_equal_errors_is_one_and_a_worse_one_shows() -> None:
    kl = np.random.default_rng(0).exponential(0.003, size=1000)
    assert bootstrap_ratio(kl, kl).low == pytest.approx(1.0)
    assert bootstrap_ratio(1.5 * kl, kl).low == pytest.approx(1.5)
