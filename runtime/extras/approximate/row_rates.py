"""Plan whether to read chosen rows of a prefix, by what that was measured to take. In seconds, bytes and tokens.

Knows no pages, threads or requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ...prefix.prefix_plan import SPLIT_S
from ...prefix.rates import Rates

_MAX_CHOSEN: Final = 0.9  # of the quickest exact way: if chosen rows take longer, the exact reply is worth the wait
_EXTRA_S: Final = 0.03  # what chosen rows take beyond their bytes where nothing else is known
_FORGOTTEN_S: Final = 60.0  # until half of what they took longer is forgotten


@dataclass
class RowRates:
    """What disk and model were measured to do with chosen rows.

    Attributes:
        exact: what they do with whole pages.
        extra_s: that to read chosen rows takes beyond what their bytes and their query do.
    """

    exact: Rates
    extra_s: float = _EXTRA_S
    _forgot_at: float | None = None

    def observe(self, *, expected_s: float, seconds: float) -> None:
        """Note how long it took to read chosen rows: many small reads take longer than their bytes say."""
        extra_s = max(0.0, self.extra_s + seconds - expected_s)
        self.extra_s = (self.extra_s + extra_s) / 2

    def forget(self, now: float) -> None:
        """Forget what chosen rows once took too long, half of it a minute since the last call: they are tried again at
        some time, and no sooner because many requests ask."""
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
    """Seconds to read chosen rows of the tokens `[start, stop)`, and to run the query behind them once more to choose.

    None: to load all rows, to compute them, or to do both at once is as quick, or a rate was never measured.

    Args:
        num_bytes: of the chosen rows.
        full_bytes: of all rows.
        queued_bytes: that the disk reads before.
    """
    exact = rates.exact
    compute_s, probe_s = exact.compute_s(start, stop), exact.compute_s(stop, stop + num_query_tokens)
    queued_s, load_s, read_s = exact.load_s(queued_bytes), exact.load_s(full_bytes), exact.load_s(num_bytes)
    if compute_s is None or probe_s is None or queued_s is None or load_s is None or read_s is None:
        return None
    chosen_s = queued_s + read_s + probe_s + rates.extra_s
    both_s = load_s * compute_s / max(load_s + compute_s, 1e-9) + SPLIT_S  # they meet where both took as long
    return chosen_s if chosen_s < _MAX_CHOSEN * min(queued_s + min(load_s, both_s), compute_s) else None
