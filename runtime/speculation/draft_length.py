"""How many guesses pay: what a row of a step costs beside what a guess brings.

Knows seconds, rows and shares; not where guesses come from.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_DRAFT = 32  # tokens
_KEPT = 0.98  # of what steps took before, with each new one
_ROW_SHARE = 0.05  # of a step of one row that another row takes, before anything was measured
_PRIOR_SPREAD = 4.0  # rows squared: so much does what was expected count beside what is measured
_MIN_GAIN = 1.15  # that a guess must promise: estimates are off


@dataclass
class StepCost:
    """Seconds of a step that decodes, as `base + row * rows`, of what was measured lately.

    >>> cost = StepCost()
    >>> for rows in (1, 1, 8, 8):
    ...     cost.observe(rows, 0.015 + 0.0005 * rows)
    >>> 0.0004 < cost.row_s < 0.0006
    True
    """

    _weight: float = 0.0
    _rows: float = 0.0
    _seconds: float = 0.0
    _rows_squared: float = 0.0
    _products: float = 0.0

    def observe(self, num_rows: int, seconds: float) -> None:
        """Note that a step of so many rows took so long."""
        self._weight = _KEPT * self._weight + 1
        self._rows = _KEPT * self._rows + num_rows
        self._seconds = _KEPT * self._seconds + seconds
        self._rows_squared = _KEPT * self._rows_squared + num_rows * num_rows
        self._products = _KEPT * self._products + num_rows * seconds

    @property
    def is_measured(self) -> bool:
        """Whether any step was."""
        return self._weight > 0

    @property
    def row_s(self) -> float:
        """Of one more row; towards what is expected where steps had as many rows."""
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        spread = max(0.0, self._rows_squared / self._weight - rows * rows)
        product = self._products / self._weight - rows * seconds
        expected = _ROW_SHARE * seconds / (1 + _ROW_SHARE * (rows - 1))
        return max(0.0, (product + _PRIOR_SPREAD * expected) / (spread + _PRIOR_SPREAD))

    def seconds(self, num_rows: int) -> float:
        """Of a step of so many rows."""
        mean_s, rows = self._seconds / self._weight, self._rows / self._weight
        return max(mean_s + self.row_s * (num_rows - rows), 0.1 * mean_s)


@dataclass
class Acceptance:
    """The share of guesses that were right, where those before them were; of one kind of draft.

    >>> seen = Acceptance(0.5)
    >>> seen.observe(8, 8)
    >>> seen.share > 0.8
    True
    """

    expected: float
    _right: float = 0.0
    _tried: float = 0.0

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Note how many of a draft were right; the first that was not is the last that was tried."""
        self._right = 0.8 * self._right + num_accepted
        self._tried = 0.8 * self._tried + min(num_drafted, num_accepted + 1)

    def forget(self) -> None:
        """Believe a little less of what was seen: kinds that were not tried for long get another chance."""
        self._right, self._tried = 0.95 * self._right, 0.95 * self._tried

    @property
    def share(self) -> float:
        """What to expect of the next guess."""
        return (self._right + 2 * self.expected) / (self._tried + 2)


def draft_length(share: float, cost: StepCost, *, num_rows: int, num_expected: float, most: int) -> int:
    """How many guesses to add to a step of `num_rows`, of which `num_expected` tokens come without them.

    Each is right with `share` if those before it were, so the next brings ever less, and costs a row.

    >>> cost = StepCost()
    >>> cost.observe(1, 0.015)
    >>> [draft_length(share, cost, num_rows=1, num_expected=1.0, most=8) for share in (0.02, 0.3, 0.9)]
    [0, 2, 8]
    """
    if not cost.is_measured:
        return 0
    number, brings = 0, share
    while number < most and brings * cost.seconds(num_rows + number) > _MIN_GAIN * cost.row_s * num_expected:
        num_expected += brings
        number, brings = number + 1, brings * share
    return number
