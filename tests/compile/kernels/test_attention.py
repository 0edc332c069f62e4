"""Attention over scattered pages, against softmax in float64; rows beyond a token's length are NaN throughout.

Whatever the tokens of a step are, each one's bits are what it gets alone.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.attention_units import MAX_TILE, SINGLE_TOKENS
from radixlm.runtime.artifact.manifest import KVDType

from .attention_case import LAYER, LIMITS, AttentionCase, Tokens
from .harness import by_rows, every_target, examples, of_each_size, runnable
from .pool import KEYS, VALUES, Part

SHAPES: list[tuple[KVDType, int, int, int]] = [  # query heads, KV heads, head_dim
    ("f32", 1, 1, 8),
    ("f16", 6, 2, 64),
    ("f16", 8, 1, 128),
    ("f16", 7, 1, 80),
    ("f32", 10, 2, 48),
    ("f16", 4, 2, 6),
    ("f16", 11, 1, 2),
]
some_shapes = pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
LENGTHS = (1, 15, 16, 17, 127, 128, 129, 255, 257, 300, 531)  # of sequences; spans end at multiples of 128


@functools.cache
def case_of(shape: tuple[KVDType, int, int, int]) -> tuple[AttentionCase, Tokens, np.ndarray]:
    """A case that several targets share: the last token of each sequence and some earlier one, and what is expected."""
    case = AttentionCase(*shape, LENGTHS)
    rows = np.repeat(np.arange(len(LENGTHS)), 2)
    lengths = [n for length in LENGTHS for n in (length, int(case.rng.integers(1, length + 1)))]
    tokens = case.tokens(rows, lengths)
    return case, tokens, case.expected(tokens)


@functools.cache
def prompt_of(shape: tuple[KVDType, int, int, int]) -> tuple[AttentionCase, Tokens, np.ndarray]:
    """A prompt's tokens between one of another sequence and two of a third, and what is expected of them."""
    case = AttentionCase(*shape, (300, 200, 150))
    tokens = case.tokens([1, *[0] * 140, 2, 2], [200, *range(161, 301), 150, 33])
    return case, tokens, case.expected(tokens)


@by_rows(of_each_size(shape=SHAPES))
def test_outputs_are_those_of_softmax_in_every_batch(row: dict[str, Any]) -> None:
    target, (case, tokens, expected) = row["target"], case_of(row["shape"])
    together = case.run(target, tokens)
    assert len(together) > SINGLE_TOKENS
    np.testing.assert_allclose(together, expected, 0, 1e-5)
    for i in (0, 7, len(together) - 2, len(together) - 1):
        assert (case.run(target, tokens[i : i + 1]) == together[i]).all()
    some = np.random.default_rng(0).permutation(len(together))[:SINGLE_TOKENS]
    assert (case.run(target, tokens[some]) == together[some]).all()
    assert (case.run(target, tokens, extra_pages=40) == together).all()
    assert (case.run(target, tokens[some], extra_pages=40) == together[some]).all()


@by_rows(of_each_size(shape=SHAPES))
def test_a_prompt_is_the_same_whole_in_chunks_and_token_by_token(row: dict[str, Any]) -> None:
    target, (case, tokens, expected) = row["target"], prompt_of(row["shape"])
    whole = case.run(target, tokens)
    np.testing.assert_allclose(whole, expected, 0, 1e-5)
    for cuts in ([0, 1, 50, 51, 70, len(tokens)], [0, 3, 36, 69, 103, 110, len(tokens)]):
        parts = [case.run(target, tokens[start:stop]) for start, stop in pairwise(cuts)]
        assert (np.concatenate(parts) == whole).all(), cuts
    for i in (1, 2, 33, 34, len(tokens) - 3):
        assert (case.run(target, tokens[i : i + 1]) == whole[i]).all()


@by_rows(of_each_size(shape=SHAPES[:2]))
def test_what_lies_beyond_a_length_does_not_count(row: dict[str, Any]) -> None:
    target = row["target"]
    for case, tokens, _ in (case_of(row["shape"]), prompt_of(row["shape"])):
        clean = case.run(target, tokens)
        assert not np.isnan(clean).any()
        for garbage in (np.inf, 0.0, 60000.0):
            pool = case.pool.with_unwritten(garbage)
            assert (case.run(target, tokens, pool=pool) == clean).all()
            assert (case.run(target, tokens[:3], pool=pool) == clean[:3]).all()


@by_rows(of_each_size(shape=SHAPES[:2]))
@pytest.mark.parametrize(("part", "number"), [(VALUES, np.inf), (VALUES, np.nan), (KEYS, np.inf), (KEYS, np.nan)])
def test_a_row_that_is_not_finite_shows_for_tokens_that_see_it(row: dict[str, Any], part: Part, number: float) -> None:
    """In a tile some tokens see a row and others do not: weighing it with 0 would make a NaN of theirs."""
    target, case = row["target"], AttentionCase(*row["shape"], (100,))
    tokens = case.tokens([0] * 60, range(30, 90))
    clean = case.run(target, tokens)
    page, token = case.pages[0][3], 2  # row 50
    case.pool.items(part, page, LAYER)[:, token] = number
    y = case.run(target, tokens)
    assert (y[:21] == clean[:21]).all()
    assert not np.isfinite(y[21:]).any()
    assert not np.isfinite(case.run(target, tokens[30:31])).any()


@every_target
def test_huge_and_equal_scores_stay_finite(target: Target) -> None:
    case, tokens, _ = case_of(("f32", 1, 1, 8))
    for factor, tolerance in ((1e4, 1e-2), (0, 1e-5)):
        scaled = Tokens(tokens.q * np.float32(factor), tokens.rows, tokens.lengths)
        np.testing.assert_allclose(case.run(target, scaled), case.expected(scaled), 0, tolerance)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Lengths of sequences, and the rows and lengths of a step's tokens: runs of one row, with lengths in any order."""
    lengths = draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    rows: list[int] = []
    seen: list[int] = []
    for _ in range(draw(st.integers(1, 6))):
        row = draw(st.integers(0, len(lengths) - 1))
        count = draw(st.integers(1, min(2 * MAX_TILE, LIMITS.num_tokens - len(rows))))
        if draw(st.booleans()):
            start = draw(st.integers(1, lengths[row]))
            seen += [min(start + i, lengths[row]) for i in range(count)]
        else:
            seen += draw(st.lists(st.integers(1, lengths[row]), min_size=count, max_size=count))
        rows += [row] * count
        if len(rows) >= LIMITS.num_tokens:
            break
    return lengths, rows, seen


@some_shapes
@pytest.mark.parametrize("target", [*runnable()[:1], runnable()[-1]], ids=lambda target: target.name)
@given(step=steps(), cut=st.floats(0, 1))
@examples(40)
def test_any_step_is_softmax_and_the_same_bits_in_two_halves(
    target: Target, shape: tuple[KVDType, int, int, int], step: tuple[list[int], list[int], list[int]], cut: float
) -> None:
    lengths, rows, seen = step
    case = AttentionCase(*shape, lengths)
    tokens = case.tokens(rows, seen)
    y = case.run(target, tokens)
    np.testing.assert_allclose(y, case.expected(tokens), 0, 1e-5)
    halves = [part for part in (tokens[: int(cut * len(rows))], tokens[int(cut * len(rows)) :]) if len(part)]
    assert (np.concatenate([case.run(target, part) for part in halves]) == y).all()
