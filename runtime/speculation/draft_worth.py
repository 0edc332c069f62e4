"""Decide when drafting with a model is worthwhile: by the time of its steps, and by its acceptance per likelihood.

Knows seconds, shares and counts; neither tokens nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .draft import MAX_AGAIN, Acceptance, StepCost

MAX_DEPTH = 16  # draft tokens in a row
_EXPECTED, _KEPT, _KEPT_OF_BIN = 0.75, 0.95, 0.97
_BINS = (0.3, 0.6, 0.8, 0.95)  # bounds of the draft model's probability of a draft token
_EXPECTED_OF_BIN = (0.2, 0.4, 0.65, 0.85, 0.95)
_MIN_GAIN = 1.1  # the least speedup that drafts must promise, because estimates are inexact
_SHARE_OF_STEP = 0.25  # expected time of a draft step, as a share of a step, before any measurement
_SHORT_PROMPT = 16  # tokens that are always computed
_FIRST_TOKENS = 64  # a reply is expected to continue for this many tokens plus those that it has
_SAVED = 0.25  # expected share of a reply's time that drafts save
_SHORT_REST, _LONG_REST = 32, 1024  # steps without drafting after too many rejected tokens


def bin_of(likelihood: float) -> int:
    """Return the bin in which a draft token of this probability is counted.

    >>> bin_of(0.1), bin_of(0.99)
    (0, 4)
    """
    return sum(likelihood > bound for bound in _BINS)


def _seen_of_bin() -> list[Acceptance]:
    return [Acceptance(expected, _KEPT_OF_BIN) for expected in _EXPECTED_OF_BIN]


@dataclass
class DraftWorth:
    """Measured costs and acceptance of a draft model.

    Attributes:
        cost: of the draft model's own steps.
    """

    cost: StepCost = field(default_factory=StepCost)
    _seen: Acceptance = field(default_factory=lambda: Acceptance(_EXPECTED, _KEPT))
    _seen_of_bin: list[Acceptance] = field(default_factory=_seen_of_bin)
    _token_s: float | None = None  # seconds of a prompt token
    _rests: int = 0  # remaining steps without drafting
    _next_rest: int = _SHORT_REST
    _is_off: bool = False

    def may_draft(self) -> bool:
        """Return whether to draft in the step that begins now: drafts were worthwhile recently, or are tried again."""
        if self._rests:
            self._rests -= 1
            if not self._rests:
                self._seen = Acceptance(_EXPECTED, _KEPT)
        return not self._is_off and not self._rests

    def turn_off(self) -> None:
        """Stop drafting for good."""
        self._is_off = True

    def share_of(self, likely: int) -> float:
        """Return the acceptance rate of draft tokens in a bin."""
        return self._seen_of_bin[likely].share

    def observe(self, likely: Sequence[int], num_accepted: int) -> None:
        """Add a draft with its tokens' bins, of which `num_accepted` tokens were accepted."""
        if not likely:
            return
        for place, each in enumerate(likely[: num_accepted + 1]):
            self._seen_of_bin[each].observe(1, int(place < num_accepted))
        self._seen.observe(len(likely), num_accepted)
        if 2 * num_accepted >= len(likely):
            self._next_rest = _SHORT_REST

    def observe_prompt(self, num_tokens: int, seconds: float) -> None:
        """Add the duration of `num_tokens` prompt tokens."""
        each_s = seconds / num_tokens
        self._token_s = each_s if self._token_s is None else 0.8 * self._token_s + 0.2 * each_s

    def pays_for_prompt(
        self, num_generated: int, num_left: int, cost: StepCost, num_rows: int, num_tokens: int
    ) -> bool:
        """Return whether to compute `num_tokens` tokens in order to draft for the rest of a reply of unknown length.

        Args:
            num_generated, num_left: tokens of the reply so far, and the most that can still come.
            cost: of the steps that drafts save, with `num_rows` each.
        """
        if num_tokens <= _SHORT_PROMPT or self._token_s is None:
            return True
        num_expected = min(num_left, _FIRST_TOKENS + num_generated)
        return num_tokens * self._token_s < _SAVED * num_expected * cost.seconds(num_rows) / max(1, num_rows)

    def promise(self, cost: StepCost, *, num_requests: int, num_rows: int, num_expected: float, most: int) -> float:
        """Return the expected number of accepted draft tokens per request, if all requests of a step are drafted.

        0.0 if that is not worthwhile. The step has `num_rows` rows without drafts.
        """
        if not cost.is_measured or not num_requests:
            return 0.0
        depth = self.depth(cost, num_rows, num_expected, [1.0] * num_requests, most, 0.0)
        if not depth and self._seen.share < 0.5:
            self._rests, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONG_REST)
        return sum(self._seen.share**place for place in range(1, depth + 1))

    def depth(
        self,
        cost: StepCost,
        num_rows: int,
        num_expected: float,
        chances: Sequence[float],
        most: int,
        spent_s: float,
    ) -> int:
        """Return how many more draft tokens per reply give the most tokens per second.

        Args:
            cost: of the steps that verify drafts, with `num_rows` so far, which yield `num_expected` tokens.
            chances: for each reply, the probability that all its draft tokens so far are accepted.
            spent_s: seconds that drafting took so far.
        """
        step_s = self.cost.seconds(len(chances)) if self.cost.is_measured else _SHARE_OF_STEP * cost.seconds(1)
        number, share, brings = len(chances), self._seen.share, sum(chances)
        best, fastest = 0, 0.0
        for depth in range(min(most, MAX_DEPTH) + 1):
            if depth:
                spent_s += step_s
                brings *= share
                num_expected += brings / _MIN_GAIN
            is_long = cost.recomputes and depth > MAX_AGAIN  # if rejected, a step without a draft follows
            wrong = 1.0 - brings / number if is_long else 0.0
            again_s = wrong * cost.seconds(number) if wrong else 0.0
            seconds = cost.seconds(num_rows + depth * number) + spent_s + again_s
            if (speed := (num_expected + wrong * number) / seconds) > fastest:
                best, fastest = depth, speed
        return best
