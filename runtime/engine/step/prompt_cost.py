"""Model the cost of a step of prompts: a fixed time, and a time for each token that grows with its position.

Knows tokens and seconds, not requests or limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

FIXED_TOKENS = 24.0  # tokens assumed to cost as much as the fixed time, while all steps have the same size
_KEPT = 0.95  # weight of earlier steps, for each new one
_MIN_TOKENS = 8  # of a step that tells the fixed time: with fewer, the time does not grow with their number
_FOLLOWS = 0.3  # share of a step's deviation by which all earlier measurements are scaled
_CERTAIN = 0.001  # spread of step sizes from which the fixed time is known; weight of the earlier ratio
_DRIFT = 0.1  # share of the way to the upper bound, with each step
_POSITIONS = 1024.0  # tokens per unit of position, so that all numbers are of similar size
_LEAST_SHARE = 0.01  # least share of a step's time that its tokens take; with steps of equal duration it would be none
_NEAR = 0.125  # units of position: steps this near to one another tell little about farther ones
_UNKNOWNS = range(3)  # seconds of a step, of each of its tokens, and of each token per unit of position
_NON_NEGATIVE = ((0, 1, 2), (0, 1), (1, 2), (1,))  # unknowns that are fitted; those that came out below 0 are left out

_Vector = list[float]  # of three: NumPy would take ten times as long
_Matrix = list[_Vector]


class _FittedCost(NamedTuple):
    """The fitted cost; `fixed_s` is None if steps of one size do not tell."""

    fixed_s: float | None
    token_s: float
    position_s: float  # per token and unit of position
    mean_token_s: float


class PromptCost:
    """Seconds of a step as `fixed + tokens * (token + slope * position)`, fitted to recent measurements.

    Steps of one size cannot separate the fixed time from that of the tokens. Then the two keep the ratio that steps of
    other sizes showed earlier, so that a machine that slows down changes no ratio. Before there was another size, a
    decode step is the second one.

    >>> cost = PromptCost()
    >>> cost.observe(64, 32, 0.2 + 64 * 0.01)
    >>> cost.fixed_s is None
    True
    >>> cost.observe(448, 288, 0.2 + 448 * 0.01)
    >>> round(cost.fixed_s, 2), round(cost.token_s(0), 3)
    (0.2, 0.01)
    """

    def __init__(self) -> None:
        self._squares: _Matrix = [[0.0 for _ in _UNKNOWNS] for _ in _UNKNOWNS]
        self._products: _Vector = [0.0 for _ in _UNKNOWNS]
        self._ratio: float | None = None  # fixed time divided by that of a token, once steps of several sizes told it
        self._decode: tuple[float, float] | None = None  # rows and seconds
        self._fitted: _FittedCost | None = None

    @property
    def fixed_s(self) -> float | None:
        """The seconds that a step takes however few tokens it has; None if unknown."""
        fit = self._fit()
        return None if fit is None else fit.fixed_s

    def token_s(self, position: float) -> float | None:
        """Return the seconds that one more token at a position takes; None before the first measurement."""
        fit = self._fit()
        if fit is None:
            return None
        return max(fit.token_s + fit.position_s * position / _POSITIONS, fit.mean_token_s / 4)

    def observe(self, num_tokens: int, position: float, seconds: float, *, has_fixed: bool = True) -> None:
        """Record the duration of a step of `num_tokens` tokens at this mean position.

        Args:
            has_fixed: whether `seconds` includes the fixed time; it does not if a decode step was subtracted.
        """
        if seconds <= 0.0 or (num_tokens < _MIN_TOKENS and self._is_measured):
            return
        has_fixed = has_fixed and num_tokens >= _MIN_TOKENS
        row = [has_fixed / num_tokens, 1.0, position / _POSITIONS]
        if self._ratio is not None and (fit := self._fit()) is not None:
            expected_s = has_fixed * (fit.fixed_s or 0.0) + num_tokens * (self.token_s(position) or 0.0)
            if expected_s > 0.0:
                factor = 1 + _FOLLOWS * (seconds / expected_s - 1)
                self._products = [factor * product for product in self._products]
        self._squares = _with_row(
            [[_KEPT * square for square in squares] for squares in self._squares], row, num_tokens
        )
        self._products = [_KEPT * product + each * seconds for product, each in zip(self._products, row, strict=True)]
        self._fitted = None
        if self._ratio is not None or self._spread() >= _CERTAIN:
            self._ratio = self._estimate_ratio()

    def observe_decode(self, num_rows: float, seconds: float) -> None:
        """Record the duration of a step without prompts, of `num_rows` rows: an upper bound of the fixed time."""
        self._decode = num_rows, seconds
        self._fitted = None

    def _estimate_ratio(self) -> float:
        """Return a step's fixed seconds divided by a token's, moved a little towards the upper bound of that.

        With a larger ratio the scheduler makes larger steps. So a ratio that was measured too small is corrected, by
        steps of new sizes.
        """
        fit = self._solve()
        token_s = max(fit.token_s, fit.mean_token_s / 4)
        ratio = (fit.fixed_s or 0.0) / token_s
        most = FIXED_TOKENS if self._decode is None else self._decode[1] / token_s - self._decode[0]
        return ratio + _DRIFT * max(0.0, min(most, FIXED_TOKENS) - ratio)

    def _spread(self) -> float:
        """Return how much the sizes of steps with a fixed time vary, and so tell about it, in 1 / tokens."""
        own, mixed, _ = self._squares[0]
        return own - mixed * mixed / self._squares[1][1]

    @property
    def _is_measured(self) -> bool:
        return self._squares[1][1] > 0.0

    def _fit(self) -> _FittedCost | None:
        if self._fitted is None and self._is_measured:
            self._fitted = self._solve()
        return self._fitted

    def _solve(self) -> _FittedCost:
        """Return the cost that fits the recorded steps best, by non-negative least squares."""
        squares, products = [squares.copy() for squares in self._squares], self._products
        squares[2][2] += squares[1][1] * _NEAR**2
        is_known = True
        if self._ratio is not None:
            squares = _with_row(squares, [1.0, -self._ratio, 0.0], _CERTAIN)
        elif self._spread() < _CERTAIN:
            is_known = self._decode is not None
            if self._decode is not None:
                num_rows, seconds = self._decode
                row = [1 / num_rows, 1.0, 0.0]
                squares = _with_row(squares, row, num_rows)
                products = [product + each * seconds for product, each in zip(products, row, strict=True)]
        fixed_s, token_s, position_s = _non_negative(
            squares, products, _NON_NEGATIVE if is_known else _NON_NEGATIVE[2:]
        )
        all_s, num_tokens = self._products[1], self._squares[1][1]
        mean_token_s = max(all_s - fixed_s * self._squares[0][1], _LEAST_SHARE * all_s) / num_tokens
        if self._decode is not None:
            num_rows, seconds = self._decode
            fixed_s = min(fixed_s, max(0.0, seconds - num_rows * token_s))
        return _FittedCost(fixed_s if is_known else None, token_s, position_s, mean_token_s)


def _with_row(squares: _Matrix, row: _Vector, weight: float) -> _Matrix:
    """Return the normal equations' matrix with one more equation."""
    return [
        [square + weight * left * right for square, right in zip(squares_of, row, strict=True)]
        for squares_of, left in zip(squares, row, strict=True)
    ]


