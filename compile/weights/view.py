"""Which rows of a stored tensor make a tensor of the model: all, some, or all in another order.

A model's tensor is one view, or several one behind the other. A stack of matrices `[E, N, K]` counts as `E * N` rows, a
vector's numbers are its rows. Knows numbers of rows, not files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = slice | NDArray[np.intp]  # of a stored tensor


@dataclass(frozen=True)
class Pairs:
    """Each head of `head_dim` rows has, behind `start` others, `rotary_dim` whose neighbours rotate against each other.

    The kernels rotate the first half of these against the second: row `half * i + j` is stored at `2 * j + i`.
    """

    head_dim: int
    rotary_dim: int
    start: int = 0

    def stored(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Where the rows are stored."""
        head, row = np.divmod(rows, self.head_dim)
        i, j = np.divmod(row - self.start, self.rotary_dim // 2)
        rotates = (row >= self.start) & (row < self.start + self.rotary_dim)
        turned = np.where(rotates, self.start + 2 * j + i, row)
        return head * self.head_dim + turned


@dataclass(frozen=True)
class View:
    """Rows `start:stop:step` of the stored tensor `name`; then their order, and what is done to each number.

    Attributes:
        plus: what is added.
        minus_exp: minus e to the power of each number is taken before.
    """

    name: str
    start: int = 0
    stop: int | None = None
    step: int = 1
    pairs: Pairs | None = None
    plus: float = 0.0
    minus_exp: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it has all rows."""
        return (self.start, self.stop, self.step) == (0, None, 1)

    def num_rows(self, num_stored: int) -> int:
        """How many rows it has of a tensor of `num_stored`."""
        return len(range(num_stored)[self.start : self.stop : self.step])

    def stored_rows(self, start: int, stop: int) -> Rows:
        """Where rows `[start, stop)` of the view are stored."""
        if self.pairs is not None:
            return self.start + self.step * self.pairs.stored(np.arange(start, stop))
        return slice(self.start + self.step * start, self.start + self.step * (stop - 1) + 1, self.step)


@dataclass(frozen=True)
class Piece:
    """Rows of one stored tensor."""

    view: View
    rows: Rows


def pieces(views: Sequence[View], num_stored: Sequence[int], rows: slice | None) -> Iterator[Piece]:
    """Where rows `[start, stop)` (all, if None) of views one behind the other are stored.

    >>> [piece.rows for piece in pieces([View("a", 2), View("b", step=2)], [4, 6], slice(1, 4))]
    [slice(3, 4, 1), slice(0, 3, 2)]
    """
    first, counts = 0, [view.num_rows(stored) for view, stored in zip(views, num_stored, strict=True)]
    start, stop, _ = (rows or slice(None)).indices(sum(counts))
    for view, count in zip(views, counts, strict=True):
        begin, end = max(start - first, 0), min(stop - first, count)
        if begin < end:
            yield Piece(view, view.stored_rows(begin, end))
        first += count
