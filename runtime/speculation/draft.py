"""Draft tokens, their estimated acceptance, and the number of them that makes decoding fastest.

Each draft token costs a row of a step, and can save a step. Knows seconds, rows and shares; not where draft tokens come
from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

TREE = 0  # kinds of drafts: tokens of the tree; the length of a suffix, from 1 on; and the two below
FORCED = -1  # tokens that a grammar forces
MODEL = -2  # tokens of a draft model
MAX_DRAFT = 32  # tokens
MAX_AGAIN = 2  # accepted tokens of a rejected draft that a recurrent model computes again with a new draft
_KEPT = 0.98  # weight of earlier step times, with each new one
_ROW_SHARE = 0.05  # expected cost of another row, as a share of a step of one row, before any measurement
_PRIOR_SPREAD = 4.0  # rows squared: weight of the expected slope against measurements
_MIN_GAIN = 1.15  # the least speedup that a draft token must promise, because estimates are inexact
_KEPT_MET = 0.8  # weight of earlier steps with the same number of rows
_PRIOR_MET = 0.3  # weight of the line, in steps


@dataclass(frozen=True)
class Draft:
    """Draft tokens: candidates for the next tokens of a reply.

    Attributes:
        kind: their source.
        chances: for each token, the probability that it and all before it are accepted.
        num_forced: number of first tokens that come from a grammar; the rest is of the kind.
    """

    token_ids: tuple[int, ...]
    kind: int
    chances: tuple[float, ...] = ()
    num_forced: int = 0

    @classmethod
    def of(cls, token_ids: tuple[int, ...], kind: int, share: float) -> Draft:
        """Return a draft in which each token is accepted with probability `share` if those before it are."""
        return cls(token_ids, kind, tuple(accumulate([share] * len(token_ids), mul)))

    def first(self, number: int) -> Draft:
        """Return the first `number` tokens of the draft."""
        return Draft(self.token_ids[:number], self.kind, self.chances[:number], min(self.num_forced, number))


NO_DRAFT = Draft((), TREE)


@dataclass
class StepCost:
    """Seconds of a decode step by its number of rows, estimated from recent steps.

    Rows cost unequally, because kernels take several at a time. The second to fourth row can be nearly free, and the
    fifth can cost as much as all of these. So steps are averaged for each number of rows. A line, `base + row * rows`,
    covers numbers without recent steps. An average fades with each step of another number of rows. Otherwise a first
    step that was slow, because memory was new, would prevent its number from ever being tried again.

    >>> cost = StepCost()
    >>> for rows in (1, 4, 5, 8) * 9:
    ...     cost.observe(rows, 0.020 if rows <= 4 else 0.030)
    >>> [round(cost.seconds(rows), 2) for rows in (1, 4, 5, 8)]
    [0.02, 0.02, 0.03, 0.03]
    """

    recomputes: bool = False  # a recurrent model computes accepted tokens again if a later one is rejected
    _weight: float = 0.0
    _rows: float = 0.0
    _seconds: float = 0.0
    _rows_squared: float = 0.0
    _products: float = 0.0
    _row_s: float = 0.0  # slope of the line: seconds of one more row
    _met: dict[int, tuple[float, float, int]] = field(default_factory=dict)  # by rows: weight, seconds, last step
    _num_steps: int = 0
    _worth: dict[tuple[int, float], bool] = field(default_factory=dict)  # results of `is_worth_drafting` since a step

    def observe(self, num_rows: int, seconds: float) -> None:
        """Add the duration of a step of `num_rows` rows."""
        if seconds <= 0.0:  # the clock is too coarse
            return
        self._weight = _KEPT * self._weight + 1
        self._rows = _KEPT * self._rows + num_rows
        self._seconds = _KEPT * self._seconds + seconds
        self._rows_squared = _KEPT * self._rows_squared + num_rows * num_rows
        self._products = _KEPT * self._products + num_rows * seconds
        self._row_s = self._slope()
        self._num_steps += 1
        expected = self.seconds(num_rows)
        weight, total = self._met_lately(num_rows)
        seconds = min(max(seconds, 0.5 * expected), 2.0 * expected)  # one slow step says little
        self._met[num_rows] = _KEPT_MET * weight + 1, _KEPT_MET * total + seconds, self._num_steps
        self._worth.clear()

    @property
    def is_measured(self) -> bool:
        """Return whether any step was measured."""
        return self._weight > 0

    def seconds(self, num_rows: int) -> float:
        """Return the estimated seconds of a step of `num_rows` rows."""
        weight, total = self._met_lately(num_rows)
        return (total + _PRIOR_MET * self._line(num_rows)) / (weight + _PRIOR_MET)

    def speed(self, num_rows: int, num_expected: float, num_drafted: int, more: float, chance: float) -> float:
        """Return the tokens per second of a step of `num_rows` rows and `num_drafted` draft tokens.

        Args:
            num_expected: tokens that the step yields without draft tokens.
            more: expected number of accepted draft tokens.
            chance: probability that all of them are accepted. Otherwise, if there are many and the model recomputes, a
                step without draft tokens follows.
        """
        again = 1.0 - chance if self.recomputes and num_drafted > MAX_AGAIN else 0.0
        seconds = self.seconds(num_rows + num_drafted) + (again * self.seconds(num_rows) if again else 0.0)
        return (num_expected * (1.0 + again) + more) / seconds

    def is_worth_drafting(self, num_rows: int, num_expected: float) -> bool:
        """Return whether draft tokens could be worthwhile in a step of `num_rows` rows, if all were accepted.

        With many concurrent requests a row costs so much that no draft needs to be searched for.
        """
        key = num_rows, num_expected
        if key not in self._worth:
            self._worth[key] = self.is_measured and self._may_pay(num_rows, num_expected)
        return self._worth[key]

    def _may_pay(self, num_rows: int, num_expected: float) -> bool:
        """Return whether some number of draft tokens would give more tokens per second, if all were accepted."""
        speed = num_expected / self.seconds(num_rows)
        for number in range(1, MAX_DRAFT + 1):
            num_expected += 1.0 / _MIN_GAIN
            if num_expected / self.seconds(num_rows + number) > speed:
                return True
        return False

    def _met_lately(self, num_rows: int) -> tuple[float, float]:
        """Return the weight of recent steps of `num_rows` rows, which fades, and their seconds times that weight."""
        weight, total, at = self._met.get(num_rows, (0.0, 0.0, self._num_steps))
        kept = _KEPT ** (self._num_steps - at)
        return kept * weight, kept * total

    def _line(self, num_rows: int) -> float:
        mean_s, rows = self._seconds / self._weight, self._rows / self._weight
        return max(mean_s + self._row_s * (num_rows - rows), 0.1 * mean_s)

    def _slope(self) -> float:
        """Return the seconds of one more row, fitted to all steps.

        About the expected share of a step, if all steps had the same number of rows.
        """
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        spread = max(0.0, self._rows_squared / self._weight - rows * rows)
        product = self._products / self._weight - rows * seconds
        expected = _ROW_SHARE * seconds / (1 + _ROW_SHARE * (rows - 1))
        return max(0.0, (product + _PRIOR_SPREAD * expected) / (spread + _PRIOR_SPREAD))


@dataclass
class Acceptance:
    """The acceptance rate of one kind of draft: the share of tokens accepted, given that those before them were.

    >>> seen = Acceptance(0.5)
    >>> seen.observe(8, 8)
    >>> seen.share > 0.8
    True
    """

    expected: float
    kept: float = 0.8  # weight of earlier drafts, with each new one
    _right: float = 0.0
    _tried: float = 0.0

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Add a draft with `num_accepted` accepted tokens; tokens after the first rejected one do not count."""
        self._right = self.kept * self._right + num_accepted
        self._tried = self.kept * self._tried + min(num_drafted, num_accepted + 1)

    def forget(self) -> None:
        """Reduce the weight of observations, so that kinds that were not tried for long get another chance."""
        self._right, self._tried = 0.95 * self._right, 0.95 * self._tried

    @property
    def share(self) -> float:
        """Estimated probability that the next draft token is accepted."""
        return self.share_of(self.expected)

    def share_of(self, expected: float) -> float:
        """Return the same estimate for another expected rate."""
        return (self._right + 2 * expected) / (self._tried + 2)


