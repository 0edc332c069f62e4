"""Perplexities and their differences, against sums written out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.perplexity import compare, difference
from bench.windows import cut

WINDOWS = cut(list(range(21)), 8)  # 20 tokens counted: 7, 4, 4, 4 and 1


def test_perplexity_of_even_odds_is_their_number() -> None:
    (row,) = compare("text", WINDOWS, {"fair": np.full(20, math.log(1 / 6))}, against=())
    assert (row.tokens, row.against) == (20, {})
    assert row.perplexity == pytest.approx(6)


def test_the_ratio_is_that_of_the_perplexities() -> None:
    rng = np.random.default_rng(0)
    results = {"one": -rng.exponential(size=20), "other": -rng.exponential(size=20)}
    one, other = compare("text", WINDOWS, results, against=("other",))
    assert one.against["other"].ratio == pytest.approx(one.perplexity / other.perplexity)
    assert other.against == {}


def test_a_difference_that_is_everywhere_the_same_is_certain() -> None:
    ours = np.linspace(-3, -1, 20)
    found = difference(ours, ours + 0.25, WINDOWS)
    assert found.nats == pytest.approx(0.25)
    assert found.standard_error == pytest.approx(0, abs=1e-12)


def test_the_standard_error_is_the_spread_over_repetitions() -> None:
    """Differences that are equal within a window: only the number of windows makes the mean certain."""
    windows = cut(list(range(8 * 64)), 8)[1:-1]  # 4 tokens each
    rng = np.random.default_rng(1)
    found = [
        difference(np.zeros(4 * len(windows)), np.repeat(rng.standard_normal(len(windows)), 4), windows)
        for _ in range(400)
    ]
    spread = float(np.std([one.nats for one in found]))
    assert np.mean([one.standard_error for one in found]) == pytest.approx(spread, rel=0.1)
