"""Attention with caps, sinks, windows and chunks, against softmax in float64; rows that no token sees are NaN.

Whatever the tokens of a step are, each one's bits are what it gets alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.attention_units import MAX_TILE
from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVDType

from .attention_case import LAYER, LIMITS, AttentionCase, Features, Tokens
from .harness import by_rows, examples, of_each_size, runnable
from .pool import PARTS

Shape = tuple[KVDType, int, int, int]  # query heads, KV heads, head_dim
SHAPES: list[Shape] = [("f16", 6, 2, 64), ("f32", 1, 1, 8), ("f16", 11, 1, 40)]  # the last in two parts of heads
FEATURES = {
    "scale": Features(scale=0.2),
    "soft cap": Features(soft_cap=5.0),
    "sinks": Features(has_sinks=True),
    "window": Features(window=40),
    "window of one": Features(window=1),
    "wide window": Features(window=200),
    "chunks": Features(chunk=48),
    "all": Features(scale=0.2, soft_cap=9.0, has_sinks=True, window=130),
}
SOME = ("window", "chunks", "all")
NATIVE = runnable()[-1]
LENGTHS = (300, 200, 150, 531)
ROWS = [1, *[0] * 140, 2, 2, 3]
SEEN = [200, *range(161, 301), 150, 33, 531]
every_feature = pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
some_features = pytest.mark.parametrize("features", [FEATURES[name] for name in SOME], ids=SOME)


def check(target: Target, case: AttentionCase, tokens: Tokens) -> np.ndarray:
    """Outputs and masses are those of softmax; returns the outputs."""
    expected = case.expected_mass(tokens)
    mass = np.zeros(expected.shape, np.float32)
    y = case.run(target, tokens, mass=mass)
    np.testing.assert_allclose(y, case.expected(tokens), 0, 1e-5)
    group = case.num_heads // case.layout.num_kv_heads
    np.testing.assert_allclose(mass, expected, 1e-4, 1e-5 * group)
    assert (mass[expected == 0] == 0).all()
    return y


@by_rows(of_each_size(names=[("window", "chunks"), ("all",)]))
def test_outputs_are_those_of_softmax_in_every_batch(row: dict[str, Any]) -> None:
    """Windows and chunks are of one kernel, which takes the first row that each token sees."""
    for name in row["names"]:
        check_batches(row["target"], FEATURES[name])


@pytest.mark.parametrize("features", [FEATURES[name] for name in FEATURES if name not in SOME], ids=str)
def test_every_other_feature_is_that_of_softmax_in_every_batch(features: Features) -> None:
    check_batches(NATIVE, features)


def check_batches(target: Target, features: Features) -> None:
    """A prompt's tokens together and alone."""
    case = AttentionCase(*SHAPES[0], LENGTHS, features)
    tokens = case.tokens(ROWS, SEEN)
    together = check(target, case, tokens)
    for few in ([0], [60], [141, 142], [143], [1, 2, 3, 143, 0]):
        assert (check(target, case, tokens[few]) == together[few]).all()
    assert (case.run(target, tokens, extra_pages=40) == together).all()
    parts = [case.run(target, tokens[start:stop]) for start, stop in ((0, 51), (51, 60), (60, len(tokens)))]
    assert (np.concatenate(parts) == together).all()


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
@some_features
def test_every_feature_is_that_of_softmax_for_every_shape(shape: Shape, features: Features) -> None:
    case = AttentionCase(*shape, LENGTHS, features)
    tokens = case.tokens(ROWS, SEEN)
    together = check(NATIVE, case, tokens)
    for few in ([143], [30, 142]):
        assert (check(NATIVE, case, tokens[few]) == together[few]).all()


@pytest.mark.parametrize("target", [*runnable()[:1], NATIVE], ids=lambda target: target.name)
def test_heads_as_wide_as_gemma_4s_are_those_of_softmax(target: Target) -> None:
    case = AttentionCase("f16", 8, 1, 512, LENGTHS, Features(scale=0.02, window=130))
    tokens = case.tokens(ROWS, SEEN)
    together = check(target, case, tokens)
    for few in ([143], [30, 142]):
        assert (check(target, case, tokens[few]) == together[few]).all()


@every_feature
def test_every_feature_shows(features: Features) -> None:
    """What is expected differs by more than the tests allow, so that a kernel without the feature would fail."""
    case = AttentionCase(*SHAPES[0], LENGTHS, features)
    tokens = case.tokens([3], [531])
    expected = case.expected(tokens)
    for name in ("scale", "soft_cap", "has_sinks", "window", "chunk"):
        if getattr(features, name):
            case.features = replace(features, **{name: None})
            assert np.abs(case.expected(tokens) - expected).max() > 1e-3, name


