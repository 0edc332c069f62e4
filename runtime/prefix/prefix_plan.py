"""Plan the source of each token of a prompt's prefix: memory, the disk, or the model.

Pure functions of a match, measured rates and a budget; they know no pages, threads or requests. A cache hit that is
slower than a miss is worthless (SGLang issue 26305).

Computing a token costs more at higher positions, and loading costs the same everywhere. So loading a part of a range
from its front is never better than the better of loading all and loading nothing. Doing both at once can be better: the
front is computed while the disk reads from the back, until they meet.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from ..artifact.manifest import PAGE_SIZE
from .rates import Rates

Source = Literal["memory", "front", "back", "computed"]
"""`front`: the disk reads from the segment's first page on while the request waits. `back`: it reads from the last page
backwards while the model computes the tokens before the segment."""

_MIN_GAIN = 1.15  # the least ratio of compute to load time: measured compute times are a tenth too high, and scatter
_MIN_SPLIT_GAIN = 1.15  # the least speedup of both at once over the better of the two: they share CPU and memory
SPLIT_S = 0.04  # loading and computing at once slow each other: 900 and 2,500 tokens, 25 to 100 MB/s (bench/LOG.md)
_SLACK_S = 0.05  # for the scheduling of threads
_PATIENCE = 2.0  # a load is late after this multiple of the planned time
_UNKNOWN_S = 1.0  # to wait for a load if no rate is known


@dataclass(frozen=True)
class PlanSegment:
    """The tokens `[start, stop)` of a prompt, and their source."""

    start: int
    stop: int
    source: Source


@dataclass(frozen=True)
class LoadBudget:
    """The limits of a load, and the work queued before it.

    Attributes:
        token_bytes: bytes of a token on disk.
        queued_bytes: bytes that the disk reads before.
        room_bytes: bytes that can be read from the back ahead of prefill.
        num_tokens_ahead: tokens that the model computes before the request, if it does not wait. None if unknown: then
            nothing is computed that can be loaded.
    """

    token_bytes: float
    queued_bytes: int = 0
    room_bytes: int = 0
    num_tokens_ahead: int | None = None


@dataclass(frozen=True)
class PrefixPlan:
    """The source of each token of a prefix, in order and without gaps::

        [0, 512) memory | [512, 2048) front                          the request waits for the disk
        [0, 512) memory | [512, 1280) computed | [1280, 2048) back   it computes until it meets the disk
        [0, 512) memory | [512, 2048) computed                       loading would not be faster

    Attributes:
        expected_s: until all tokens are available. None if the disk was never measured, or nothing is loaded.
        deadline_s: the most seconds that a request waits for the load; 0.0 if it does not wait.
    """

    segments: tuple[PlanSegment, ...]
    expected_s: float | None = None
    deadline_s: float = 0.0

    @classmethod
    def of(
        cls, *segments: tuple[int, int, Source], expected_s: float | None = None, deadline_s: float = 0.0
    ) -> PrefixPlan:
        """Return a plan of `(start, stop, source)`; empty segments are left out."""
        kept = tuple(PlanSegment(start, stop, source) for start, stop, source in segments if start < stop)
        return cls(kept, expected_s, deadline_s)

    @property
    def load(self) -> PlanSegment | None:
        """The segment that comes from disk; None if none does."""
        return next((segment for segment in self.segments if segment.source in ("front", "back")), None)


def plan(num_in_memory: int, num_on_disk: int, rates: Rates, budget: LoadBudget) -> PrefixPlan:
    """Plan the source of the tokens `[0, num_on_disk)`: the disk has all of them, memory the first `num_in_memory`.

    An unmeasured rate is assumed to be high, within limits.

    >>> rates = Rates(disk_bytes_per_s=50e6)
    >>> rates.observe_compute(num_tokens=500, position=250, seconds=0.25)
    >>> plan(0, 1000, rates, LoadBudget(token_bytes=10_000))  # to load takes 0.2 s, to compute 0.5 s
    PrefixPlan(segments=(PlanSegment(start=0, stop=1000, source='front'),), expected_s=0.2, deadline_s=0.45)
    >>> plan(0, 1000, rates, LoadBudget(token_bytes=40_000)).segments  # 0.8 s
    (PlanSegment(start=0, stop=1000, source='computed'),)
    """
    start, stop, ahead = num_in_memory, num_on_disk, budget.num_tokens_ahead
    loaded = _plan_front(start, stop, rates, budget)
    # while other requests compute, nothing is computed that can be loaded as fast
    if ahead == 0 or (ahead is not None and loaded is None):
        split = _plan_split(start, stop, rates, budget, ahead)
        if split is not None:
            return split
    return loaded or PrefixPlan.of((0, start, "memory"), (start, stop, "computed"))


def meet(start: int, stop: int, rates: Rates, *, token_bytes: float, lead_s: float = 0.0) -> int:
    """Return the position in `[start, stop)` at which computing from the front meets loading from the back.

    Both rates must have been measured.

    Args:
        lead_s: seconds by which the disk begins later.

    Returns:
        The end of a page, unless it is `stop`.
    """

    def is_behind(position: int) -> bool:
        """Return whether the disk has `[position, stop)` before the model has `[start, position)`."""
        load_s = rates.load_s(token_bytes * (stop - position))
        assert load_s is not None
        return (rates.compute_s(start, position) or 0.0) >= lead_s + load_s

    position = bisect_left(range(start, stop), True, key=is_behind) + start
    return min(-(-position // PAGE_SIZE) * PAGE_SIZE, stop)


def _plan_front(start: int, stop: int, rates: Rates, budget: LoadBudget) -> PrefixPlan | None:
    """Plan to load `[start, stop)` while the request waits; None if computing is as fast."""
    compute_s = rates.compute_s(start, stop)
    expected_s = rates.load_s(budget.token_bytes * (stop - start) + budget.queued_bytes)
    if expected_s is None:
        deadline_s = _UNKNOWN_S if compute_s is None else compute_s / 2 + _SLACK_S
    else:
        deadline_s = _PATIENCE * expected_s + _SLACK_S
        if compute_s is None:
            deadline_s += _UNKNOWN_S
        elif expected_s * _MIN_GAIN > compute_s:
            return None
        else:
            deadline_s = min(deadline_s, compute_s + _SLACK_S)
    return PrefixPlan.of((0, start, "memory"), (start, stop, "front"), expected_s=expected_s, deadline_s=deadline_s)


def _plan_split(start: int, stop: int, rates: Rates, budget: LoadBudget, ahead: int) -> PrefixPlan | None:
    """Plan to compute the beginning of `[start, stop)` while its end is loaded; None if either alone is as fast."""
    compute_s, queued_s = rates.compute_s(start, stop), rates.load_s(budget.queued_bytes)
    load_s = rates.load_s(budget.token_bytes * (stop - start))
    if compute_s is None or queued_s is None or load_s is None:
        return None
    ahead_s = ahead * compute_s / (stop - start)
    met = meet(start, stop, rates, token_bytes=budget.token_bytes, lead_s=queued_s - ahead_s)
    met = max(met, stop - int(budget.room_bytes / budget.token_bytes) // PAGE_SIZE * PAGE_SIZE)
    computed_s, loaded_s = rates.compute_s(start, met), rates.load_s(budget.token_bytes * (stop - met))
    assert computed_s is not None and loaded_s is not None
    expected_s = max(ahead_s + computed_s, queued_s + loaded_s)
    either_s = min(ahead_s + compute_s, queued_s + load_s)
    if met == stop or expected_s * _MIN_SPLIT_GAIN > either_s or either_s - expected_s < SPLIT_S + _SLACK_S:
        return None
    segments: tuple[tuple[int, int, Source], ...] = (start, met, "computed"), (met, stop, "back")
    return PrefixPlan.of((0, start, "memory"), *segments, expected_s=expected_s)
