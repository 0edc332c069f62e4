"""Rows that were read in two rounds, as pages: those of the second round behind those of the first.

In which order rows lie does not matter after RoPE, so that what was made of the first round need not be made again.
Knows rows and the tokens that they are of, not where they were read.
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

_NOTHING: Final = 1 << 30  # stands for no token


@dataclass(frozen=True)
class _Rows:
    tokens: Tokens  # of the prefix, `[layers, kv_heads, n]`, or `_NOTHING`
    rows: KVRows


@dataclass
class ReadRounds:
    """`add` what is read, `end_first` after the first round; then `pages` has that, and after `end_second` all."""

    _first: list[_Rows] = field(default_factory=list)
    _second: list[_Rows] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)  # of the rounds that have ended, rows of each layer and head
    _first_pages: UInt8Array | None = None

    def add(self, start: int, tokens: Tokens, rows: KVRows, is_wanted: npt.NDArray[np.bool_]) -> None:
        """Rows of `tokens`, `[layers, kv_heads, n]`, counted from token `start` of the prefix.

        Args:
            is_wanted: by such a token, `[layers, kv_heads, tokens]`; the others are left out.
        """
        is_some = np.take_along_axis(is_wanted, tokens, axis=-1)
        mine = self._second if self._counts else self._first
        mine.append(_Rows(np.where(is_some, tokens + start, _NOTHING), rows))

    def end_first(self, count: int) -> None:
        """All wanted rows of the first round are there, `count` of each layer and head."""
        self._counts = [count]
        self._first_pages = _pages_of(self._first, _order_of(self._first, count))

    def end_second(self, count: int) -> None:
        """The same of the second round."""
        self._counts.append(count)

    def pages(self) -> UInt8Array:
        """`[N, page_bytes]`: of each round its rows in the order of the text."""
        assert self._first_pages is not None, "nothing was read"
        num_first, num_second = self._counts[0], sum(self._counts[1:])
        if not num_second:
            return self._first_pages
        order = _order_of(self._second, num_second)
        if num_first % PAGE_SIZE == 0:
            return np.concatenate([self._first_pages, _pages_of(self._second, order)])
        behind = sum(some.tokens.shape[-1] for some in self._first)
        both = [_order_of(self._first, num_first), behind + order]
        return _pages_of([*self._first, *self._second], np.concatenate(both, axis=-1))


def _order_of(read: Sequence[_Rows], count: int) -> Tokens:
    """Where the wanted rows lie among those that were read, in the order of the text."""
    tokens = np.concatenate([some.tokens for some in read], axis=-1)
    return np.asarray(np.argsort(tokens, axis=-1, kind="stable")[..., :count])


def _pages_of(read: Sequence[_Rows], order: Tokens) -> UInt8Array:
    return KVRows.pages_of([some.rows for some in read], order)
