"""Decide whether the disk or the model has a prefix sooner: measured bytes a second against measured prefill.

Knows rates and sizes, not pages or threads. A hit that is slower than a miss is no hit (SGLang issue 26305).

Computing costs more for each token the further back it looks, loading costs the same for all. So of a range that may be
loaded from its beginning, some of it is never better than the better of nothing and all. Both at once may be: the
beginning is computed while the end is loaded, until they meet.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from ..artifact.manifest import PAGE_SIZE

_KEPT = 0.9  # of what was measured before, with each new measurement
_MIN_COMPUTED_TOKENS = 32  # of a step that measures prefill: fewer are decode, which costs far more a token
_MIN_GAIN = 1.15  # computing must take so much longer than loading: it is measured by a tenth too slow, and scatters
_MIN_SPLIT_GAIN = 1.15  # what both at once must be quicker than the better of the two: they share processor and memory
_MAX_PART = 0.9  # of what all of a prefix takes, for a part of it to be worth what it loses
_SPLIT_S = 0.04  # that both at once take longer than that: 900 and 2,500 tokens, at 25 to 100 MB/s (bench/LOG.md)
_SLACK_S = 0.05  # for the threads to get their turn
_PATIENCE = 2.0  # times what was planned, before a load is late
_UNKNOWN_S = 1.0  # to wait for a load of which nothing is known


@dataclass(frozen=True)
class LoadPlan:
    """What a load should take in seconds, and after how many it is too late."""

    expected_s: float | None  # None: the disk was never measured
    deadline_s: float


@dataclass(frozen=True)
class SplitPlan:
    """The tokens before `meet` are computed and those from there on loaded, both in about `expected_s` seconds."""

    meet: int
    expected_s: float


ComputeSums = tuple[float, float, float, float, float]
"""What a LinearRate knows: the weight of all that was observed, and its weighted sums of x, y, x * x and x * y."""


@dataclass
class LinearRate:
    """Seconds a token as `base + slope * position`, fitted to what was measured lately."""

    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    @classmethod
    def of(cls, sums: ComputeSums) -> LinearRate:
        """The rate that had these `sums`."""
        return cls(*sums)

    @property
    def sums(self) -> ComputeSums:
        """All that it knows."""
        return self._weight, self._x, self._y, self._xx, self._xy

    def observe(self, position: float, seconds: float, weight: float) -> None:
        """Note that tokens at this mean position took so many seconds each."""
        for name, value in (("_weight", 1.0), ("_x", position), ("_y", seconds)):
            setattr(self, name, _KEPT * getattr(self, name) + weight * value)
        self._xx = _KEPT * self._xx + weight * position * position
        self._xy = _KEPT * self._xy + weight * position * seconds

    def seconds(self, position: float) -> float | None:
        """Of one token at a position; None before the first measurement."""
        if self._weight == 0.0:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        slope = 0.0
        if spread > PAGE_SIZE * PAGE_SIZE:  # all at one place tell nothing of others
            slope = max(0.0, (self._xy / self._weight - mean_x * mean_y) / spread)
        return max(mean_y + slope * (position - mean_x), mean_y / 4)


@dataclass
class LoadPlanner:
    """What disk and model were measured to do, and what follows for a load; in seconds, bytes and tokens.

    >>> planner = LoadPlanner()
    >>> planner.observe_read(num_bytes=50_000_000, seconds=1.0)
    >>> planner.observe_compute(num_tokens=500, position=250, seconds=0.25)
    >>> planner.plan(0, 1000, num_bytes=10_000_000)  # loading 0.2 s, computing 0.5 s
    LoadPlan(expected_s=0.2, deadline_s=0.45)
    >>> planner.plan(0, 1000, num_bytes=40_000_000) is None  # 0.8 s
    True
    """

    disk_bytes_per_s: float | None = None
    _compute: LinearRate = field(default_factory=LinearRate)
    _part_extra_s: float = 0.03  # that a part takes beyond what its bytes and its query do

    def observe_read(self, *, num_bytes: int, seconds: float) -> None:
        """The disk took so long."""
        rate = num_bytes / max(seconds, 1e-9)
        before = self.disk_bytes_per_s
        # seconds a byte are averaged, not bytes a second: what counts is how long it takes
        self.disk_bytes_per_s = rate if before is None else 2 / (1 / rate + 1 / before)

    def observe_compute(self, *, num_tokens: int, position: float, seconds: float) -> None:
        """A step of so many tokens, at this mean position, took so long; steps of few tokens tell nothing."""
        if seconds > 0 and num_tokens >= _MIN_COMPUTED_TOKENS:
            self._compute.observe(position, seconds / num_tokens, float(num_tokens))

    @property
    def compute_sums(self) -> ComputeSums | None:
        """All that is known of computing, for `begin_with`; None: it was never measured."""
        return self._compute.sums if self._compute.seconds(0.0) is not None else None

    def begin_with(self, sums: ComputeSums) -> None:
        """Take what was measured before for what is known of computing; new measurements count more and more."""
        self._compute = LinearRate.of(sums)

    def compute_s(self, start: int, stop: int) -> float | None:
        """How long the model takes for the tokens `[start, stop)`; None: it was never measured."""
        seconds = self._compute.seconds((start + stop) / 2)
        return None if seconds is None else seconds * (stop - start)

    def plan(self, start: int, stop: int, *, num_bytes: int, queued_bytes: int = 0) -> LoadPlan | None:
        """Whether to load the tokens `[start, stop)`, which are so many bytes behind those that are queued.

        None: computing them is as quick. What was never measured is taken for better than it may be, within limits.
        """
        compute_s = self.compute_s(start, stop)
        if self.disk_bytes_per_s is None:
            return LoadPlan(None, _UNKNOWN_S if compute_s is None else compute_s / 2 + _SLACK_S)
        expected_s = (num_bytes + queued_bytes) / self.disk_bytes_per_s
        late_s = _PATIENCE * expected_s + _SLACK_S
        if compute_s is None:
            return LoadPlan(expected_s, late_s + _UNKNOWN_S)
        if expected_s * _MIN_GAIN > compute_s:
            return None
        return LoadPlan(expected_s, min(late_s, compute_s + _SLACK_S))

    def plan_partial(
        self, start: int, stop: int, *, num_bytes: int, full_bytes: int, num_query_tokens: int, queued_bytes: int = 0
    ) -> float | None:
        """How many seconds it takes to read a part, `num_bytes`, of the tokens `[start, stop)`, which are `full_bytes`
        in all, and to run the query behind them once more to choose it; None: to load all of them, to compute all, or
        to do both at once is as quick.

        By measured rates; what was never measured is measured by doing all.
        """
        compute_s, look_s = self.compute_s(start, stop), self.compute_s(stop, stop + num_query_tokens)
        if compute_s is None or look_s is None or self.disk_bytes_per_s is None:
            return None
        queued_s, load_s = queued_bytes / self.disk_bytes_per_s, full_bytes / self.disk_bytes_per_s
        part_s = queued_s + num_bytes / self.disk_bytes_per_s + look_s + self._part_extra_s
        # they meet where both have taken as long
        both_s = load_s * compute_s / max(load_s + compute_s, 1e-9) + _SPLIT_S
        if part_s < _MAX_PART * min(queued_s + min(load_s, both_s), compute_s):
            return part_s
        self._part_extra_s *= _KEPT  # so that what took too long for once is tried again
        return None

    def observe_partial(self, *, expected_s: float, seconds: float) -> None:
        """To read a part took so long: many small reads take longer than their bytes say, and choosing takes time."""
        extra_s = max(0.0, self._part_extra_s + seconds - expected_s)
        self._part_extra_s = (self._part_extra_s + extra_s) / 2

    def plan_split(
        self,
        start: int,
        stop: int,
        *,
        num_bytes: int,
        max_bytes: int,
        queued_bytes: int = 0,
        num_tokens_ahead: int = 0,
    ) -> SplitPlan | None:
        """Whether to load the end of the tokens `[start, stop)`, which are so many bytes, while their beginning is
        computed; None: all of the one or the other is as quick, or something was never measured.

        Args:
            max_bytes: may be loaded before they meet.
            queued_bytes: are read before.
            num_tokens_ahead: are computed before.
        """
        token_s = self._compute.seconds((start + stop) / 2)
        if token_s is None or self.disk_bytes_per_s is None:
            return None
        token_bytes = num_bytes / (stop - start)
        ahead_s, queued_s = num_tokens_ahead * token_s, queued_bytes / self.disk_bytes_per_s
        meet = self.meet(start, stop, token_bytes=token_bytes, lead_s=queued_s - ahead_s)
        meet = max(meet, stop - int(max_bytes / token_bytes) // PAGE_SIZE * PAGE_SIZE)
        load_s = token_bytes / self.disk_bytes_per_s
        computed_s = self.compute_s(start, meet)
        assert computed_s is not None
        expected_s = max(ahead_s + computed_s, queued_s + load_s * (stop - meet))
        either_s = min(ahead_s + token_s * (stop - start), queued_s + load_s * (stop - start))
        if expected_s * _MIN_SPLIT_GAIN > either_s or either_s - expected_s < _SPLIT_S + _SLACK_S:
            return None
        return SplitPlan(meet, expected_s)

    def meet(self, start: int, stop: int, *, token_bytes: float, lead_s: float = 0.0) -> int:
        """Up to where `[start, stop)` is computed when the rest of it has been loaded from its end; both are measured.

        Args:
            lead_s: how much later the disk begins.

        Returns:
            The end of a page, unless it is `stop`.
        """
        assert self.disk_bytes_per_s is not None
        load_s = token_bytes / self.disk_bytes_per_s

        def is_behind(meet: int) -> bool:
            """Whether the disk has `[meet, stop)` before the model has `[start, meet)`."""
            return (self.compute_s(start, meet) or 0.0) >= lead_s + load_s * (stop - meet)

        meet = bisect_left(range(start, stop), True, key=is_behind) + start
        return min(-(-meet // PAGE_SIZE) * PAGE_SIZE, stop)
