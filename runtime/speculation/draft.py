"""Draft tokens of what a reply goes on with, how sure they are, and how many of them pay.

A row of a step costs something beside what a draft token brings. Knows seconds, rows and shares; not where draft tokens
come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

TREE = 0  # the kinds of guesses: what the tree knows; the length of a suffix, from 2 on; and these
FORCED = -1  # what a grammar leaves no choice in
MODEL = -2  # of a draft model
MAX_DRAFT = 32  # tokens
_KEPT = 0.98  # of what steps took before, with each new one
_ROW_SHARE = 0.05  # of a step of one row that another row takes, before anything was measured
_PRIOR_SPREAD = 4.0  # rows squared: so much does what was expected count beside what is measured
_MIN_GAIN = 1.15  # that a guess must promise: estimates are off
_KEPT_MET = 0.8  # of what steps of as many rows took
_PRIOR_MET = 0.3  # steps that the line counts for


@dataclass(frozen=True)
class Draft:
    """Guesses of the next tokens.

    Attributes:
        kind: where they come from.
        chances: by token, that it and all before it are right.
        num_forced: the first of them, that a grammar gave; the rest is of the kind.
    """

    token_ids: tuple[int, ...]
    kind: int
    chances: tuple[float, ...] = ()
    num_forced: int = 0

    @classmethod
    def of(cls, token_ids: tuple[int, ...], kind: int, share: float) -> Draft:
        """Guesses of which each is right with `share`, where those before it are."""
        return cls(token_ids, kind, tuple(accumulate([share] * len(token_ids), mul)))

    def first(self, number: int) -> Draft:
        """The first so many of them."""
        return Draft(self.token_ids[:number], self.kind, self.chances[:number], min(self.num_forced, number))


NO_DRAFT = Draft((), TREE)


@dataclass
class StepCost:
    """Seconds of a step that decodes, by its rows, of what was measured lately.

    Rows cost unequally: kernels take several at a time, so that the second to fourth may be nearly free and the fifth
    cost as much as these together. So steps of each number of rows are counted by themselves, and there is a line,
    `base + row * rows`, for numbers that were not met lately.

    >>> cost = StepCost()
    >>> for rows in (1, 4, 5, 8) * 9:
    ...     cost.observe(rows, 0.020 if rows <= 4 else 0.030)
    >>> [round(cost.seconds(rows), 2) for rows in (1, 4, 5, 8)]
    [0.02, 0.02, 0.03, 0.03]
    """

    recomputes: bool = False  # what was right of a draft, in another step, if not all was: a recurrent model
    _weight: float = 0.0
    _rows: float = 0.0
    _seconds: float = 0.0
    _rows_squared: float = 0.0
    _products: float = 0.0
    _row_s: float = 0.0  # of one more row, on the line
    _met: dict[int, tuple[float, float]] = field(default_factory=dict)  # by rows, the weight and sum of their seconds
    _worth: dict[tuple[int, float], bool] = field(default_factory=dict)  # what `is_worth_guesses` said since a step

    def observe(self, num_rows: int, seconds: float) -> None:
        """Note that a step of so many rows took so long."""
        if seconds <= 0.0:  # the clock is too coarse
            return
        self._weight = _KEPT * self._weight + 1
        self._rows = _KEPT * self._rows + num_rows
        self._seconds = _KEPT * self._seconds + seconds
        self._rows_squared = _KEPT * self._rows_squared + num_rows * num_rows
        self._products = _KEPT * self._products + num_rows * seconds
        self._row_s = self._slope()
        expected = self.seconds(num_rows)
        weight, total = self._met.get(num_rows, (0.0, 0.0))
        seconds = min(max(seconds, 0.5 * expected), 2.0 * expected)  # one slow step says little
        self._met[num_rows] = _KEPT_MET * weight + 1, _KEPT_MET * total + seconds
        self._worth.clear()

    @property
    def is_measured(self) -> bool:
        """Whether any step was."""
        return self._weight > 0

    def seconds(self, num_rows: int) -> float:
        """Of a step of so many rows."""
        weight, total = self._met.get(num_rows, (0.0, 0.0))
        return (total + _PRIOR_MET * self._line(num_rows)) / (weight + _PRIOR_MET)

    def speed(self, num_rows: int, num_expected: float, num_drafted: int, more: float, chance: float) -> float:
        """Tokens a second of a step of `num_rows` that brings `num_expected`, with so many drafted beside.

        Args:
            more: tokens to expect of these.
            chance: that all of them are right; else, where the model recomputes, a step without drafts comes between.
        """
        again = 1.0 - chance if self.recomputes and num_drafted else 0.0
        seconds = self.seconds(num_rows + num_drafted) + (again * self.seconds(num_rows) if again else 0.0)
        return (num_expected * (1.0 + again) + more) / seconds

    def is_worth_guesses(self, num_rows: int, num_expected: float) -> bool:
        """Whether guesses would pay in a step of so many rows, which brings so many tokens without them, if all were
        right: beside many streams a row costs so much that none need be looked for.
        """
        key = num_rows, num_expected
        if key not in self._worth:
            self._worth[key] = self.is_measured and self._may_pay(num_rows, num_expected)
        return self._worth[key]

    def _may_pay(self, num_rows: int, num_expected: float) -> bool:
        speed = num_expected / self.seconds(num_rows)
        for number in range(1, MAX_DRAFT + 1):
            num_expected += 1.0 / _MIN_GAIN
            if num_expected / self.seconds(num_rows + number) > speed:
                return True
        return False

    def _line(self, num_rows: int) -> float:
        mean_s, rows = self._seconds / self._weight, self._rows / self._weight
        return max(mean_s + self._row_s * (num_rows - rows), 0.1 * mean_s)

    def _slope(self) -> float:
        """Of the line; towards what is expected where steps had as many rows."""
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        spread = max(0.0, self._rows_squared / self._weight - rows * rows)
        product = self._products / self._weight - rows * seconds
        expected = _ROW_SHARE * seconds / (1 + _ROW_SHARE * (rows - 1))
        return max(0.0, (product + _PRIOR_SPREAD * expected) / (spread + _PRIOR_SPREAD))


@dataclass
class Acceptance:
    """The share of guesses that were right, where those before them were; of one kind of draft.

    >>> seen = Acceptance(0.5)
    >>> seen.observe(8, 8)
    >>> seen.share > 0.8
    True
    """

    expected: float
    kept: float = 0.8  # of what was seen before, with each new draft
    _right: float = 0.0
    _tried: float = 0.0

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Note how many of a draft were right; the first that was not is the last that was tried."""
        self._right = self.kept * self._right + num_accepted
        self._tried = self.kept * self._tried + min(num_drafted, num_accepted + 1)

    def forget(self) -> None:
        """Believe a little less of what was seen: kinds that were not tried for long get another chance."""
        self._right, self._tried = 0.95 * self._right, 0.95 * self._tried

    @property
    def share(self) -> float:
        """What to expect of the next guess."""
        return self.share_of(self.expected)

    def share_of(self, expected: float) -> float:
        """The same, where so much was expected of it."""
        return (self._right + 2 * expected) / (self._tried + 2)


def draft_length(chances: Sequence[float], cost: StepCost, *, num_rows: int, num_expected: float) -> int:
    """How many guesses to add to a step of `num_rows`, of which `num_expected` tokens come without them: as many as
    bring most tokens a second.

    Args:
        chances: by guess, that it and those before it are right; each brings less than the last, and costs a row.

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
    """The same, and how many tokens a second that promises; guesses count for a little less, as estimates are off."""
    if not cost.is_measured:
        return 0, 0.0
    best, fastest, more = 0, num_expected / cost.seconds(num_rows), 0.0
    for number, chance in enumerate(chances, start=1):
        more += chance / _MIN_GAIN
        if (speed := cost.speed(num_rows, num_expected, number, more, chance)) > fastest:
            best, fastest = number, speed
    return best, fastest
