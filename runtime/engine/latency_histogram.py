"""Count how long something took, in buckets, as Prometheus wants to have it.

Knows seconds, not what they were spent on. One thread observes, any thread may read: what it reads is at most one
observation behind.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
"""From token to token."""
SLOW_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
"""To the first token, and to the end."""


@dataclass(frozen=True)
class LatencyCounts:
    """A histogram at one moment."""

    bounds_s: tuple[float, ...] = ()  # each bucket's upper bound, but for the last one's, which has none
    counts: tuple[int, ...] = (0,)  # of the observations in each bucket alone
    sum_s: float = 0.0

    @property
    def num_observations(self) -> int:
        """All that were made."""
        return sum(self.counts)

    @property
    def cumulative(self) -> list[int]:
        """Observations up to each bound, and all."""
        return list(accumulate(self.counts))


@dataclass
class LatencyHistogram:
    """Observations in buckets.

    >>> histogram = LatencyHistogram((0.1, 1.0))
    >>> for seconds in (0.05, 0.1, 0.5, 7.0):
    ...     histogram.observe(seconds)
    >>> histogram.read().counts, histogram.read().cumulative
    ((2, 1, 1), [2, 3, 4])
    """

    bounds_s: Sequence[float]
    _counts: list[int] = field(init=False)
    _sum_s: float = 0.0

    def __post_init__(self) -> None:
        self._counts = [0] * (len(self.bounds_s) + 1)

    def observe(self, seconds: float) -> None:
        """Add one observation."""
        self._counts[bisect_left(self.bounds_s, seconds)] += 1
        self._sum_s += seconds

    def read(self) -> LatencyCounts:
        """What was observed so far."""
        return LatencyCounts(tuple(self.bounds_s), tuple(self._counts), self._sum_s)