def _non_negative(squares: _Matrix, products: _Vector, choices: Sequence[Sequence[int]]) -> _Vector:
    """Solve the normal equations for the set of unknowns that fits best and is not negative; others are 0.

    The first set contains all others, so none fits better.
    """
    best, best_fit = [0.0 for _ in _UNKNOWNS], 0.0
    for chosen in choices:
        wanted = [products[row] for row in chosen]
        found = _solved([[squares[row][column] for column in chosen] for row in chosen], wanted)
        if found is None:
            continue
        fit = sum(product * value for product, value in zip(wanted, found, strict=True))
        if min(found) >= 0.0 and fit > best_fit:
            best, best_fit = [0.0 for _ in _UNKNOWNS], fit
            for row, value in zip(chosen, found, strict=True):
                best[row] = value
            if chosen == choices[0]:
                break
    return best


def _solved(matrix: _Matrix, values: _Vector) -> _Vector | None:
    """Solve `matrix @ found = values` by Gaussian elimination; the matrix is positive definite and needs no pivots.

    None if it is singular, as when a step of prompts had as many tokens as one that decoded.

    >>> _solved([[2.0, 1.0], [1.0, 3.0]], [4.0, 7.0]), _solved([[1.0, 2.0], [2.0, 4.0]], [1.0, 2.0])
    ([1.0, 2.0], None)
    """
    rows = [[*row, value] for row, value in zip(matrix, values, strict=True)]
    for i, row in enumerate(rows):
        if row[i] <= 0.0:
            return None
        for other in rows[i + 1 :]:
            factor = other[i] / row[i]
            for column in range(i, len(other)):
                other[column] -= factor * row[column]
    found = [0.0 for _ in rows]
    for i in reversed(range(len(rows))):
        known = sum(rows[i][column] * found[column] for column in range(i + 1, len(rows)))
        found[i] = (rows[i][-1] - known) / rows[i][i]
    return found
