"""Plots of results as SVG. Knows matplotlib and the JSON files; equal results give equal files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from .bars import PEERS, RATIO_BARS, ratios
from .figures import MEASURES

Json = dict[str, Any]
matplotlib.use("svg")
matplotlib.rcParams |= {"svg.hashsalt": "radixlm", "svg.fonttype": "none", "font.size": 9, "axes.grid": True}
_COLORS = dict(zip(PEERS, ("#d62728", "#ff9896", "#7f7f7f"), strict=True))


def peers(results: Json, path: Path) -> None:
    """How many times faster than each of the peers, beside the bars if there are any."""
    values = results["values"]
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    measured = list(MEASURES)
    offsets = dict(zip(PEERS, (0.26, 0.0, -0.26), strict=True))
    for peer, offset in offsets.items():
        spreads = [ratios(values, measure, (peer,)) for measure in measured]
        medians = [spread.median for spread in spreads]
        errors = [[s.median - s.minimum for s in spreads], [s.maximum - s.median for s in spreads]]
        heights = [len(measured) - i + offset for i in range(len(measured))]
        axes.barh(heights, medians, 0.25, xerr=errors, label=f"times {peer}", color=_COLORS[peer])
    for measure, against, wanted in RATIO_BARS if results["verdicts"] else ():
        heights = [len(measured) - measured.index(measure) + offsets[peer] for peer in against]
        axes.vlines(wanted, min(heights) - 0.13, max(heights) + 0.13, color="black", linewidth=2)
    axes.axvline(1, color="gray", linewidth=1)
    axes.set_yticks(range(len(measured), 0, -1), [measure.title for measure in measured])
    axes.set_xlabel("times as fast (median, and all rounds); black: the bar")
    axes.legend(loc="lower right")
    save(figure, path)


def growth(results: Json, path: Path) -> None:
    """Decode against context, prefill against prompt, step against batch."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    plots = (
        ("decode_s_by_context", "context, tokens", "a decoded token, ms"),
        ("prefill_s_by_prompt", "prompt, tokens", "prefill, ms"),
        ("step_s_by_batch", "streams", "a step, ms"),
    )
    for axes, (name, x_label, y_label) in zip(figure.subplots(1, 3), plots, strict=True):
        sizes = [point["size"] for point in results[name]]
        axes.plot(sizes, [1e3 * point["seconds"] for point in results[name]], "o-", markersize=3, label="measured")
        axes.plot(sizes, [1e3 * point["limit_s"] for point in results[name]], ":", color="gray", label="limit")
        axes.set(xlabel=x_label, ylabel=y_label, xlim=(0, None), ylim=(0, None))
        axes.legend()
    save(figure, path)


def model_sizes(results: Json, path: Path) -> None:
    """Compile time and memory, and decode time, against parameters."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    shapes = list(results["shapes"].values())
    parameters = [shape["num_parameters"] / 1e9 for shape in shapes]
    plots = (
        ("compile, s", [shape["compile_s"] for shape in shapes]),
        ("memory of the compile, MiB", [shape["compile_memory"] / 2**20 for shape in shapes]),
        ("a decoded token, ms", [1e3 / shape["decode_tokens_per_s"] for shape in shapes]),
    )
    for axes, (label, values) in zip(figure.subplots(1, 3), plots, strict=True):
        axes.plot(parameters, values, "o-", markersize=3)
        axes.set(xlabel="parameters, 10⁹", ylabel=label, xlim=(0, None), ylim=(0, None))
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a figure, without its day."""
    figure.savefig(path, metadata={"Date": None})
