"""Plots show what the files hold: a line for each policy, order and way, and the same file for the same results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="plots need requirements-bench.lock")
from bench import store_plots


def drawn(path: Path, plot: Any, results: dict[str, Any]) -> str:
    plot(results, path)
    first = path.read_text()
    plot(results, path)
    assert path.read_text() == first
    return first


def test_amplification_has_a_line_for_each_order_and_share(tmp_path: Path) -> None:
    rows = [
        {"policy": policy, "budget": budget, "chunk_size": size, "text": 3.0, "ranked": 1.0, "quarter": 2.0}
        for policy in ("stored", "hybrid")
        for budget in (0.1, 0.25)
        for size in (16, 32)
    ]
    page = drawn(tmp_path / "a.svg", store_plots.amplification, {"rows": rows})
    assert page.count("10%, ranked") == page.count("25%, in the order of the text") == 2
    assert page.count("25%, as it ships") == 1  # where tokens are picked


def test_quality_has_a_line_for_each_policy_and_facts_a_second_panel(tmp_path: Path) -> None:
    rows = [
        {"policy": policy, "budget": budget, "kl": 0.5, "found": 0.7, "found_by_depth": {}}
        for policy in ("hybrid", "oracle")
        for budget in (0.1, 0.5)
    ]
    page = drawn(tmp_path / "q.svg", store_plots.quality, {"rows": rows})
    assert page.count(">hybrid<") == page.count(">oracle<") == 1 and "facts" not in page
    facts = [{**row, "found_by_depth": {"0.5": 1.0}} for row in rows]
    assert "facts that are found" in drawn(tmp_path / "n.svg", store_plots.quality, {"rows": facts})


def test_first_tokens_have_a_line_for_each_way(tmp_path: Path) -> None:
    names = ("recompute", "25 load", "25 planner", "real load", "real planner")
    rounds = [{name: {"seconds": 2.0} for name in names}]
    page = drawn(tmp_path / "r.svg", store_plots.first_tokens, {"num_tokens": 8000, "rounds": rounds})
    for way in ("computed", "loaded", "as planned", "the real disk, loaded"):
        assert f">{way}<" in page
