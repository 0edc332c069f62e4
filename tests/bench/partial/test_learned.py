"""What stays of an order is counted in tokens of the prefix, and orders are held against the one before."""

from __future__ import annotations

import numpy as np
import pytest

from bench.partial.learned import Stored, kept_share, summary

TOKENS = 160
WAYS = ("nothing", "a restart", "a restart that forgets")


def run(*tokens: int) -> Stored:
    return Stored(np.array(tokens)[None, None], TOKENS)


def test_the_first_eighth_is_of_the_prefix_not_of_the_ranks_that_a_run_has() -> None:
    before = run(*range(TOKENS // 4))
    half = [*range(10), *range(100, 110), *range(10, 30)]  # of 40 ranks the first 20 count, and 10 of these stay
    assert kept_share(before, before) == 1
    assert kept_share(before, run(*half)) == pytest.approx(0.5)
    assert kept_share(before, run(*reversed(range(TOKENS // 8)), *range(120, 140))) == 1, "in any order"


def test_orders_are_held_against_the_one_before_question_by_question() -> None:
    kl = {
        "before": [0.2, 0.4],
        "before nothing": [0.5, 0.5],
        "nothing": [0.5, 0.6],
        "a restart": [0.3, 0.5],
        "a restart that forgets": [0.9, 0.9],
    }
    measured = [{"stays": dict.fromkeys(WAYS, share), "kl": {**kl, "first+recent": [1.0, 1.0]}} for share in (0.9, 1)]
    rows = {row["way"]: row for row in summary(measured)}
    assert (rows["a restart"]["more"], rows["a restart"]["more_error"]) == (pytest.approx(0.1), pytest.approx(0))
    assert (rows["a restart"]["stays"], rows["a restart"]["least"]) == (pytest.approx(0.95), 0.9)
    assert rows["nothing"]["more"] == pytest.approx(0.05), "which is another engine's"
    assert "stays" not in rows["first+recent"] and rows["first+recent"]["num_queries"] == 4


def test_what_was_not_asked_for_loses_nothing() -> None:
    rows = list(summary([{"stays": dict.fromkeys(WAYS, 0.5), "kl": {}}]))
    assert [row.get("stays") for row in rows] == [None, 0.5, None, 0.5, 0.5, None]
    assert not any("kl" in row for row in rows)
