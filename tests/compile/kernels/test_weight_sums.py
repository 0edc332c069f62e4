"""Sums of weights by block, against adding them exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.sampling.weight_sums import weight_sums
from radixlm.runtime.artifact.manifest import WEIGHT_BLOCK

from .harness import built, every_target, examples

STRIDE, LARGEST_STRIDE = 1040, 3


def run(target: Target, logits: np.ndarray, row: int, vocab_size: int, temperature: float) -> np.ndarray:
    """The sums that the kernel finds in one row, of which the first `vocab_size` logits count."""
    largest = np.full((len(logits), LARGEST_STRIDE), np.nan, np.float32)
    largest[:, 0] = logits[:, :vocab_size].max(axis=1)
    sums, scale = np.full(-(-vocab_size // WEIGHT_BLOCK), np.nan), np.array([1 / (temperature * math.log(2))])
    built(target, weight_sums, target)(logits, largest, scale, sums, row, STRIDE, LARGEST_STRIDE, vocab_size)
    return sums


def exact(logits: np.ndarray, temperature: float) -> list[float]:
    """The same, each weight by the math library, rounded once."""
    largest = float(logits.max())
    weights = [math.exp((float(logit) - largest) / temperature) for logit in logits]
    return [math.fsum(weights[start : start + WEIGHT_BLOCK]) for start in range(0, len(weights), WEIGHT_BLOCK)]


def made(seed: int, spread: float, vocab_size: int, num_rows: int = 2) -> np.ndarray:
    logits = np.full((num_rows, STRIDE), np.nan, np.float32)  # what is beyond is not looked at
    logits[:, :vocab_size] = np.random.default_rng(seed).normal(size=(num_rows, vocab_size)) * spread
    return logits


@every_target
@examples(40)
@given(
    st.sampled_from([1, 7, 8, 255, 256, 257, 768, 1000, 1024, 1040]),
    st.sampled_from([1e-30, 0.1, 3.0, 40.0, 1e30]),
    st.sampled_from([1e-6, 0.01, 0.7, 1.0, 100.0]),
    st.integers(0, 1 << 30),
)
def test_sums_are_exact_to_a_trillionth(
    target: Target, vocab_size: int, spread: float, temperature: float, seed: int
) -> None:
    logits = made(seed, spread, vocab_size)
    for row in range(2):
        expected = exact(logits[row, :vocab_size], temperature)
        assert run(target, logits, row, vocab_size, temperature) == pytest.approx(expected, rel=1e-12, abs=1e-290)


@every_target
def test_a_sum_does_not_depend_on_the_rows_and_blocks_beside_it(target: Target) -> None:
    logits = made(seed=5, spread=3.0, vocab_size=1000, num_rows=4)
    whole = run(target, logits, 2, 1000, 0.7)
    assert np.array_equal(run(target, logits[2:3], 0, 1000, 0.7), whole)
    logits[2, 256:512] += np.float32(0.5) * (logits[2, 256:512] < logits[2, :1000].max() - 1)
    changed = run(target, logits, 2, 1000, 0.7)
    assert (changed == whole).tolist() == [True, False, True, True]


@every_target
def test_the_largest_finite_numbers_are_weighed(target: Target) -> None:
    logits = np.full((1, STRIDE), -np.finfo(np.float32).max, np.float32)
    logits[0, 300] = np.finfo(np.float32).max
    sums = run(target, logits, 0, 1000, 1.0)
    assert sums[1] == 1.0 and sums[[0, 2, 3]] == pytest.approx(0.0, abs=1e-290)
