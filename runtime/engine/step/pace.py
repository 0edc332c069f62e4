"""Choose how long a step may take, from the duration of recent steps.

Knows tokens and seconds, not requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...cache.kv_transaction import Reservation
from .prompt_cost import FIXED_TOKENS, PromptCost

ALONE_S = 0.25  # for a lone prompt, or for all that end in a step: the next request waits this long for the step
GRACE_S = 3.0  # debt up to which prompts that end in a step continue: computing many at once is faster
PARTS_GRACE_S = 0.1  # debt up to which parts of long prompts continue: decoding keeps half of its speed
LONG_S = 0.5  # remaining time from which a prompt is long
_PAID_BACK = 0.95  # share of decoding alone that reduces the debt: requests wait for more than what is measured
_MOST_BETWEEN_S = 0.01  # pause between two steps that is counted, in addition to the duration of the first one
_LEAST, _FIRST = 8, 64  # tokens of a prompt in a step: fewer cost the same; before the first measurement
_FEWEST = 32  # tokens of prompts in a step, if there are so many: kernels compute this many rows at a time
_FIRST_WHOLE = 512  # tokens of a lone prompt in one step before the first measurement
_FIRST_ROWS = 8  # rows assumed to cost as much as a decode step before a prompt was measured
_FIXED_ALONE, _FIXED_BESIDE = 22, 11  # times a step's fixed cost: then tokens cost nearly the least
_REST = 6  # share of a part (1/6): a smaller rest joins it if no request decodes
_BLOCK = 8  # rows that kernels compute at a time: a few more cost as much as all of them
_FEW, _FAR = 64, 2048  # fewer tokens than that cost more each, especially after so many, whose KV is all read
_FAR_LIMITS = 8  # times the limit of a step, for that few tokens at a high position
_KEPT = 0.9  # weight of earlier decode steps in the moving average, for each new one
_MOST_STREAMS = 0.4  # share of a step with prompts: at one half, a single slow decode step would be believed for ever
_MEASURED = 8  # steps, of which at least one has no prompts while decoding is owed time, for a measurement
_FEWEST_BESIDE = 4  # tokens of a long prompt in a step while decoding is owed time
_LEAST_WORTH, _MOST_WORTH = 0.8, 2.0  # expected seconds of these divided by measured ones; below, they are not computed
_TRIED_AGAIN = 0.02  # recovery of that ratio towards 1, with each step without prompts
_MOST_SLOWER = 8.0  # times the expected duration that one measurement can report: the machine may have been suspended


@dataclass
class StepPace:
    """The time that prompts may take in a step, adapted to measurements.

    >>> pace = StepPace(limit_s=0.05)
    >>> pace.num_tokens(0, pace.prompts_s(num_streams=0, has_others=True))  # nothing was measured yet
    64
    >>> pace.observe(num_streams=0, chunks=[(0, 512)], seconds=0.256)
    >>> pace.num_tokens(0, pace.prompts_s(num_streams=0, has_others=True))
    100

    A step costs a fixed time, in which the weights are read, and a time for each token. Prompts get at least a
    multiple of the fixed time, so that their tokens cost nearly the least. On a slow machine that is longer than
    `limit_s`, and decoding requests are compensated by steps without prompts.

    Attributes:
        limit_s: seconds for parts of prompts in a step while other requests wait or decode. If prompts have taken
            `PARTS_GRACE_S` more than decoding, there are steps without long ones, and from `GRACE_S` on without any, so
            that decoding requests keep half of their speed.
    """

    limit_s: float
    _cost: PromptCost = field(default_factory=PromptCost)
    _streams_s: float = 0.0  # duration of a step without prompts
    _num_streams: float = 0.0  # decoding requests in it
    _tokens: float = 1.0  # tokens per decoding request in it
    _debt_s: float = 0.0  # time that prompts took more than decoding
    _last_streams_s: float = math.inf  # duration of the last step without prompts
    _num_with_prompts: int = 0  # steps since then
    _few_worth: float = 1.0  # expected seconds of a few prompt tokens while others decode, divided by measured ones
    _began_at: float = 0.0
    _last: tuple[int, list[tuple[int, int]], float, int] | None = None  # decoding requests, chunks, seconds, accepted

    def time_of(self, now: float, *, num_streams: int, num_prompts: int) -> PromptTime:
        """Return the time for prompts in the step that begins now, given the number of decoding and prefilling ones."""
        self.begin(now)
        # not without prompts: their cost would be fitted again in each step
        parts_s = self.prompts_s(num_streams=num_streams, has_others=num_prompts > 1) if num_prompts else 0.0
        is_alone = not num_streams and num_prompts <= 1
        return PromptTime(
            self,
            parts_s,
            self.longest_s(num_streams=num_streams),
            few_s=self._few_s(num_streams),
            whole_s=math.inf if is_alone and not self._is_measured else ALONE_S,
            block=1 if num_streams else _BLOCK,
        )

    def prompts_s(self, *, num_streams: int, has_others: bool) -> float:
        """Return the seconds for parts of prompts in the next step; 0: no parts of prompts.

        Args:
            num_streams: requests that decode in it.
            has_others: whether there is more than one prompt.
        """
        if num_streams and self._debt_s >= GRACE_S:
            return 0.0
        fixed_s, token_s = self._cost.fixed_s, self._cost.token_s(0) or 0.0
        if num_streams or has_others:
            return max(self.limit_s, _FEWEST * token_s, _FIXED_BESIDE * (fixed_s or 0.0))
        if fixed_s is None:
            fixed_s = FIXED_TOKENS * token_s
        return max(ALONE_S, self.limit_s, _FEWEST * token_s, _FIXED_ALONE * fixed_s)

    def longest_s(self, *, num_streams: int) -> float:
        """Return the longest remaining time of a prompt that gets more than a few tokens in the next step."""
        return LONG_S if num_streams and self._debt_s >= PARTS_GRACE_S else math.inf

    def num_tokens(self, position: int, seconds: float) -> int:
        """Return how many tokens of a prompt from `position` take about this long; a few if fewer would not pay."""
        each_s = self._cost.token_s(position)
        if not each_s and self._streams_s:
            each_s = self._streams_s / _FIRST_ROWS
            return max(_FIRST, int(seconds / each_s))
        if not each_s:
            return _FIRST_WHOLE if math.isinf(seconds) else _FIRST
        most = int(seconds / each_s + 1e-6)
        if position >= _FAR and most:
            most = max(most, min(_FEW, int(_FAR_LIMITS * self.limit_s / each_s)))
        return max(_LEAST, most)

    def seconds(self, position: int, num_tokens: int) -> float:
        """Return the seconds of a prompt's tokens from `position`, without the step's fixed cost; 0 before the first
        measurement.
        """
        return num_tokens * (self._cost.token_s(position + num_tokens / 2) or 0.0)

    def observe(
        self, *, num_streams: int, chunks: Sequence[tuple[int, int]], seconds: float, num_accepted: int = 0
    ) -> None:
        """Record how long a step took that decoded `num_streams` requests and computed `chunks` (start, stop) of
        prompts. Without prompts, `num_accepted` draft tokens were accepted in it.
        """
        if seconds <= 0.0 or not (num_streams or chunks):
            return
        if not chunks:
            kept, tokens = _KEPT if self._streams_s else 0.0, 1 + num_accepted / num_streams
            self._streams_s = kept * self._streams_s + (1 - kept) * seconds
            self._num_streams = kept * self._num_streams + (1 - kept) * num_streams
            self._tokens = kept * self._tokens + (1 - kept) * tokens
            self._last_streams_s, self._num_with_prompts = seconds, 0
            self._few_worth = max(self._few_worth, min(1.0, self._few_worth + _TRIED_AGAIN))
            self._debt_s = max(0.0, self._debt_s - _PAID_BACK * seconds)
            self._cost.observe_decode(self._num_streams, self._streams_s)
            return
        is_few = self._few_s(num_streams) > 0.0
        self._num_with_prompts += 1
        num_tokens = sum(stop - start for start, stop in chunks)
        position = sum((stop - start) * (start + stop) / 2 for start, stop in chunks) / num_tokens
        token_s, fixed_s = self._cost.token_s(position) or math.inf, self._cost.fixed_s or 0.0
        expected_s = num_tokens * token_s
        expected_s += self._streams_s if num_streams and self._streams_s else fixed_s + num_streams * token_s
        seconds = min(seconds, _MOST_SLOWER * expected_s)
        if not num_streams:
            self._debt_s = 0.0
            self._cost.observe(num_tokens, position, seconds)
            return
        alone_s, most_s = self._streams_s / self._tokens, _MOST_STREAMS * seconds
        if 0.0 < alone_s <= most_s:
            self._cost.observe(num_tokens, position, seconds - alone_s, has_fixed=False)
        else:  # the rest is too small to tell the cost of prompts: a decoded row counts as one of theirs
            self._cost.observe(num_tokens + num_streams, position, seconds)
        if is_few:
            most_s = 0.5 * seconds
            worth = num_tokens * token_s / max(seconds - min(self._streams_s, self._last_streams_s), 1e-9)
            self._few_worth = 0.5 * self._few_worth + 0.5 * min(worth, _MOST_WORTH)
        more_s = seconds - 2 * min(alone_s, most_s)
        most_debt_s = max(2 * GRACE_S, 2 * expected_s if math.isfinite(expected_s) else 0.0)
        self._debt_s = min(max(0.0, self._debt_s + more_s), most_debt_s)

    def observe_step(self, reservations: Sequence[Reservation], seconds: float, num_accepted: int = 0) -> None:
        """Record what a step reserved, for `observe` when the next one begins; a sequence with one token decodes."""
        chunks = [(each.start, each.stop) for each in reservations if not each.decodes]
        self._last = (len(reservations) - len(chunks), chunks, seconds, num_accepted)

    def begin(self, now: float) -> None:
        """Begin to plan a step. The time since the previous one counts as part of it, because planning and delivering
        is much of a short step; a longer pause does not count.
        """
        began_at, self._began_at = self._began_at, now
        if self._last is not None:
            num_streams, chunks, seconds, num_accepted = self._last
            self._last = None
            took = max(seconds, min(now - began_at, 2 * seconds + _MOST_BETWEEN_S))
            self.observe(num_streams=num_streams, chunks=chunks, seconds=took, num_accepted=num_accepted)

    def _few_s(self, num_streams: int) -> float:
        """Return the seconds for a few tokens of long prompts while decoding is owed time.

        Decoding keeps half of its speed in such a step, and the weights are read anyway. 0.0 if there is no time, so
        that decoding is measured.
        """
        if not num_streams or self._debt_s < PARTS_GRACE_S or self._num_with_prompts >= _MEASURED - 1:
            return 0.0
        streams_s = min(self._streams_s, self._last_streams_s)
        is_worth = self._few_worth >= _LEAST_WORTH
        return max(0.0, 2 * streams_s / self._tokens - streams_s) * self._few_worth * is_worth

    @property
    def _is_measured(self) -> bool:
        return bool(self._streams_s or self._cost.token_s(0))


class PromptTime:
    """The time that is left for prompts in a step.

    Prompts that end in the step can take `ALONE_S` together: fifty short ones are computed in a few steps, because
    batched they cost less. Parts of longer ones take `parts_s`.
    """

    def __init__(
        self,
        pace: StepPace,
        parts_s: float,
        longest_s: float = math.inf,
        *,
        few_s: float = 0.0,
        whole_s: float = ALONE_S,
        block: int = 1,
    ) -> None:
        """Make the time of a step.

        Args:
            parts_s: for parts of prompts; 0: all prompts are long.
            longest_s: a prompt is long if its remaining tokens take more.
            few_s: for parts of long prompts, if the step has no other prompts.
            whole_s: for all prompts, if that is more; those that end can use it.
            block: rows that a part is rounded up to.
        """
        self._pace, self._longest_s, self._few_s, self._block = pace, longest_s, few_s, block
        self._parts_s, self._all_s = parts_s, max(whole_s, parts_s) if parts_s else few_s
        self._used_by_parts_s = self._used_s = self._share_aside = 0.0

    @property
    def has_room(self) -> bool:
        """Return whether one more prompt can begin in the step."""
        return self._left_s > 0.0

    def has_room_for(self, position: int, num_tokens: int) -> bool:
        """Return whether a part of a prompt's tokens from `position` fits, or all of them do."""
        if self._is_long(position, num_tokens):
            return self._few(position) > 0
        return self._left_of_parts_s > 0.0 or num_tokens <= self._pace.num_tokens(position, self._left_s)

    def set_aside(self, share: float) -> None:
        """Keep a share of the time for later."""
        self._share_aside = share

    def num_tokens(self, position: int, num_tokens: int, share: float) -> int:
        """Return how many of a prompt's `num_tokens` from `position` fit into a share of the time that is left."""
        if self._is_long(position, num_tokens) and (few := self._few(position, share)):
            return few
        if num_tokens <= self._pace.num_tokens(position, share * self._left_s):
            return num_tokens
        most = self._pace.num_tokens(position, share * self._left_of_parts_s)
        most = -(-most // self._block) * self._block
        is_nearly_all = self._block > 1 and num_tokens <= most + most // _REST
        return num_tokens if is_nearly_all else min(num_tokens, most)

    def take(self, position: int, num_tokens: int, *, ends: bool) -> None:
        """Use the time of these tokens; `ends` if the prompt ends with them."""
        self._use(self._pace.seconds(position, num_tokens), ends=ends)

    def give_back(self, position: int, num_tokens: int, *, ends: bool) -> None:
        """Undo `take`."""
        self._use(-self._pace.seconds(position, num_tokens), ends=ends)

    def _use(self, seconds: float, *, ends: bool) -> None:
        self._used_s += seconds
        self._used_by_parts_s += 0.0 if ends else seconds

    def _is_long(self, position: int, num_tokens: int) -> bool:
        return not self._parts_s or self._pace.seconds(position, num_tokens) > self._longest_s

    def _few(self, position: int, share: float = 1.0) -> int:
        """Return the tokens of a long prompt that fit into a share of `few_s`; 0 if so few cost more each."""
        left_s = self._few_s * (1 - self._share_aside) - self._used_s
        count = 0 if position >= _FAR else self._pace.num_tokens(position, share * left_s)
        return count if share * left_s >= self._pace.seconds(position, _FEWEST_BESIDE) else 0

    @property
    def _left_s(self) -> float:
        return self._all_s * (1 - self._share_aside) - self._used_s

    @property
    def _left_of_parts_s(self) -> float:
        return min(self._left_s, self._parts_s * (1 - self._share_aside) - self._used_by_parts_s)
