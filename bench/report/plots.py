"""Plots of results as SVG: what a plot shows, and matplotlib, which draws it.

Knows lines and bars, not what the figures mean. Equal results give equal files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..timing import Spread


@dataclass(frozen=True)
class Line:
    """Points that are joined; `style` and `color` are matplotlib's."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "o-"
    color: str | None = None


@dataclass(frozen=True)
class Panel:
    """Lines over one pair of axes, which begin at zero unless they are logarithmic."""

    x_label: str
    y_label: str
    lines: Sequence[Line]
    title: str = ""
    is_log_x: bool = False
    is_log_y: bool = False


@dataclass(frozen=True)
class LinePlot:
    """Panels side by side, in a file `name`; `alt` says what they show."""

    name: str
    alt: str
    panels: Sequence[Panel]
    width: float = 9  # inches
    height: float = 3

    def write(self, path: Path) -> None:
        """Draw it."""
        figure = _figure(self.width, self.height)
        for axes, panel in zip(figure.subplots(1, len(self.panels), squeeze=False)[0], self.panels, strict=True):
            for line in panel.lines:
                axes.plot(line.x, line.y, line.style, color=line.color, markersize=3, label=line.label)
            axes.set(xlabel=panel.x_label, ylabel=panel.y_label, title=panel.title)
            if panel.is_log_x:
                ticks = sorted({x for line in panel.lines for x in line.x})
                axes.set_xscale("log", base=2)
                axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
                axes.minorticks_off()
            else:
                axes.set_xlim(0, None)
            if panel.is_log_y:
                axes.set_yscale("log")
            else:
                axes.set_ylim(0, None)
            if any(line.label for line in panel.lines):
                axes.legend(fontsize=6)
        _save(figure, path)


@dataclass(frozen=True)
class BarPlot:
    """How many times as fast, in a file `name`: a group of bars for each name, a bar for each of its spreads.

    `wanted` is what is marked in black, of a group and a series.
    """

    name: str
    alt: str
    groups: Mapping[str, Mapping[str, Spread]]
    wanted: Mapping[tuple[str, str], float]

    def write(self, path: Path) -> None:
        """Draw it."""
        figure = _figure(8, 3.6)
        axes = figure.subplots()
        names, series = list(self.groups), list(next(iter(self.groups.values())))
        width = 0.75 / len(series)
        for number, one in enumerate(series):
            spreads = [self.groups[name][one] for name in names]
            errors = [[s.median - s.minimum for s in spreads], [s.maximum - s.median for s in spreads]]
            heights = [len(names) - place - number * width for place in range(len(names))]
            axes.barh(
                heights, [s.median for s in spreads], width, xerr=errors, label=f"times {one}", color=f"C{number}"
            )
            for name, height in zip(names, heights, strict=True):
                if (name, one) in self.wanted:
                    bar = self.wanted[name, one]
                    axes.vlines(bar, height - width / 2, height + width / 2, color="black", linewidth=2)
        axes.axvline(1, color="gray", linewidth=1)
        axes.set_yticks(range(len(names), 0, -1), names)
        axes.set_xlabel("times as fast (median, and all rounds); black: the bar")
        axes.legend(loc="lower right")
        _save(figure, path)


Plot = LinePlot | BarPlot


def _figure(width: float, height: float) -> Any:
    import matplotlib  # not at the top: tables need none

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "radixlm", "svg.fonttype": "none", "font.size": 9, "axes.grid": True}
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    """Without its day."""
    figure.savefig(path, metadata={"Date": None})