@pytest.mark.parametrize("target", [*runnable()[:1], NATIVE], ids=lambda target: target.name)
@pytest.mark.parametrize("shape", [SHAPES[0], ("k12v8", 6, 2, 64)], ids=str)
@pytest.mark.parametrize("features", [Features(window=20), Features(chunk=24)], ids=str)
def test_rows_before_the_first_that_is_seen_do_not_count(target: Target, shape: Shape, features: Features) -> None:
    """In a tile some tokens see a row and others no longer do: weighing it with 0 would make a NaN of theirs."""
    case = AttentionCase(*shape, (100,), features)
    tokens = case.tokens([0] * 70, range(30, 100))
    clean = case.run(target, tokens)
    row = 50
    for part in PARTS:
        page = case.pages[0][row // PAGE_SIZE]
        case.pool.items(part, page, LAYER)[:, row % PAGE_SIZE] = 0 if shape[0] == "k12v8" else np.nan
        if shape[0] == "k12v8":
            case.pool.scales(part, page, LAYER)[:, row % PAGE_SIZE] = np.nan
    sees = np.array([features.start(length) <= row < length for length in tokens.lengths])
    assert 10 < sees.sum() < 30
    y = case.run(target, tokens)
    assert (y[~sees] == clean[~sees]).all()
    assert np.isnan(y[sees]).all()
    for m in (0, 22, 40, 45, 60):
        assert np.array_equal(case.run(target, tokens[m : m + 1])[0], y[m], equal_nan=True)


def test_a_sink_above_all_scores_takes_their_weight() -> None:
    case = AttentionCase("f32", 2, 1, 8, (20,), Features(has_sinks=True))
    case.sinks[:] = [80, -80]
    tokens = case.tokens([0], [20])
    y = check(NATIVE, case, tokens)
    assert np.abs(y[0, 0]).max() < 1e-20 < np.abs(y[0, 1]).max()


def test_only_the_pages_of_the_window_are_read() -> None:
    case = AttentionCase("f32", 1, 1, 8, (700,), Features(window=130))
    tokens = case.tokens([0], [700])
    clean = case.run(NATIVE, tokens)
    table = case.pages[0].copy()
    case.pages[0][: 570 // PAGE_SIZE] = [1 << 24] * (570 // PAGE_SIZE)  # far outside of the pool
    assert (case.run(NATIVE, tokens) == clean).all()
    assert table[570 // PAGE_SIZE :] == case.pages[0][570 // PAGE_SIZE :]


@st.composite
def steps(draw: st.DrawFn) -> tuple[Features, list[int], list[int], list[int]]:
    """Features, lengths of sequences, and the rows and lengths of a step's tokens: runs of one row."""
    has_both = draw(st.booleans())
    features = Features(
        soft_cap=6.0 if has_both else None,
        has_sinks=has_both,
        **draw(st.sampled_from([{"window": 16}, {"window": 33}, {"window": 129}, {"chunk": 16}, {"chunk": 100}])),
    )
    lengths = draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    rows: list[int] = []
    seen: list[int] = []
    for _ in range(draw(st.integers(1, 6))):
        row = draw(st.integers(0, len(lengths) - 1))
        count = draw(st.integers(1, 2 * MAX_TILE))
        start = draw(st.integers(1, lengths[row]))
        seen += [min(start + i, lengths[row]) for i in range(count)]
        rows += [row] * count
    return features, lengths, rows[: LIMITS.num_tokens], seen[: LIMITS.num_tokens]


@pytest.mark.parametrize("shape", [SHAPES[0], ("f16", 4, 2, 8)], ids=str)
@given(step=steps(), cut=st.floats(0, 1))
@examples(30)
def test_any_step_is_softmax_and_the_same_bits_in_two_halves(
    shape: Shape, step: tuple[Features, list[int], list[int], list[int]], cut: float
) -> None:
    features, lengths, rows, seen = step
    case = AttentionCase(*shape, lengths, features)
    tokens = case.tokens(rows, seen)
    y = check(NATIVE, case, tokens)
    halves = [part for part in (tokens[: int(cut * len(rows))], tokens[int(cut * len(rows)) :]) if len(part)]
    assert (np.concatenate([case.run(NATIVE, part) for part in halves]) == y).all()
