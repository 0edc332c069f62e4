"""How long a step may compute prompts, by what steps took lately: so that no long prompt holds the others up.

Knows seconds, positions and counts. No requests, no clock.
"""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass, field

from ..cache.kv_transaction import Reservation
from ..prefix.rates import LinearRate

ALONE_S = 0.25  # of a prompt that is alone: so long does the next request wait for the step to end
GRACE_S = 1.0  # that prompts may take more than streams: many short prompts are computed at once, which is faster
_LEAST = 8  # tokens of a prompt: fewer cost a step as much
_KEPT = 0.75  # of how long streams took by themselves before, with each such step


@dataclass
class StepPace:
    """What a step may take.

    >>> pace = StepPace(limit_s=0.05)
    >>> pace.prompts_s(num_streams=0, has_others=True) is None  # nothing was measured: tokens alone limit the step
    True
    >>> pace.observe(num_streams=0, chunks=[(0, 512)], seconds=0.256)
    >>> pace.num_tokens(0, pace.prompts_s(num_streams=0, has_others=True))
    100

    Attributes:
        limit_s: seconds of prompts in a step while others wait or stream. Where prompts have taken a second more than
            streams, there are steps without prompts, so that streams keep half of their speed.
    """

    limit_s: float
    _rate: LinearRate = field(default_factory=LinearRate)
    _streams_s: float = 0.0  # of a step without prompts
    _debt_s: float = 0.0  # that prompts took more than streams

    def prompts_s(self, *, num_streams: int, has_others: bool) -> float | None:
        """Seconds for prompts in the next step; None: as long as its tokens take; 0: none.

        Args:
            num_streams: requests that decode in it.
            has_others: whether more than one prompt is to be computed.
        """
        if num_streams and self._debt_s >= GRACE_S:
            return 0.0
        if self._rate.seconds(0.0) is None:
            return None
        return self.limit_s if num_streams or has_others else max(ALONE_S, self.limit_s)

    def num_tokens(self, position: int, seconds: float) -> int:
        """Tokens of a prompt, from `position` on, that take about so long; a few where that is fewer than pay."""
        each_s = self._rate.seconds(float(position))
        return max(_LEAST, int(seconds / each_s + 1e-6)) if each_s else _LEAST

    def seconds(self, position: int, num_tokens: int) -> float:
        """That so many tokens of a prompt take, from `position` on; 0 before anything was measured."""
        return num_tokens * (self._rate.seconds(position + num_tokens / 2) or 0.0)

    def observe(self, *, num_streams: int, chunks: collections.abc.Sequence[tuple[int, int]], seconds: float) -> None:
        """Note how long a step took: `num_streams` requests decoded beside `chunks` (start, stop) of prompts."""
        if seconds <= 0.0:
            return
        if not chunks:
            self._streams_s = seconds if not self._streams_s else _KEPT * self._streams_s + (1 - _KEPT) * seconds
            self._debt_s = max(0.0, self._debt_s - seconds)
            return
        if num_streams:
            streams_s = min(self._streams_s, 0.75 * seconds)
            seconds -= streams_s
            self._debt_s = max(0.0, self._debt_s + seconds - streams_s)
        num_tokens = sum(stop - start for start, stop in chunks)
        position = sum((stop - start) * (start + stop) / 2 for start, stop in chunks) / num_tokens
        self._rate.observe(position, seconds / num_tokens, float(num_tokens))

    def observe_step(self, reservations: collections.abc.Sequence[Reservation], seconds: float) -> None:
        """The same, of what a step reserved; a sequence with one token decodes."""
        chunks = [(each.start, each.stop) for each in reservations if each.num_tokens > 1]
        self.observe(num_streams=len(reservations) - len(chunks), chunks=chunks, seconds=seconds)
