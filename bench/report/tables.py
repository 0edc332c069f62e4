"""Markdown tables of results: the only module that lays out a table or formats a number.

Knows rows, columns and units; not what the figures mean.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..timing import Spread

Json = dict[str, Any]
Cell = str | Callable[[Json], str]
"""A format string over a row's fields, or a function of the row."""

UNITS = {"ms": 1e3, "us": 1e6, "MB": 1e-6, "M": 1e-6, "MiB": 2.0**-20}


def table(columns: Mapping[str, Cell], rows: Iterable[Json]) -> str:
    """Return a line of cells for each of `rows`, under the names of `columns`; all columns but the first are numbers.

    A format may begin with one of `UNITS`, to which the number is converted; `auto` keeps three or four digits.

    >>> print(table({"what": "{name}", "ms": "{seconds:ms .1f}"}, [{"name": "a", "seconds": 0.25}]))
    | what | ms |
    |---|--:|
    | a | 250.0 |
    """
    cells = [[format_cell(cell, row) for cell in columns.values()] for row in rows]
    lines = [f"| {' | '.join(line)} |" for line in (list(columns), *cells)]
    return "\n".join([lines[0], "|" + "---|" + "--:|" * (len(columns) - 1), *lines[1:]])


def format_cell(cell: Cell, row: Json) -> str:
    """Return one cell of a row."""
    return _FORMATTER.vformat(cell, (), row) if isinstance(cell, str) else cell(row)


def each(names: Iterable[str], field: str, spec: str = "") -> dict[str, Cell]:
    """Return a column for each name, from the list `field` of a row."""
    return {name: f"{{{field}[{number}]{spec}}}" for number, name in enumerate(names)}


def spread(values: Iterable[float]) -> str:
    """Return the median, the minimum and the maximum."""
    found = Spread.of(values)
    return f"{auto(found.median)} ({auto(found.minimum)}-{auto(found.maximum)})"


def auto(value: float) -> str:
    """Format with three or four digits.

    >>> auto(1234.5), auto(12.34), auto(1.234)
    ('1,234', '12.3', '1.23')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def met(is_met: bool) -> str:
    """Return whether a requirement is met; a missed one is bold."""
    return "met" if is_met else "**missed**"


def origin(results: Json) -> str:
    """Return the line under a table: command, commit and date of its results, the machine, and earlier runs."""
    made = results["origin"]
    tvm = f"apache-tvm {made['apache_tvm']}"
    line = f"`{made['command']}`, commit {made['commit']}, {made['date']}; {made['machine']}; {tvm}."
    earlier = [f"{run['commit']} ({run['date']})" for run in results.get("earlier", ())]
    return f"{line} Rounds and rows before it: {', '.join(earlier)}." if earlier else line


def origins_before(results: Json) -> list[Json]:
    """Return the origins of all runs that these results, to which another run is added, are of."""
    return [*results.get("earlier", ()), *([results["origin"]] if "origin" in results else ())]


class _Formatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        """Format a number by a spec that may begin with a unit, or be `auto`; see `table`."""
        unit, _, rest = format_spec.partition(" ")
        if unit in UNITS:
            value, format_spec = value * UNITS[unit], rest
        return auto(value) if format_spec == "auto" else str(super().format_field(value, format_spec))

    def check_unused_args(self, used_args: set[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Accept unused fields: a row has more of them than a cell shows."""


_FORMATTER = _Formatter()
