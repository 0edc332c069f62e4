"""Drop from time to time what was not used for long.

Knows a clock and what to call, not what is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..errors import InvalidParameter

_CHECKS = 10  # within a time to live: so much of it late, at most, is something dropped


class CacheExpiry:
    """Calls each of `drops` with the time before which nothing is kept that was not used since.

    >>> now, dropped = 100.0, []
    >>> expiry = CacheExpiry(60.0, clock=lambda: now, drops=[dropped.append])
    >>> expiry.run()
    >>> expiry.run()  # there is nothing to do before the next check
    >>> dropped, expiry.wait_s
    ([40.0], 6.0)

    Args:
        ttl_s: how long something is kept that nobody uses, in seconds.

    Raises:
        InvalidParameter: `ttl_s` is not above 0.
    """

    def __init__(self, ttl_s: float, *, clock: Callable[[], float], drops: Sequence[Callable[[float], object]]) -> None:
        if not (ttl_s > 0 and math.isfinite(ttl_s)):
            raise InvalidParameter(f"the cache's time to live is {ttl_s} s; it must be above 0")
        self._ttl_s, self._clock, self._drops = ttl_s, clock, drops
        self._next_at = -math.inf

    @property
    def wait_s(self) -> float:
        """Seconds to the next check."""
        return max(0.0, self._next_at - self._clock())

    def run(self) -> None:
        """Drop what is due, unless that was just checked."""
        now = self._clock()
        if now < self._next_at:
            return
        self._next_at = now + self._ttl_s / _CHECKS
        for drop in self._drops:
            drop(now - self._ttl_s)
