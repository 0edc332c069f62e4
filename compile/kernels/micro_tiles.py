"""Micro-tiles: a few rows whose sums fit the registers, with the tokens of a span that each sees.

Knows neither keys nor values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from radixlm.runtime.artifact.manifest import PAGE_SIZE
from tvm.script.ir_builder import tirx as T

from ..codegen.builder import bound, serial, when
from ..codegen.vector import LANES, Expr, splat
from .attention_rows import QueryRows
from .attention_units import MAX_TILE, AttentionUnit


@dataclass(frozen=True)
class MicroTile:
    """A micro-tile of rows `[first, first + heads * len(seen))`: `heads` query heads of each of a few tokens.

    Token j sees the span's tokens `[hidden[j], seen[j])`, both 0 to SPAN; without `hidden`, from the first on. `index`
    counts the micro-tiles.
    """

    index: Expr
    first: Expr
    heads: int
    seen: Sequence[Expr]
    hidden: Sequence[Expr] = ()

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.heads * len(self.seen)

    @property
    def first_page(self) -> Expr:
        """The first of the span's pages that any row sees."""
        return bound(reduce(T.min, self.hidden) // PAGE_SIZE) if self.hidden else 0

    def sees(self, t: Expr, token: int) -> Expr:
        """Return whether a token sees token `t` of the span."""
        before = t < self.seen[token]
        return T.And(before, t >= self.hidden[token]) if self.hidden else before

    def visible(self, token: int, first: Expr) -> Expr:
        """Return a mask of the 16 tokens from `first` on that a token sees."""
        if self.hidden:
            return _between(self.hidden[token], self.seen[token], first)
        return T.ramp(T.int64(0), T.int64(1), LANES) < splat(bound(self.seen[token] - first))

    def rows_of(self, token: int) -> range:
        """Return the token's rows, counted from `first`."""
        return range(token * self.heads, (token + 1) * self.heads)

    def each_page(self, token: int) -> Callable[[Callable[[Expr, Expr | None], None]], None]:
        """Return a function that emits code for each page that a token sees.

        It calls its argument with the page and a mask of its seen tokens. The mask is None for a page that is always
        seen whole.
        """
        if self.hidden:
            return _pages_from(self.hidden[token], self.seen[token])
        return _pages_up_to(self.seen[token])


def _pages_up_to(seen: Expr) -> Callable[[Callable[[Expr, Expr | None], None]], None]:
    """Return a function that calls `emit(page, mask)` for each page of a span's first `seen` tokens.

    Whole pages have no mask.
    """
    full, rest = bound(seen // PAGE_SIZE), bound(seen % PAGE_SIZE)
    visible = T.ramp(T.int64(0), T.int64(1), LANES) < splat(rest)

    def each(emit: Callable[[Expr, Expr | None], None]) -> None:
        with serial(full) as p:
            emit(p, None)
        with when(rest > 0):
            emit(full, visible)

    return each


def _pages_from(hidden: Expr, seen: Expr) -> Callable[[Callable[[Expr, Expr | None], None]], None]:
    """Return the same as `_pages_up_to` for tokens `[hidden, seen)`; each page has a mask."""

    def each(emit: Callable[[Expr, Expr | None], None]) -> None:
        with serial((seen + (PAGE_SIZE - 1)) // PAGE_SIZE - hidden // PAGE_SIZE) as i:
            p = bound(hidden // PAGE_SIZE + i)
            emit(p, _between(hidden, seen, p * PAGE_SIZE))

    return each


def _between(start: Expr, stop: Expr, first: Expr) -> Expr:
    """Return a mask of the 16 tokens from `first` on that are in `[start, stop)`."""
    tokens = T.ramp(T.int32(0), T.int32(1), LANES)
    after, before = (splat(T.Cast("int32", end - first)) for end in (start, stop))
    return T.And(tokens >= after, tokens < before)


def each_micro_tile(
    rows: QueryRows, unit: AttentionUnit, sees: Callable[[Expr], tuple[Expr, ...]], emit: Callable[[MicroTile], None]
) -> None:
    """Call `emit` for the unit's whole micro-tiles, then for the remaining tokens, one by one.

    `sees(m)` is the end of the keys that token m sees, and their first if that can differ from 0.
    """
    tokens = rows.shape.tokens

    def micro_tile(index: Expr, row: Expr, size: int, first: Expr, count: int) -> None:
        keys = [sees(unit.token(first + j)) for j in range(count)]
        seen, hidden = ([bound(end[i]) for end in keys if i < len(end)] for i in range(2))
        emit(MicroTile(bound(index), row, size, seen, hidden))

    def part(index: Expr, start: Expr, size: int) -> None:
        micro = bound(index * rows.num_micros(MAX_TILE))
        with serial(unit.num_tokens // tokens) as i:
            row = bound(rows.first_row(start, size, i * tokens, MAX_TILE))
            micro_tile(micro + i, row, size, i * tokens, tokens)
        if tokens > 1:
            with serial(unit.num_tokens % tokens) as i:
                token = bound(unit.num_tokens // tokens * tokens + i)
                row = bound(rows.first_row(start, size, token, MAX_TILE))
                micro_tile(micro + unit.num_tokens // tokens + i, row, size, token, 1)

    rows.shape.heads.each(part)
