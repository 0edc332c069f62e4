"""SmolLM2 scores a text as its own forward does, the same bits in any company, and as transformers does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.engine.completion import PromptLogprobs
from radixlm.runtime.engine.engine import Engine, SamplingParams
from radixlm.runtime.model.model_runner import ModelRunner

from ...goldens.smollm2_kl import SmolLM2Golden
from .test_quality_smollm2 import NUM_PAGES, teacher_forced

SCORED = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=2)
NUM_TOKENS = 250  # of the passage that is scored: four parts of 64, the last page partial
REPLY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def golden() -> SmolLM2Golden:
    return SmolLM2Golden.load()


@pytest.fixture(scope="module")
def ids(golden: SmolLM2Golden) -> list[int]:
    return golden.passages[0].ids[:NUM_TOKENS]


@pytest.fixture(scope="module")
def expected(smollm2_artifact: Path, ids: list[int]) -> np.ndarray:
    """Logprobs of all tokens at each place but the last, `[NUM_TOKENS - 1, vocab]`, float64."""
    artifact = Artifact.open(smollm2_artifact)
    runner = ModelRunner(artifact, num_pages=NUM_PAGES)
    logits = teacher_forced(runner, ids)[:-1].astype(np.float64)
    runner.close()
    largest = logits.max(axis=-1, keepdims=True)
    return logits - largest - np.log(np.exp(logits - largest).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def engine(smollm2_artifact: Path) -> Iterator[Engine]:
    with Engine(smollm2_artifact, kv_cache_bytes=64 << 20, max_num_seqs=8) as engine:
        yield engine


def scored(engine: Engine, ids: list[int]) -> PromptLogprobs:
    told = engine.generate(ids, SCORED).prompt_logprobs
    assert told is not None
    return told


def assert_exact(told: PromptLogprobs, ids: list[int], expected: np.ndarray) -> None:
    """The sums are the module's, whose order and `exp` are others than NumPy's."""
    own = expected[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose([each.logprob for each in told[1:]], own, rtol=0, atol=1e-12)
    best = np.argsort(-expected, axis=-1, kind="stable")[:, :2]
    assert [each.top[0][0] for each in told[1:]] == best[:, 0].tolist()
    second = np.take_along_axis(expected, best, axis=-1)[:, 1]
    np.testing.assert_allclose([each.top[1][1] for each in told[1:]], second, rtol=0, atol=1e-12)


def test_a_text_is_scored_as_the_forward_alone_does_cold_and_warm(
    engine: Engine, ids: list[int], expected: np.ndarray
) -> None:
    cold = scored(engine, ids)
    assert_exact(cold, ids, expected)
    reply = engine.generate([*ids, *ids[:3]], REPLY)
    assert reply.usage.cached_tokens >= NUM_TOKENS - 16  # what was scored is cached
    assert [*scored(engine, ids)] == [*cold]
    again = engine.generate([*ids, *ids[:3]], REPLY)
    assert (again.text, again.usage.cached_tokens) == (reply.text, NUM_TOKENS + 2)
    engine.check()


def test_company_changes_no_score(engine: Engine, ids: list[int]) -> None:
    alone = scored(engine, ids)
    streams = [engine.stream(ids[start:], REPLY) for start in (5, 90, 180)]
    others = [engine.stream(ids[start:], SCORED) for start in (7, 50)]
    assert [*scored(engine, ids)] == [*alone]
    for stream in (*streams, *others):
        stream.result()
    engine.check()


def test_a_thousand_tokens_are_as_likely_as_transformers_says(engine: Engine, golden: SmolLM2Golden) -> None:
    """With the same weights in float32; what is left is the rounding of inputs to 8 bits."""
    ours = [[each.logprob for each in scored(engine, passage.ids)[1:]] for passage in golden.passages]
    theirs = np.concatenate([passage.log_probs for passage in golden.passages])
    off = np.concatenate(ours) - theirs
    assert len(off) > 990
    assert abs(off.mean()) < 0.01 and off.std() < 0.2
