"""How fast a disk reads, from what was read lately."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_KEPT: Final = 0.8  # of what came before, each time something is read


@dataclass
class Bandwidth:
    """Bytes and seconds, each with what came before counting less and less: a long read outweighs a short one.

    >>> bandwidth = Bandwidth()
    >>> bandwidth.add(1000, 0.5)
    >>> bandwidth.bytes_per_s
    2000.0
    """

    _num_bytes: float = 0.0
    _seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """None before anything was read."""
        return self._num_bytes / self._seconds if self._seconds else None

    def add(self, num_bytes: int, seconds: float) -> None:
        """Count a read; one of nothing says nothing."""
        if num_bytes and seconds > 0:
            self._num_bytes = self._num_bytes * _KEPT + num_bytes
            self._seconds = self._seconds * _KEPT + seconds
