"""Plan whether to read chosen rows of a prefix, from measured rates. In seconds, bytes and tokens.

Knows no pages, threads or requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ...prefix.prefix_plan import SPLIT_S
from ...prefix.rates import Rates

_MAX_CHOSEN: Final = 0.9  # of the fastest exact way: otherwise the exact reply is worth the wait
_EXTRA_S: Final = 0.03  # time of chosen rows beyond their bytes, before a measurement
_FORGOTTEN_S: Final = 60.0  # half-life of measurements above that


@dataclass
class RowRates:
    """The measured rates of disk and model with chosen rows.

    Attributes:
        exact: rates with whole pages.
        extra_s: time to read chosen rows beyond their bytes and their query.
    """

    exact: Rates
    extra_s: float = _EXTRA_S
    _forgot_at: float | None = None

    def observe(self, *, expected_s: float, seconds: float) -> None:
        """Record how long it took to read chosen rows: many small reads take longer than their bytes."""
        extra_s = max(0.0, self.extra_s + seconds - expected_s)
        self.extra_s = (self.extra_s + extra_s) / 2

    def forget(self, now: float) -> None:
        """Reduce measurements that were too slow by half per minute since the last call.

        So chosen rows are tried again after some time, and no sooner if many requests ask.
        """
        seconds = 0.0 if self._forgot_at is None else now - self._forgot_at
        longer_s = max(0.0, self.extra_s - _EXTRA_S)
        self.extra_s -= longer_s * (1 - 0.5 ** (seconds / _FORGOTTEN_S))
        self._forgot_at = now


def plan_chosen(
    start: int,
    stop: int,
    rates: RowRates,
    *,
    num_bytes: int,
    full_bytes: int,
    num_query_tokens: int,
    queued_bytes: int = 0,
) -> float | None:
    """Return the seconds to read chosen rows of the tokens `[start, stop)`, with one more run of the query.

    None if loading all rows, computing them, or both at once is as fast, or if a rate was never measured.

    Args:
        num_bytes: bytes of the chosen rows.
        full_bytes: bytes of all rows.
        queued_bytes: bytes that the disk reads before.
    """
    exact = rates.exact
    compute_s, probe_s = exact.compute_s(start, stop), exact.compute_s(stop, stop + num_query_tokens)
    queued_s, load_s, read_s = exact.load_s(queued_bytes), exact.load_s(full_bytes), exact.load_s(num_bytes)
    if compute_s is None or probe_s is None or queued_s is None or load_s is None or read_s is None:
        return None
    chosen_s = queued_s + read_s + probe_s + rates.extra_s
    both_s = load_s * compute_s / max(load_s + compute_s, 1e-9) + SPLIT_S  # they meet when both took as long
    return chosen_s if chosen_s < _MAX_CHOSEN * min(queued_s + min(load_s, both_s), compute_s) else None
