"""How long a step may take, by how long steps took lately.

Knows tokens and seconds, not requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...cache.kv_transaction import Reservation
from .prompt_cost import FIXED_TOKENS, PromptCost

ALONE_S = 0.25  # of a prompt that is alone, or of all that end in a step: so long does the next request wait for it
GRACE_S = 3.0  # that prompts which end in a step may take more than streams: many at once are computed faster
PARTS_GRACE_S = 0.1  # that parts of long prompts may: streams keep half of their speed from the beginning
LONG_S = 0.5  # that what is left of a prompt takes, for it to be long
_PAID_BACK = 0.95  # of what prompts took more, with each second of streams alone: what is measured is not all they wait
_MOST_BETWEEN_S = 0.01  # between two steps, beside as long as the first one took
_LEAST, _FIRST = 8, 64  # tokens of a prompt: fewer cost a step as much; before anything was measured
_FEWEST = 32  # tokens of prompts in a step, as far as these have any: kernels take as many rows at a time
_FIRST_WHOLE = 512  # that a prompt which is alone may have, to be computed in one step before anything was measured
_FIRST_ROWS = 8  # that are taken to cost as much as a decode step, before a prompt was measured
_FIXED_ALONE, _FIXED_BESIDE = 22, 11  # times a step's fixed cost: so long do tokens take that cost nearly the least
_REST = 6  # of a part: so little is no part of its own where no stream waits
_BLOCK = 8  # rows that kernels take at a time: a few more cost as much as all of them
_FEW, _FAR = 64, 2048  # fewer than that cost more each, most of all behind so many, whose keys and values all are read
_FAR_LIMITS = 8  # times the limit of a step, that so few may take there
_KEPT = 0.9  # of how long streams took by themselves before, with each such step
_MOST_STREAMS = 0.4  # of a step with prompts; if it were half, one slow step of streams would be believed for ever
_MEASURED = 8  # steps, of which one at least has no prompts while streams are owed time: it measures them
_FEWEST_BESIDE = 4  # tokens of a long prompt in a step of streams that are owed time
_LEAST_WORTH, _MOST_WORTH = 0.8, 2.0  # of the seconds expected of these to those they took; else there are none
_TRIED_AGAIN = 0.02  # towards 1, with each step without prompts
_MOST_SLOWER = 8.0  # times what was expected of a step that one measurement says: the machine may have been suspended


@dataclass
class StepPace:
    """What a step may take.

    >>> pace = StepPace(limit_s=0.05)
    >>> pace.num_tokens(0, pace.prompts_s(num_streams=0, has_others=True))  # nothing was measured yet
    64
    >>> pace.observe(num_streams=0, chunks=[(0, 512)], seconds=0.256)
    >>> pace.num_tokens(0, pace.prompts_s(num_streams=0, has_others=True))
    100

    A step costs a fixed time, in which the weights are read, and a time for each token. Prompts have at least a
    multiple of the fixed time, so that their tokens cost nearly the least. On a slow machine that is longer than
    `limit_s`, and streams are compensated by steps without prompts.

    Attributes:
        limit_s: seconds of parts of prompts in a step while others wait or stream. Where prompts have taken
            `PARTS_GRACE_S` more than streams, there are steps without long ones, and from `GRACE_S` on without any, so
            that streams keep half of their speed.
    """

    limit_s: float
    _cost: PromptCost = field(default_factory=PromptCost)
    _streams_s: float = 0.0  # of a step without prompts
    _num_streams: float = 0.0  # in it
    _tokens: float = 1.0  # that it brings each stream
    _debt_s: float = 0.0  # that prompts took more than streams
    _last_streams_s: float = math.inf  # of the last step without prompts
    _num_with_prompts: int = 0  # steps since then
    _few_worth: float = 1.0  # what a few tokens of prompts were expected to take beside streams, of what they took
    _began_at: float = 0.0
    _last: tuple[int, list[tuple[int, int]], float, int] | None = None  # streams, chunks, seconds, guesses of a step

    def time_of(self, now: float, *, num_streams: int, num_prompts: int) -> PromptTime:
        """Return the time that the step that begins now has for this many prompts beside this many streams."""
        self.begin(now)
        # without prompts the cost of one is not asked for: it would be fitted anew in each step
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
        """Return the seconds for parts of prompts in the next step; 0: no prompts.

        Args:
            num_streams: requests that decode in it.
            has_others: whether more than one prompt is to be computed.
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
        """Seconds that a prompt still takes at most, for more than a few of its tokens to be in the next step."""
        return LONG_S if num_streams and self._debt_s >= PARTS_GRACE_S else math.inf

    def num_tokens(self, position: int, seconds: float) -> int:
        """Tokens of a prompt, from `position` on, that take about so long; a few where that is fewer than pay."""
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
        """That so many tokens of a prompt take beside the step's fixed cost, from `position` on; 0 before anything was
        measured.
        """
        return num_tokens * (self._cost.token_s(position + num_tokens / 2) or 0.0)

    def observe(
        self, *, num_streams: int, chunks: Sequence[tuple[int, int]], seconds: float, num_accepted: int = 0
    ) -> None:
        """Note how long a step took: `num_streams` requests decoded beside `chunks` (start, stop) of prompts; without
        prompts, `num_accepted` tokens came besides, that were guessed.
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
        else:  # too little is left to tell what the prompts took: a row of a stream counts as one of theirs
            self._cost.observe(num_tokens + num_streams, position, seconds)
        if is_few:
            most_s = 0.5 * seconds
            worth = num_tokens * token_s / max(seconds - min(self._streams_s, self._last_streams_s), 1e-9)
            self._few_worth = 0.5 * self._few_worth + 0.5 * min(worth, _MOST_WORTH)
        more_s = seconds - 2 * min(alone_s, most_s)
        most_debt_s = max(2 * GRACE_S, 2 * expected_s if math.isfinite(expected_s) else 0.0)
        self._debt_s = min(max(0.0, self._debt_s + more_s), most_debt_s)

    def observe_step(self, reservations: Sequence[Reservation], seconds: float, num_accepted: int = 0) -> None:
        """The same, of what a step reserved, when the next one begins; a sequence with one token decodes."""
        chunks = [(each.start, each.stop) for each in reservations if not each.decodes]
        self._last = (len(reservations) - len(chunks), chunks, seconds, num_accepted)

    def begin(self, now: float) -> None:
        """Begin to plan a step. What planning and handing out took belongs to the step before: to a short one it is
        much. A longer pause is none of it.
        """
        began_at, self._began_at = self._began_at, now
        if self._last is not None:
            num_streams, chunks, seconds, num_accepted = self._last
            self._last = None
            took = max(seconds, min(now - began_at, 2 * seconds + _MOST_BETWEEN_S))
            self.observe(num_streams=num_streams, chunks=chunks, seconds=took, num_accepted=num_accepted)

    def _few_s(self, num_streams: int) -> float:
        """Seconds for a few tokens of long prompts in a step of streams that are owed time: these keep half of their
        speed in it, and the weights are read anyway. 0.0 where it has none, so that streams are measured.
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
    """What is left of the seconds that a step has for prompts.

    Prompts that end in the step may take `ALONE_S` together: fifty short ones are computed in a few steps, as beside
    one another they cost less. Parts of longer ones take `parts_s`.
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
            longest_s: that what is left of a prompt may take, for it not to be long.
            few_s: for parts of long prompts, if nothing else of prompts is in the step.
            whole_s: for all prompts, if that is more; those that end may take it.
            block: rows that a part is rounded up to.
        """
        self._pace, self._longest_s, self._few_s, self._block = pace, longest_s, few_s, block
        self._parts_s, self._all_s = parts_s, max(whole_s, parts_s) if parts_s else few_s
        self._used_by_parts_s = self._used_s = self._share_aside = 0.0

    @property
    def has_room(self) -> bool:
        """Whether one more prompt may begin in the step."""
        return self._left_s > 0.0

    def has_room_for(self, position: int, num_tokens: int) -> bool:
        """Whether a part of a prompt's tokens from `position` on fits, or all of them do."""
        if self._is_long(position, num_tokens):
            return self._few(position) > 0
        return self._left_of_parts_s > 0.0 or num_tokens <= self._pace.num_tokens(position, self._left_s)

    def set_aside(self, share: float) -> None:
        """Let a share of all be for later."""
        self._share_aside = share

    def num_tokens(self, position: int, num_tokens: int, share: float) -> int:
        """How many of a prompt's `num_tokens` from `position` on take a share of what is left."""
        if self._is_long(position, num_tokens) and (few := self._few(position, share)):
            return few
        if num_tokens <= self._pace.num_tokens(position, share * self._left_s):
            return num_tokens
        most = self._pace.num_tokens(position, share * self._left_of_parts_s)
        most = -(-most // self._block) * self._block
        is_nearly_all = self._block > 1 and num_tokens <= most + most // _REST
        return num_tokens if is_nearly_all else min(num_tokens, most)

    def take(self, position: int, num_tokens: int, *, ends: bool) -> None:
        """Use the time of so many tokens, with which the prompt ends or not."""
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
        """Tokens of a long prompt that take a share of the time for a few; 0 where so few cost more each."""
        left_s = self._few_s * (1 - self._share_aside) - self._used_s
        count = 0 if position >= _FAR else self._pace.num_tokens(position, share * left_s)
        return count if share * left_s >= self._pace.seconds(position, _FEWEST_BESIDE) else 0

    @property
    def _left_s(self) -> float:
        return self._all_s * (1 - self._share_aside) - self._used_s

    @property
    def _left_of_parts_s(self) -> float:
        return min(self._left_s, self._parts_s * (1 - self._share_aside) - self._used_by_parts_s)
