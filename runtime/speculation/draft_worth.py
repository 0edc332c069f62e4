"""When guesses of a draft model pay: by what its steps take, and by how many were right that it found as likely.

Knows seconds, shares and counts; neither tokens nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .draft import Acceptance, StepCost

MAX_DEPTH = 16  # guesses behind one another
_EXPECTED, _KEPT, _KEPT_OF_BIN = 0.75, 0.95, 0.97
_BINS = (0.3, 0.6, 0.8, 0.95)  # how likely the draft model finds a guess
_EXPECTED_OF_BIN = (0.2, 0.4, 0.65, 0.85, 0.95)
_MIN_GAIN = 1.1  # that guesses must promise: estimates are off
_SHARE_OF_STEP = 0.25  # that a step of the draft takes, before one was measured
_SHORT_PROMPT = 16  # tokens that are computed in any case
_FIRST_TOKENS = 64  # of a reply that are expected to come, beside as many as came
_SAVED = 0.25  # of the time of a reply's tokens that guesses are expected to save
_SHORT_REST, _LONG_REST = 32, 1024  # steps without guesses, where they do not pay as they are wrong


def bin_of(likelihood: float) -> int:
    """Which guesses one is counted with.

    >>> bin_of(0.1), bin_of(0.99)
    (0, 4)
    """
    return sum(likelihood > bound for bound in _BINS)


def _seen_of_bin() -> list[Acceptance]:
    return [Acceptance(expected, _KEPT_OF_BIN) for expected in _EXPECTED_OF_BIN]


@dataclass
class DraftWorth:
    """What is known of a draft model's guesses.

    Attributes:
        cost: of the draft model's own steps.
    """

    cost: StepCost = field(default_factory=StepCost)
    _seen: Acceptance = field(default_factory=lambda: Acceptance(_EXPECTED, _KEPT))
    _seen_of_bin: list[Acceptance] = field(default_factory=_seen_of_bin)
    _token_s: float | None = None  # of a prompt
    _rests: int = 0  # steps that are still to be without guesses
    _next_rest: int = _SHORT_REST
    _is_off: bool = False

    def may_guess(self) -> bool:
        """Whether guesses are to be made in the step that begins now: they were worth it lately, or are tried again."""
        if self._rests:
            self._rests -= 1
            if not self._rests:
                self._seen = Acceptance(_EXPECTED, _KEPT)
        return not self._is_off and not self._rests

    def turn_off(self) -> None:
        """Make no guesses any more."""
        self._is_off = True

    def share_of(self, likely: int) -> float:
        """Of guesses in a bin, those that are right."""
        return self._seen_of_bin[likely].share

    def observe(self, likely: Sequence[int], num_accepted: int) -> None:
        """Note how many guesses of one draft, each in its bin, were right."""
        if not likely:
            return
        for place, each in enumerate(likely[: num_accepted + 1]):
            self._seen_of_bin[each].observe(1, int(place < num_accepted))
        self._seen.observe(len(likely), num_accepted)
        if 2 * num_accepted >= len(likely):
            self._next_rest = _SHORT_REST

    def observe_prompt(self, num_tokens: int, seconds: float) -> None:
        """Note how long so many tokens of a prompt took."""
        each_s = seconds / num_tokens
        self._token_s = each_s if self._token_s is None else 0.8 * self._token_s + 0.2 * each_s

    def pays_for_prompt(
        self, num_generated: int, num_left: int, cost: StepCost, num_rows: int, num_tokens: int
    ) -> bool:
        """Whether to compute so many tokens for guesses of the rest of a reply, which is not known to be long.

        Args:
            num_generated, num_left: tokens of the reply so far, and that may come.
            cost: of steps that guesses save, with `num_rows` each.
        """
        if num_tokens <= _SHORT_PROMPT or self._token_s is None:
            return True
        num_expected = min(num_left, _FIRST_TOKENS + num_generated)
        return num_tokens * self._token_s < _SAVED * num_expected * cost.seconds(num_rows) / max(1, num_rows)

    def promise(self, cost: StepCost, *, num_requests: int, num_rows: int, num_expected: float, most: int) -> float:
        """Right guesses to expect for each of some requests, if guesses are made for all of them in a step of
        `num_rows`; 0.0 where that does not pay."""
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
        """How many more guesses for each of some replies bring most tokens a second.

        Args:
            cost: of the steps that check guesses, with `num_rows` so far, which bring `num_expected` tokens.
            chances: that what was guessed so far is right, of each.
            spent_s: that guessing took so far.
        """
        step_s = self.cost.seconds(len(chances)) if self.cost.is_measured else _SHARE_OF_STEP * cost.seconds(1)
        number, share, brings = len(chances), self._seen.share, sum(chances)
        best, fastest = 0, 0.0
        for depth in range(min(most, MAX_DEPTH) + 1):
            if depth:
                spent_s += step_s
                brings *= share
                num_expected += brings / _MIN_GAIN
            wrong = 1.0 - brings / number if cost.recomputes else 0.0  # a step without guesses comes between
            again_s = wrong * cost.seconds(number) if wrong else 0.0
            seconds = cost.seconds(num_rows + depth * number) + spent_s + again_s
            if (speed := (num_expected + wrong * number) / seconds) > fastest:
                best, fastest = depth, speed
        return best
