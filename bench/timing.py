"""Times and repetitions: the best of many runs, the spread of few, ways in turn."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


def best_s(call: Callable[[], object], runs: int) -> float:
    """Return the seconds of the fastest of `runs` calls, after one that is not counted."""
    call()
    best = float("inf")
    for _ in range(runs):
        best = min(best, seconds_of(call))
    return best


@dataclass(frozen=True)
class Spread:
    """Results of repeated measurements."""

    minimum: float
    median: float
    maximum: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of at least one value."""
        ordered = sorted(values)
        return cls(ordered[0], statistics.median(ordered), ordered[-1], len(ordered))


def in_turns(ways: Mapping[str, Callable[[], Iterable[float]]], rounds: int) -> dict[str, list[float]]:
    """Return each way's values, one way after the other in every round; a first round warms up and is not counted."""
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        for name, measure in ways.items():
            values = measure()
            found[name] += values if number else ()
    return found


def seconds_of(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
