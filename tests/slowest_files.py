"""Which test files take the time of a run: lines for pytest's closing summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_MOST_FILES = 25
_LEAST_S = 60.0  # that a run takes, of all its workers, before anyone wants to know


def slowest_files(reports: Iterable[tuple[str, float]]) -> list[str]:
    """Return a line for each of the slowest files, slowest first; none for a short run.

    Args:
        reports: name and seconds of each phase of each test, fixtures included.

    >>> slowest_files([("tests/test_a.py::test_x", 40.0), ("tests/test_b.py::test_y", 30.0)])
    ['    40 s  57%  tests/test_a.py', '    30 s  43%  tests/test_b.py']
    >>> slowest_files([("tests/test_a.py::test_x", 1.0)])
    []
    """
    seconds = Counter[str]()
    for name, duration in reports:
        seconds[name.partition("::")[0]] += duration  # type: ignore[assignment]  # Counter adds floats, too
    total = sum(seconds.values())
    if total < _LEAST_S:
        return []
    return [f"{spent:6.0f} s {spent / total:4.0%}  {name}" for name, spent in seconds.most_common(_MOST_FILES)]
