"""Make pages of rows that were read in two rounds: those of the second round after those of the first.

The order of rows does not matter after RoPE, so the pages of the first round need not be made again.
Knows rows and their tokens, not where they were read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from ...artifact.manifest import PAGE_SIZE
from ...model.batch import UInt8Array
from ...model.kv_rows import KVRows
from .row_selection import Tokens

_NOTHING: Final = 1 << 30  # marks no token


@dataclass(frozen=True)
class _Rows:
    """KV rows that were read together."""

    tokens: Tokens  # of the prefix, `[layers, kv_heads, n]`, or `_NOTHING`
    rows: KVRows


@dataclass
class ReadRounds:
    """Collects rows of two rounds: `add` them, call `end_first` after the first; `pages` has the ended rounds."""

    _first: list[_Rows] = field(default_factory=list)
    _second: list[_Rows] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)  # rows of each layer and head, by round that has ended
    _first_pages: UInt8Array | None = None

    def add(self, start: int, tokens: Tokens, rows: KVRows, is_wanted: npt.NDArray[np.bool_]) -> None:
        """Add rows of `tokens`, `[layers, kv_heads, n]`, counted from token `start` of the prefix.

        Args:
            is_wanted: by such a token, `[layers, kv_heads, tokens]`; other rows are dropped.
        """
        is_some = np.take_along_axis(is_wanted, tokens, axis=-1)
        mine = self._second if self._counts else self._first
        mine.append(_Rows(np.where(is_some, tokens + start, _NOTHING), rows))

    def end_first(self, count: int) -> None:
        """End the first round, with `count` wanted rows of each layer and head."""
        self._counts = [count]
        self._first_pages = _pages_of(self._first, _wanted_order(self._first, count))

    def end_second(self, count: int) -> None:
        """End the second round, with `count` wanted rows of each layer and head."""
        self._counts.append(count)

    def pages(self) -> UInt8Array:
        """Return the pages, `[N, page_bytes]`: the rows of each round in the order of the text."""
        assert self._first_pages is not None, "nothing was read"
        num_first, num_second = self._counts[0], sum(self._counts[1:])
        if not num_second:
            return self._first_pages
        order = _wanted_order(self._second, num_second)
        if num_first % PAGE_SIZE == 0:
            return np.concatenate([self._first_pages, _pages_of(self._second, order)])
        behind = sum(some.tokens.shape[-1] for some in self._first)
        both = [_wanted_order(self._first, num_first), behind + order]
        return _pages_of([*self._first, *self._second], np.concatenate(both, axis=-1))


def _wanted_order(read: Sequence[_Rows], count: int) -> Tokens:
    """Return the indices of the wanted rows among those read, in the order of the text."""
    tokens = np.concatenate([some.tokens for some in read], axis=-1)
    return np.asarray(np.argsort(tokens, axis=-1, kind="stable")[..., :count])


def _pages_of(read: Sequence[_Rows], order: Tokens) -> UInt8Array:
    """Return rows in the given order as pages, `[N, page_bytes]`."""
    return KVRows.pages_of([some.rows for some in read], order)
