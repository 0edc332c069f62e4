"""Estimate the remaining time of a compile, and the rate at which it reads bytes.

Knows the stages of a compile and times, not how they are shown.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixlm.runtime.progress import Progress, Stage, Unit

_EVIDENCE_S = 1.0  # time after which a pace counts as known
_RATE_S = 5.0  # MB/s is the rate of the last seconds
_BYTES = ("bytes", "received bytes")


class Pace:
    """Estimates the remaining time from the seconds per expected second, measured for each unit of work.

    The pace of kernels says nothing about that of bytes, because caches and disks differ. So the remaining time is
    unknown until all remaining units were measured.
    """

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._stage_started = 0.0
        self._updated = 0.0
        self._spent: dict[Unit, float] = {}  # seconds spent in earlier stages
        self._expected: dict[Unit, float] = {}  # expected seconds of the same work
        self._recent: deque[tuple[float, int]] = deque()  # times and units done in this stage, over at least _RATE_S

    def update(self, progress: Progress, now: float) -> None:
        """Record the progress at the time `now`, from which rates and the remaining time are estimated."""
        before = self._progress
        if before is None or progress.stage != before.stage:
            if before is not None and (stage := _stage_of(before)) is not None:
                self._spent[stage.unit] = self._spent.get(stage.unit, 0.0) + now - self._stage_started
                self._expected[stage.unit] = self._expected.get(stage.unit, 0.0) + stage.seconds
            self._stage_started = now
            self._recent.clear()
        self._progress = progress
        self._updated = now
        self._recent.append((now, progress.done))
        while len(self._recent) > 1 and self._recent[1][0] <= now - _RATE_S:
            self._recent.popleft()

    def bytes_per_s(self, now: float) -> float | None:
        """Return the rate of the last seconds; None if the stage does not count bytes, or has just begun."""
        if self._progress is None or self._progress.unit not in _BYTES:
            return None
        (began, done), passed = self._recent[0], now - self._recent[0][0]
        return (self._progress.done - done) / passed if passed >= _EVIDENCE_S and began < self._updated else None

    def mean_bytes_per_s(self, now: float) -> float | None:
        """Return the mean rate of the current stage, which ends now; None if it does not count bytes."""
        if self._progress is None or self._progress.unit not in _BYTES or now <= self._stage_started:
            return None
        return self._progress.total / (now - self._stage_started)

    def remaining_s(self, now: float) -> float | None:
        """Return the remaining seconds of the compile; None if unknown."""
        progress = self._progress
        current = None if progress is None else _stage_of(progress)
        if progress is None or current is None:
            return None
        rest = self._updated - now
        for stage in progress.stages[progress.stages.index(current) :]:
            done = progress.stage_fraction if stage == current else 0.0
            pace = 1.0 if stage.unit == "steps" else self._pace_of(stage, current, progress.stage_fraction)
            if pace is None:
                return None
            rest += stage.seconds * (1.0 - done) * pace
        return max(rest, 0.0)

    def _pace_of(self, stage: Stage, current: Stage, done: float) -> float | None:
        """Return the seconds per expected second of a stage; None if unknown.

        They are those of the stage itself if it is the current one and has lasted long enough, else those of all work
        with its unit. `done` is the fraction of the current stage that is done.
        """
        now_spent, now_expected = self._updated - self._stage_started, current.seconds * done
        measured = [(now_spent, now_expected)] if stage == current else []
        spent, expected = self._spent.get(stage.unit, 0.0), self._expected.get(stage.unit, 0.0)
        if stage.unit == current.unit:
            spent, expected = spent + now_spent, expected + now_expected
        measured.append((spent, expected))
        return next((spent / expected for spent, expected in measured if spent >= _EVIDENCE_S and expected > 0), None)


def _stage_of(progress: Progress) -> Stage | None:
    """Return the stage that `progress` is in; None if it is not among the expected stages."""
    return next((stage for stage in progress.stages if stage.name == progress.stage), None)
