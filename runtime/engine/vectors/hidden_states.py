"""Read the hidden states of an embedding model's text that its vector is made from.

Knows one text's rows and how they are pooled; `results.py` makes the client's result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...artifact.text_vectors import Pooling
from ..step.readers import LogitRows

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PooledState:
    """The pooled hidden states of a text, `[hidden_size]`."""

    values: Float64Array


class HiddenStateReader:
    """A reader of the rows of an embedding model's text.

    Rows are added in order of position, one by one, so the sum has the same bits however steps split the text.

    Args:
        num_tokens: number of tokens of the text.
    """

    def __init__(self, pooling: Pooling, num_tokens: int) -> None:
        first = num_tokens - 1 if pooling == "last" else 0
        self._last = num_tokens - 1
        self._positions = range(first, 1 if pooling == "cls" else num_tokens)
        self._num_read = 0
        self._sum: Float64Array | None = None

    @property
    def num_reusable(self) -> int | None:
        """Number of tokens before the first missing row; the last token's row is always computed."""
        return None if self._is_complete or self._next == self._last else self._next

    @property
    def reading(self) -> PooledState | None:
        """The mean of the rows, once all were read."""
        return PooledState(self._sum / self._num_read) if self._sum is not None and self._is_complete else None

    def wanted(self, start: int, stop: int, length: int) -> range:
        """Return the positions of rows that were not read yet."""
        return range(max(start, self._next), max(start, min(stop, self._positions.stop)))

    def read(self, rows: LogitRows) -> bool:
        """Add the hidden states of the step's rows to the sum. Return False if one is not finite."""
        step, stop = rows.step, rows.first + len(rows.positions)
        if not all(step.is_finite[rows.first : stop]):
            return False
        for row in range(rows.first, stop):
            state = step.values[row].astype(np.float64)
            self._sum = state if self._sum is None else self._sum + state
        self._num_read += len(rows.positions)
        return True

    @property
    def _next(self) -> int:
        """The position of the first row that is missing."""
        return self._positions.start + self._num_read

    @property
    def _is_complete(self) -> bool:
        return self._num_read == len(self._positions)
