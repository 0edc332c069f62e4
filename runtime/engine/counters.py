"""Count the engine's requests, tokens and failures, and record latencies.

The engine's thread counts; any thread can read, and is at most one observation late. Knows numbers, not metrics
endpoints.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from .completion import Usage

FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
"""Bucket bounds for the time between tokens."""
SLOW_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
"""Bucket bounds for the time to first token and to the end."""


@dataclass(frozen=True)
class LatencyCounts:
    """A snapshot of a latency histogram."""

    bounds_s: tuple[float, ...] = ()  # upper bound of each bucket except the last, which has none
    counts: tuple[int, ...] = (0,)  # observations in each bucket, not cumulative
    sum_s: float = 0.0

    @property
    def num_observations(self) -> int:
        """Total number of observations."""
        return sum(self.counts)

    @property
    def cumulative(self) -> list[int]:
        """Number of observations up to each bound, then the total."""
        return list(accumulate(self.counts))


@dataclass
class LatencyHistogram:
    """A histogram of latencies that grows by observations.

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
        """Return a snapshot of the observations so far."""
        return LatencyCounts(tuple(self.bounds_s), tuple(self._counts), self._sum_s)


@dataclass
class CoreCounters:
    """The counters of the engine since its start; prompt and cached tokens are those of finished requests."""

    num_steps: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_drafted_tokens: int = 0  # draft tokens that were verified
    num_accepted_tokens: int = 0  # of those, the accepted ones
    num_computed_tokens: int = 0  # tokens that went through the model: of prompts, and generated
    num_failed_steps: int = 0
    num_failed_steps_in_a_row: int = 0  # up to now
    last_failure: str | None = None  # the kind of error that the last failed step raised
    num_restarts: int = 0  # after the thread died
    restarted_after: str | None = None  # the kind of error that killed it, until a step computes something
    finished_by_reason: Counter[str] = field(default_factory=Counter)
    failed_by_type: Counter[str] = field(default_factory=Counter)
    cached_tokens_by_kind: Counter[str] = field(default_factory=Counter)
    disk_tokens_by_kind: Counter[str] = field(default_factory=Counter)  # of those, loaded from disk for the request
    in_queue: LatencyHistogram = field(default_factory=lambda: LatencyHistogram(SLOW_S))
    to_first_token: LatencyHistogram = field(default_factory=lambda: LatencyHistogram(SLOW_S))
    between_tokens: LatencyHistogram = field(default_factory=lambda: LatencyHistogram(FAST_S))
    to_end: LatencyHistogram = field(default_factory=lambda: LatencyHistogram(SLOW_S))

    @property
    def progress(self) -> int:
        """A number that rises with every computed token and every request that ends, in whatever way."""
        return self.num_computed_tokens + self.num_finished + self.num_failed

    def count_step(self, num_tokens: int) -> None:
        """Count a step of `num_tokens` tokens that was computed and committed."""
        self.num_steps += 1
        if num_tokens:
            self.num_computed_tokens += num_tokens
            self.num_failed_steps_in_a_row, self.restarted_after = 0, None

    def count_draft(self, num_drafted: int, num_right: int, num_kept: int) -> None:
        """Count a verified draft.

        Only tokens whose KV is kept count as computed. A draft token that ends a reply is accepted, without its KV.
        """
        self.num_computed_tokens += num_kept
        self.num_drafted_tokens += num_drafted
        self.num_accepted_tokens += num_right

    def count_failed_step(self, error: Exception) -> None:
        """Count a step that raised."""
        self.num_failed_steps += 1
        self.num_failed_steps_in_a_row += 1
        self.last_failure = type(error).__name__

    def count_restart(self, cause: BaseException) -> None:
        """Count a restart: the thread died, and everything starts over."""
        self.num_restarts += 1
        self.restarted_after = type(cause).__name__

    def count_token(self, now: float, arrived_at: float, before: float | None) -> None:
        """Count a generated token, the first one if there is none `before`; times in seconds on the core's clock."""
        self.num_generated_tokens += 1
        if before is None:
            self.to_first_token.observe(now - arrived_at)
        else:
            self.between_tokens.observe(now - before)

    def count_finished(self, usage: Usage, reason: str, total_s: float, *, was_admitted: bool) -> None:
        """Count a request that completed; one that was never admitted counts no prompt tokens."""
        self.num_finished += 1
        self.finished_by_reason[reason] += 1
        if not was_admitted:
            return
        self.to_end.observe(total_s)
        self.num_prompt_tokens += usage.prompt_tokens
        self.num_cached_tokens += usage.cached_tokens
        self.cached_tokens_by_kind.update(usage.tokens_by_kind)
        self.disk_tokens_by_kind.update(usage.disk_tokens_by_kind)

    def count_failed(self, error: Exception) -> None:
        """Count a request that ended with an error."""
        self.num_failed += 1
        self.failed_by_type[type(error).__name__] += 1
