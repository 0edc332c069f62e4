"""Measured speed of the disk and of prefill, in seconds, bytes and tokens; recent measurements count most.

Knows no pages, threads or plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..artifact.manifest import PAGE_SIZE
from ..cache.kv_transaction import Reservation

_KEPT = 0.9  # weight of earlier measurements, with each new one
_MIN_COMPUTED_TOKENS = 32  # the least of a step that measures prefill: fewer are decode, which costs far more a token
_PREFILL_PER_DECODE = 16  # a step measures prefill if it has this many prompt tokens for each decoded one

ComputeSums = tuple[float, float, float, float, float]
"""The state of a LinearRate: the total weight, and the weighted sums of x, y, x * x and x * y."""


@dataclass
class LinearRate:
    """Seconds per token as `base + slope * position`, fitted to recent measurements."""

    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    @classmethod
    def of(cls, sums: ComputeSums) -> LinearRate:
        """Return the rate that had these `sums`."""
        return cls(*sums)

    @property
    def sums(self) -> ComputeSums:
        """All of its state."""
        return self._weight, self._x, self._y, self._xx, self._xy

    def observe(self, position: float, seconds: float, weight: float) -> None:
        """Add a measurement: tokens at this mean position took `seconds` each."""
        for name, value in (("_weight", 1.0), ("_x", position), ("_y", seconds)):
            setattr(self, name, _KEPT * getattr(self, name) + weight * value)
        self._xx = _KEPT * self._xx + weight * position * position
        self._xy = _KEPT * self._xy + weight * position * seconds

    def seconds(self, position: float) -> float | None:
        """Return the seconds of one token at a position; None before the first measurement."""
        if self._weight == 0.0:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        slope = 0.0
        if spread > PAGE_SIZE * PAGE_SIZE:  # measurements at one position say nothing about others
            slope = max(0.0, (self._xy / self._weight - mean_x * mean_y) / spread)
        return max(mean_y + slope * (position - mean_x), mean_y / 4)


@dataclass
class Rates:
    """Measured speed of disk and model.

    >>> rates = Rates()
    >>> rates.compute_s(0, 1000) is None, rates.load_s(1000) is None  # never measured
    (True, True)
    >>> rates.observe_read(num_bytes=50_000_000, seconds=1.0)
    >>> rates.observe_compute(num_tokens=500, position=250, seconds=0.25)
    >>> rates.compute_s(0, 1000), rates.load_s(10_000_000)
    (0.5, 0.2)

    Attributes:
        disk_bytes_per_s: None if never measured.
    """

    disk_bytes_per_s: float | None = None
    _compute: LinearRate = field(default_factory=LinearRate)

    def observe_read(self, *, num_bytes: int, seconds: float) -> None:
        """Add a measurement of the disk."""
        rate = num_bytes / max(seconds, 1e-9)
        before = self.disk_bytes_per_s
        # seconds per byte are averaged, not bytes per second, because the rate predicts times
        self.disk_bytes_per_s = rate if before is None else 2 / (1 / rate + 1 / before)

    def observe_step(self, reservations: Sequence[Reservation], seconds: float) -> None:
        """Add the duration of a step, if it consists of prompts.

        Decode costs more per token, and is no measure of prefill.
        """
        prefill = [reservation for reservation in reservations if not reservation.decodes]
        num_tokens = sum(reservation.num_tokens for reservation in prefill)
        if num_tokens < _PREFILL_PER_DECODE * (len(reservations) - len(prefill)) or not num_tokens:
            return
        positions = sum(item.num_tokens * (item.start + item.stop) / 2 for item in prefill)
        self.observe_compute(num_tokens=num_tokens, position=positions / num_tokens, seconds=seconds)

    def observe_compute(self, *, num_tokens: int, position: float, seconds: float) -> None:
        """Add the duration of a step of `num_tokens` tokens at this mean position; small steps are ignored."""
        if seconds > 0 and num_tokens >= _MIN_COMPUTED_TOKENS:
            self._compute.observe(position, seconds / num_tokens, float(num_tokens))

    @property
    def compute_sums(self) -> ComputeSums | None:
        """State of the prefill measurement, for `begin_with`; None if never measured."""
        return self._compute.sums if self._compute.seconds(0.0) is not None else None

    def begin_with(self, sums: ComputeSums) -> None:
        """Start from an earlier measurement of prefill; new measurements count more and more."""
        self._compute = LinearRate.of(sums)

    def compute_s(self, start: int, stop: int) -> float | None:
        """Return the seconds that the model takes for the tokens `[start, stop)`; None if never measured."""
        seconds = self._compute.seconds((start + stop) / 2)
        return None if seconds is None else seconds * (stop - start)

    def load_s(self, num_bytes: float) -> float | None:
        """Return the seconds that the disk takes for this many bytes; None if never measured."""
        return None if self.disk_bytes_per_s is None else num_bytes / self.disk_bytes_per_s
