"""Plots of what the store reads, how soon a first token comes from it, and what a part of a prefix loses, as SVG.

Knows matplotlib, by `plots.py`, and what the JSON files hold; equal results give equal files.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from .plots import save
from .tables import Json

_ORDERS = {"text": "in the order of the text", "ranked": "ranked", "quarter": "as it ships"}
_STYLES = {"random": ":", "first+recent": ":", "prefix pass": "--", "history": "--", "oracle": ":"}


def amplification(results: Json, path: Path) -> None:
    """Bytes read for each byte attended to, against the size of chunks, for both policies."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = (("stored", "chosen by stored order"), ("hybrid", "half picked by a probe, its keys read, too"))
    for axes, (policy, title) in zip(figure.subplots(1, 2), panels, strict=True):
        rows = [row for row in results["rows"] if row["policy"] == policy]
        for color, budget in enumerate(sorted({row["budget"] for row in rows})):
            for order, line in zip(_ORDERS, (":", "-", "--"), strict=True):
                mine = [row for row in rows if row["budget"] == budget and order in row]
                if policy == "stored" and order == "quarter":
                    continue  # the same as ranked, as far as it goes
                label = f"{budget:.0%}, {_ORDERS[order]}"
                sizes, ratios = [row["chunk_size"] for row in mine], [row[order] for row in mine]
                axes.plot(sizes, ratios, f"o{line}", color=f"C{color}", markersize=3, label=label)
        _log2(axes, sorted({row["chunk_size"] for row in rows}))
        axes.set(xlabel="tokens of a chunk", ylabel="bytes read over bytes attended to", ylim=(0, None), title=title)
        axes.legend(fontsize=6)
    save(figure, path)


def first_tokens(results: Json, path: Path) -> None:
    """Seconds to the first token against the speed of the disk."""
    rounds = results["rounds"]
    disks = [name.split()[0] for name in rounds[0] if name.endswith(" load")]
    throttled = [disk for disk in disks if disk != "real"]
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    computed = median(each["recompute"]["seconds"] for each in rounds)
    axes.axhline(computed, color="gray", linestyle=":", label="computed")
    for way, label, marker in (("load", "loaded", "s--"), ("planner", "as planned", "o-")):
        seconds = {disk: median(each[f"{disk} {way}"]["seconds"] for each in rounds) for disk in disks}
        speeds = [float(disk) for disk in throttled]
        axes.plot(speeds, [seconds[disk] for disk in throttled], marker, markersize=4, label=label)
        if "real" in seconds:
            axes.axhline(
                seconds["real"], color="C2", linestyle=marker[1:], linewidth=1, label=f"the real disk, {label}"
            )
    axes.set(xscale="log", yscale="log", xlabel="disk, MB/s", ylabel=f"first token of {results['num_tokens']:,}, s")
    axes.set_xticks([float(disk) for disk in throttled], throttled)
    axes.minorticks_off()
    axes.legend(fontsize=7)
    save(figure, path)


def quality(results: Json, path: Path) -> None:
    """KL against the share of rows for each policy; of facts also how many are found."""
    has_answers = bool(results["rows"][0]["found_by_depth"])
    figure = Figure(figsize=(9 if has_answers else 5, 3.2), layout="constrained")
    panels = [("kl", "KL(full || partial), nats")] + [("found", "facts that are found")] * has_answers
    policies = list(dict.fromkeys(row["policy"] for row in results["rows"]))
    for axes, (name, label) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for policy in policies:
            mine = [row for row in results["rows"] if row["policy"] == policy]
            line = _STYLES.get(policy, "-")
            axes.plot(
                [100 * row["budget"] for row in mine],
                [row[name] for row in mine],
                f"o{line}",
                markersize=3,
                label=policy,
            )
        axes.set(xlabel="rows that are read, %", ylabel=label, yscale="log" if name == "kl" else "linear")
        _log2(axes, sorted({100 * row["budget"] for row in results["rows"]}))
    axes.legend(fontsize=6)
    save(figure, path)


def _log2(axes: Any, ticks: list[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
