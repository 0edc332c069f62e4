"""How often and how long: the best of many runs, and what lies between the best and the worst of few."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass


def best_s(call: Callable[[], object], runs: int) -> float:
    """Seconds of the fastest of `runs` calls, after one that is not counted."""
    call()
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


@dataclass(frozen=True)
class Spread:
    """What repeated measurements gave."""

    minimum: float
    median: float
    maximum: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of at least one value."""
        ordered = sorted(values)
        return cls(ordered[0], statistics.median(ordered), ordered[-1], len(ordered))
