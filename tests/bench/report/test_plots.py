"""Plots show what the files hold: a line for each policy, order and way, and the same file for the same results."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from bench.report import partial, store
from bench.report.plots import LinePlot

SIZES = {"num_prefixes": 2, "shortest_prefix": 320, "longest_prefix": 640}


def plot_of(section: Iterable[object]) -> LinePlot:
    [plot] = [part for part in section if isinstance(part, LinePlot)]
    return plot


def labels(plot: LinePlot) -> list[list[str]]:
    return [[line.label for line in panel.lines] for panel in plot.panels]


def drawn(plot: LinePlot, path: Path) -> str:
    pytest.importorskip("matplotlib", reason="plots need requirements-bench.lock")
    plot.write(path)
    first = path.read_text()
    plot.write(path)
    assert path.read_text() == first
    return first


def test_amplification_has_a_line_for_each_order_and_share(tmp_path: Path) -> None:
    orders = {"text": 3.0, "ranked": 1.0, "quarter": 2.0}
    counts = {f"{order}_{what}": 1.0 for order in orders for what in ("reads", "chunks", "no_probe", "no_order")}
    rows: list[dict[str, Any]] = [
        {"policy": policy, "budget": budget, "chunk_size": size, "space": 2.0, **orders, **counts}
        for policy in ("stored", "hybrid")
        for budget in (0.1, 0.25)
        for size in (16, 32)
    ]
    plot = plot_of(partial.amplification({**SIZES, "rows": rows, "workloads": {}}))
    stored, hybrid = labels(plot)
    assert len(stored) == 2 * 2 and len(hybrid) == 2 * 3 and "25%, as it ships" in hybrid
    page = drawn(plot, tmp_path / "a.svg")
    assert page.count("10%, ranked") == page.count("25%, in the order of the text") == 2


def test_quality_has_a_line_for_each_policy_and_facts_a_second_panel(tmp_path: Path) -> None:
    means = dict.fromkeys(
        ("kl", "kl_error", "found", "answered", "full_answered", "full_found", "agreement", "dropped"), 0.5
    )
    rows: list[dict[str, Any]] = [
        {"policy": policy, "budget": budget, "num_queries": 3, "perplexity": 9.0, "full_perplexity": 8.0, **means}
        for policy in ("hybrid", "oracle")
        for budget in (0.1, 0.5)
    ]
    plot = plot_of(partial.quality({**SIZES, "workload": "nq", "rows": rows}))
    assert labels(plot) == [["hybrid", "oracle"]]
    page = drawn(plot, tmp_path / "q.svg")
    assert page.count(">hybrid<") == page.count(">oracle<") == 1 and "facts" not in page
    facts = [{**row, "found_by_depth": {"0.5": 1.0}} for row in rows]
    assert [panel.y_label for panel in plot_of(partial.needle({**SIZES, "rows": facts})).panels][1:] == [
        "facts that are found"
    ]


def test_first_tokens_have_a_line_for_each_way(tmp_path: Path) -> None:
    names = ("recompute", "25 load", "25 planner", "real load", "real planner")
    rounds = [{name: {"seconds": 2.0, "disk_tokens": 0} for name in names}]
    page = drawn(plot_of(store.restart({"num_tokens": 8000, "rounds": rounds})), tmp_path / "r.svg")
    for way in ("computed", "loaded", "as planned", "the real disk, loaded"):
        assert f">{way}<" in page
