"""Views of stored tensors: a tensor of the model is all rows of a stored one, some, or all reordered.

A model's tensor is one view, or several concatenated. A stack of matrices `[E, N, K]` counts as `E * N` rows; a
vector's numbers are its rows. Knows numbers of rows, not files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RowIndex = slice | NDArray[np.intp]  # rows of a stored tensor


@dataclass(frozen=True)
class RotaryPairs:
    """Row order of rotary heads whose neighbouring rows rotate together.

    Each head has `head_dim` rows; the `rotary_dim` rows after the first `start` rotate in neighbouring pairs. The
    kernels rotate the first half of these against the second: row `half * i + j` is stored at `2 * j + i`.
    """

    head_dim: int
    rotary_dim: int
    start: int = 0

    def stored(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the positions at which the rows are stored."""
        head, row = np.divmod(rows, self.head_dim)
        i, j = np.divmod(row - self.start, self.rotary_dim // 2)
        rotates = (row >= self.start) & (row < self.start + self.rotary_dim)
        turned = np.where(rotates, self.start + 2 * j + i, row)
        return head * self.head_dim + turned


@dataclass(frozen=True)
class View:
    """Rows `start:stop:step` of the stored tensor `name`, with an order of rows and a change of each number.

    Attributes:
        plus: number that is added, last.
        minus_exp: true to replace each number `x` by `-exp(x)`.
    """

    name: str
    start: int = 0
    stop: int | None = None
    step: int = 1
    pairs: RotaryPairs | None = None
    plus: float = 0.0
    minus_exp: bool = False

    @property
    def is_whole(self) -> bool:
        """True if the view has all rows, unchanged in number."""
        return (self.start, self.stop, self.step) == (0, None, 1)

    def num_rows(self, num_stored: int) -> int:
        """Return the number of rows that the view has of a tensor of `num_stored`."""
        return len(range(num_stored)[self.start : self.stop : self.step])

    def stored_rows(self, start: int, stop: int) -> RowIndex:
        """Return the stored positions of rows `[start, stop)` of the view."""
        if self.pairs is not None:
            return self.start + self.step * self.pairs.stored(np.arange(start, stop))
        return slice(self.start + self.step * start, self.start + self.step * (stop - 1) + 1, self.step)


@dataclass(frozen=True)
class StoredRows:
    """Rows of one stored tensor that are part of a model's tensor."""

    view: View
    rows: RowIndex


def pieces(views: Sequence[View], num_stored: Sequence[int], rows: slice | None) -> Iterator[StoredRows]:
    """Yield the stored pieces of rows `[start, stop)` (all, if None) of concatenated views.

    >>> [piece.rows for piece in pieces([View("a", 2), View("b", step=2)], [4, 6], slice(1, 4))]
    [slice(3, 4, 1), slice(0, 3, 2)]
    """
    first, counts = 0, [view.num_rows(stored) for view, stored in zip(views, num_stored, strict=True)]
    start, stop, _ = (rows or slice(None)).indices(sum(counts))
    for view, count in zip(views, counts, strict=True):
        begin, end = max(start - first, 0), min(stop - first, count)
        if begin < end:
            yield StoredRows(view, view.stored_rows(begin, end))
        first += count
