"""How fast the disk reads and the model computes, as measured lately. In seconds, bytes and tokens.

Knows no pages, threads or plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..artifact.manifest import PAGE_SIZE
from ..cache.kv_transaction import Reservation

_KEPT = 0.9  # of what was measured before, with each new measurement
_MIN_COMPUTED_TOKENS = 32  # of a step that measures prefill: fewer are decode, which costs far more a token
_PREFILL_PER_DECODE = 16  # tokens of prompts beside each of a reply, for a step to measure prefill

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
        if spread > PAGE_SIZE * PAGE_SIZE:  # measurements at one position tell nothing of others
            slope = max(0.0, (self._xy / self._weight - mean_x * mean_y) / spread)
        return max(mean_y + slope * (position - mean_x), mean_y / 4)


@dataclass
class Rates:
    """What disk and model were measured to do.

    >>> rates = Rates()
    >>> rates.compute_s(0, 1000) is None, rates.load_s(1000) is None  # never measured
    (True, True)
    >>> rates.observe_read(num_bytes=50_000_000, seconds=1.0)
    >>> rates.observe_compute(num_tokens=500, position=250, seconds=0.25)
    >>> rates.compute_s(0, 1000), rates.load_s(10_000_000)
    (0.5, 0.2)

    Attributes:
        disk_bytes_per_s: None: never measured.
    """

    disk_bytes_per_s: float | None = None
    _compute: LinearRate = field(default_factory=LinearRate)

    def observe_read(self, *, num_bytes: int, seconds: float) -> None:
        """Note that the disk took so long."""
        rate = num_bytes / max(seconds, 1e-9)
        before = self.disk_bytes_per_s
        # seconds a byte are averaged, not bytes a second: what counts is how long it takes
        self.disk_bytes_per_s = rate if before is None else 2 / (1 / rate + 1 / before)

    def observe_step(self, reservations: Sequence[Reservation], seconds: float) -> None:
        """Note how long a step took, if it was of prompts: decode costs more a token, and is no measure."""
        prefill = [reservation for reservation in reservations if not reservation.decodes]
        num_tokens = sum(reservation.num_tokens for reservation in prefill)
        if num_tokens < _PREFILL_PER_DECODE * (len(reservations) - len(prefill)) or not num_tokens:
            return
        positions = sum(item.num_tokens * (item.start + item.stop) / 2 for item in prefill)
        self.observe_compute(num_tokens=num_tokens, position=positions / num_tokens, seconds=seconds)

    def observe_compute(self, *, num_tokens: int, position: float, seconds: float) -> None:
        """Note that a step of so many tokens, at this mean position, took so long; small steps tell nothing."""
        if seconds > 0 and num_tokens >= _MIN_COMPUTED_TOKENS:
            self._compute.observe(position, seconds / num_tokens, float(num_tokens))

    @property
    def compute_sums(self) -> ComputeSums | None:
        """All that is known of computing, for `begin_with`; None: it was never measured."""
        return self._compute.sums if self._compute.seconds(0.0) is not None else None

    def begin_with(self, sums: ComputeSums) -> None:
        """Take over what was measured of computing before; new measurements count more and more."""
        self._compute = LinearRate.of(sums)

    def compute_s(self, start: int, stop: int) -> float | None:
        """How long the model takes for the tokens `[start, stop)`; None: never measured."""
        seconds = self._compute.seconds((start + stop) / 2)
        return None if seconds is None else seconds * (stop - start)

    def load_s(self, num_bytes: float) -> float | None:
        """How long the disk takes for so many bytes; None: never measured."""
        return None if self.disk_bytes_per_s is None else num_bytes / self.disk_bytes_per_s