def draft_length(chances: Sequence[float], cost: StepCost, *, num_rows: int, num_expected: float) -> int:
    """Return how many draft tokens to add to a step for the most tokens per second.

    The step has `num_rows` rows and yields `num_expected` tokens without them.

    Args:
        chances: for each draft token, the probability that it and those before it are accepted. Each token yields less
            than the one before, and costs a row.

    >>> cost = StepCost()
    >>> cost.observe(1, 0.015)
    >>> for share in (0.02, 0.3, 0.9):
    ...     print(draft_length([share**place for place in range(1, 9)], cost, num_rows=1, num_expected=1.0))
    0
    2
    8
    """
    return best_length(chances, cost, num_rows=num_rows, num_expected=num_expected)[0]


def best_length(chances: Sequence[float], cost: StepCost, *, num_rows: int, num_expected: float) -> tuple[int, float]:
    """Return the result of `draft_length`, and the tokens per second that it promises.

    Draft tokens count for a little less than estimated, because estimates are inexact.
    """
    if not cost.is_measured:
        return 0, 0.0
    best, fastest, more = 0, num_expected / cost.seconds(num_rows), 0.0
    for number, chance in enumerate(chances, start=1):
        more += chance / _MIN_GAIN
        if (speed := cost.speed(num_rows, num_expected, number, more, chance)) > fastest:
            best, fastest = number, speed
    return best, fastest
