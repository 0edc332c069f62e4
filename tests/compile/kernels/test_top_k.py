"""The largest of each row, against sorting all of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.sampling.top_k import num_maxima, top_k
from radixlm.compile.weights.layout import round_up

from .harness import built, every_target, examples

COUNT = 64
SIZES = (200, 1, 15, 16, 63, 64, 65, 1023, 1025, 4096, 5000)  # of vocabularies: around vectors and blocks


def run(target: Target, logits: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values, ids and finiteness that the kernel finds in rows of which the first `vocab_size` count."""
    num_rows, stride = logits.shape
    scratch = np.zeros((num_rows, num_maxima(vocab_size)), np.float32)
    values, token_ids = np.full((num_rows, COUNT), 7, np.float32), np.full((num_rows, COUNT), 7, np.int32)
    is_finite = np.full(num_rows, 7, np.int32)
    built(target, top_k, COUNT)(logits, scratch, values, token_ids, is_finite, stride, vocab_size, num_rows)
    return values, token_ids, is_finite


def numbers(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Logits of different kinds, float32."""
    made = {
        "normal": lambda: rng.standard_normal(shape) * 3,
        "few values": lambda: rng.integers(-2, 3, shape) * np.float32(0.5),
        "all the same": lambda: np.full(shape, -1.5),
        "rising": lambda: np.broadcast_to(np.arange(shape[1]), shape),
        "falling": lambda: -np.broadcast_to(np.arange(shape[1]), shape),
        "negative and huge": lambda: -np.exp(rng.uniform(-80, 88, shape)),
        "tiny": lambda: rng.standard_normal(shape) * 1e-42,
        "zeros of both signs": lambda: np.where(rng.random(shape) < 0.5, 0.0, -0.0),
    }
    return made[kind]().astype(np.float32)


KINDS = (
    "normal",
    "few values",
    "all the same",
    "rising",
    "falling",
    "negative and huge",
    "tiny",
    "zeros of both signs",
)


@every_target
@examples(40)
@given(st.sampled_from(SIZES), st.sampled_from([3, 1, 2, 9]), st.sampled_from(KINDS), st.integers(0, 1 << 30))
def test_the_largest_are_those_that_sorting_finds(
    target: Target, vocab_size: int, num_rows: int, kind: str, seed: int
) -> None:
    logits = np.full((num_rows, round_up(vocab_size, 16) + 16), np.nan, np.float32)  # what is beyond is not looked at
    logits[:, :vocab_size] = numbers(kind, np.random.default_rng(seed), (num_rows, vocab_size))
    values, token_ids, is_finite = run(target, logits, vocab_size)
    known = logits[:, :vocab_size]
    expected = np.argsort(-known, axis=1, kind="stable")[:, :COUNT]
    count = expected.shape[1]
    assert (is_finite == 1).all()
    assert (token_ids[:, :count] == expected).all()
    assert (values[:, :count] == np.take_along_axis(known, expected, axis=1)).all()
    assert (values[:, count:] == -np.inf).all()


@every_target
@pytest.mark.parametrize("vocab_size", [1, 40, 64, 1000])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_marks_its_row_alone(target: Target, vocab_size: int, bad: float) -> None:
    logits = np.zeros((3, round_up(vocab_size, 16)), np.float32)
    for where in {0, vocab_size // 2, vocab_size - 1}:
        spoiled = logits.copy()
        spoiled[1, where] = bad
        assert run(target, spoiled, vocab_size)[2].tolist() == [1, 0, 1]


@every_target
def test_the_largest_finite_numbers_are_finite(target: Target) -> None:
    limit = np.finfo(np.float32).max
    logits = np.tile(np.array([limit, -limit], np.float32), (2, 96))
    values, token_ids, is_finite = run(target, logits, 192)
    assert is_finite.tolist() == [1, 1]
    assert (values == limit).all()
    assert (token_ids == np.arange(0, 128, 2)).all()
