"""Real models as their Q4_K_M files have them say what transformers says, closer than llama.cpp does.

A thousand positions of each; Gemma's are behind 500 tokens, so that its window of 512 leaves tokens out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.model.model_runner import ModelRunner

from ...compile.ragged import Rows
from ...goldens.real_kl import RealGolden, estimated_kl
from ...goldens.smollm2_kl import Comparison

NUM_PAGES = 97  # a prime, so that Rows can scatter pages; 1,500 tokens take 94
CHUNK = 64  # positions computed at a time, all with logits
NAMES = ("gemma3", "qwen2")
LONG = ("qwen2",)  # Gemma has every kind of tensor that it has, and is compiled in half the time


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in NAMES]
)
def comparison(request: pytest.FixtureRequest) -> Comparison:
    golden = RealGolden.load(request.param)
    return compared(request.getfixturevalue(f"{request.param}_artifact"), golden)


def compared(artifact: Path, golden: RealGolden) -> Comparison:
    runner = ModelRunner(Artifact.open(artifact), num_pages=NUM_PAGES)
    try:
        return Comparison.joined(
            [part for prompt in golden.prompts for part in prompt.compare(teacher_forced(runner, prompt.ids.tolist()))]
        )
    finally:
        runner.close()


def teacher_forced(runner: ModelRunner, token_ids: list[int]) -> Iterator[np.ndarray]:
    """Logits of all positions, chunk after chunk."""
    rows = Rows(runner, NUM_PAGES)
    number = rows.add(token_ids)
    for start in range(0, len(token_ids), CHUNK):
        yield rows.step({number: min(CHUNK, len(token_ids) - start)})[number]


@pytest.mark.parametrize("name", NAMES)
def test_a_thousand_positions_are_compared(name: str) -> None:
    assert sum(len(prompt.likely) for prompt in RealGolden.load(name).prompts) == 1000


def test_gemma_reads_1500_tokens() -> None:
    assert [len(prompt.ids) for prompt in RealGolden.load("gemma3").prompts] == [1500]


def test_mean_kl_is_below_a_hundredth_of_a_nat_and_at_most_0_8_times_that_of_llama_cpp(comparison: Comparison) -> None:
    assert comparison.kl.mean() < 0.01
    assert comparison.kl.mean() <= 0.8 * comparison.llama_cpp_kl.mean()


def test_the_most_likely_token_is_the_same_no_less_often_than_llama_cpp_s(comparison: Comparison) -> None:
    assert comparison.agrees.mean() >= comparison.llama_cpp_agrees.mean()


def test_the_estimate_of_a_distribution_s_distance_has_no_bias() -> None:
    random = np.random.default_rng(0)
    scores, noise = random.normal(0, 2, 2000), random.normal(0, 0.3, 2000)
    ours, theirs = (x - np.log(np.exp(x).sum()) for x in (scores, scores + noise))
    exact = (np.exp(ours) * (ours - theirs)).sum()
    ids = np.argsort(-ours)
    rest = ids[24:]
    drawn = random.choice(rest, (4000, 8), p=np.exp(ours[rest]) / np.exp(ours[rest]).sum())
    kept = np.concatenate([np.broadcast_to(ids[:24], (4000, 24)), drawn], axis=1)
    assert estimated_kl(ours[kept], theirs[kept]).mean() == pytest.approx(exact, rel=0.01)
