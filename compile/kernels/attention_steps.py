"""Attention of a micro-tile of rows to one span of KV, all sums in registers: scores, weights, weighted values.

A row's result depends on the row and the span alone, whatever other rows are computed with it. A score is added along
the head's elements, an output along the span's tokens, one after another. Spans are joined in order, by the rescaling
of flash attention (Dao et al., 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

from radixlm.runtime.artifact.manifest import PAGE_SIZE
from tvm.script.ir_builder import tirx as T

from ..codegen.builder import Memory, bound, registers, serial, when
from ..codegen.lane_reductions import max_of_lanes
from ..codegen.powers import exp2
from ..codegen.vector import LANES, Expr, const, fma, lanes, splat, tanh
from .attention_rows import LOWEST, RowScratch
from .attention_shape import AttentionShape
from .kv_spans import BLOCK_PAGES, SPAN, KVPage, KVSpan
from .micro_tiles import MicroTile


class AttentionSteps:
    """An emitter of attention's steps; `scratch` holds the queries times the scale of scores over ln 2."""

    def __init__(self, shape: AttentionShape, scratch: RowScratch) -> None:
        self.shape, self.scratch, self.memory, self.has_fma = shape, scratch, scratch.memory, shape.has_fma
        self.key_dim, self.value_dim = shape.layout.key_dim, shape.layout.value_dim
        self.n = shape.n

    def scores(self, tile: MicroTile, kv: KVSpan) -> None:
        """Multiply queries and keys, in whole pages, up to the last row that any query sees."""
        skipped = tile.first_page
        pages = bound((reduce(T.max, tile.seen) + (PAGE_SIZE - 1)) // PAGE_SIZE - skipped)
        if len(tile.seen) == 1:  # one page has too few chains of additions, so the last page is computed again instead
            with serial((pages + (BLOCK_PAGES - 1)) // BLOCK_PAGES) as block:
                self._scores_of_block(tile, kv, block * BLOCK_PAGES + skipped, pages + skipped - 1)
        else:
            with serial(pages // BLOCK_PAGES) as block:
                self._scores_of_block(tile, kv, block * BLOCK_PAGES + skipped, None)
            with serial(pages % BLOCK_PAGES) as i:
                p = bound(pages // BLOCK_PAGES * BLOCK_PAGES + skipped + i)
                self.scores_of(tile, [kv.page(p)], [p])

    def _scores_of_block(self, tile: MicroTile, kv: KVSpan, first_page: Expr, last: Expr | None) -> None:
        """Multiply queries and the keys of a block of pages, the last of which is at most `last`."""

        def part(index: Expr, start: Expr, size: int) -> None:
            first = bound(first_page + start)
            pages = [first + i for i in range(size)]
            there = pages if last is None else [T.min(p, last) for p in pages]
            # some blocks would exceed the span; these end with its last page, which is written again
            self.scores_of(tile, [kv.page(p) for p in there], there if tile.hidden else pages)

        self.shape.chunks(tile.num_rows, BLOCK_PAGES).each(part)

    def scores_of(self, tile: MicroTile, pages: Sequence[KVPage], numbers: Sequence[Expr]) -> None:
        """Multiply queries and the keys of `pages`; `numbers` are their positions among the weights."""
        acc = [registers(len(pages) * LANES, "float32") for _ in range(tile.num_rows)]
        queries = bound(self.scratch.query(tile.first))
        for sums in acc:
            for i in range(len(pages)):
                sums[lanes(i * LANES)] = const(0)
        step = pages[0].elements_in_line
        step = step if self.key_dim % step == 0 else 1
        with serial(self.key_dim // step) as line:
            for page in pages:
                page.fetch_value(line * step)
            for d in (line * step + j for j in range(step)):
                for r, sums in enumerate(acc):
                    query = splat(self.memory[queries + r * self.key_dim + d])
                    for i, page in enumerate(pages):
                        where = lanes(i * LANES)
                        sums[where] = fma(query, page.key(d), sums[where], self.has_fma)
        for r, sums in enumerate(acc):
            for i, p in enumerate(numbers):
                self.memory[self._weights(tile, r, p)] = self._capped(sums[lanes(i * LANES)])

    def _capped(self, score: Expr) -> Expr:
        """Return a score as an exponent of two; with a cap, `score` is its argument before the hyperbolic tangent."""
        cap = self.shape.scores.soft_cap
        return score if cap is None else const(cap / math.log(2)) * tanh(bound(score), self.has_fma)

    def _weights(self, tile: MicroTile, r: int, p: Expr) -> Expr:
        """Return the index of the weights of a page's tokens."""
        return lanes(self.scratch.weights(tile.first + r) + p * PAGE_SIZE)

    def weights_below(self, tile: MicroTile, r: int, p: Expr, largest: Expr) -> Expr:
        """Return the weights of a page's tokens relative to the score `largest`; unseen tokens have arbitrary ones."""
        return exp2(self.memory[self._weights(tile, r, p)] - splat(largest), self.has_fma)

    def weigh(self, tile: MicroTile, kv: KVSpan) -> None:
        """Turn scores into weights `2 ** (score - the row's maximum)`, in place; unseen tokens of a page get 0."""
        for token in range(len(tile.seen)):
            self._weigh_token(tile, token)

    def _weigh_token(self, tile: MicroTile, token: int) -> None:
        """Turn the scores of a token's rows into weights."""
        rows = tile.rows_of(token)
        vectors = registers(tile.heads * LANES, "float32")
        each_seen_page = tile.each_page(token)

        def score(r: int, p: Expr) -> Expr:
            return self.memory[self._weights(tile, r, p)]

        def each_page(emit: Any) -> None:
            def page(p: Expr, mask: Expr | None) -> None:
                for i, r in enumerate(rows):
                    emit(lanes(i * LANES), r, p, mask)

            each_seen_page(page)

        def largest(where: Expr, r: int, p: Expr, mask: Expr | None) -> None:
            seen_scores = score(r, p) if mask is None else T.Select(mask, score(r, p), const(LOWEST))
            vectors[where] = T.max(vectors[where], seen_scores)

        for i in range(tile.heads):
            vectors[lanes(i * LANES)] = const(LOWEST)
        each_page(largest)
        maxima = [bound(max_of_lanes(vectors[lanes(i * LANES)])) for i in range(tile.heads)]
        for r, maximum in zip(rows, maxima, strict=True):
            self.memory[self.scratch.span_maxima(tile.index) + r] = maximum

        def weight(where: Expr, r: int, p: Expr, mask: Expr | None) -> None:
            weights = exp2(score(r, p) - splat(maxima[r - rows.start]), self.has_fma)
            weights = bound(weights if mask is None else T.Select(mask, weights, const(0)))
            self.memory[self._weights(tile, r, p)] = weights
            vectors[where] = vectors[where] + weights

        for i in range(tile.heads):
            vectors[lanes(i * LANES)] = const(0)
        each_page(weight)
        for i, r in enumerate(rows):
            self.memory[lanes(self.scratch.span_sums(tile.first + r))] = vectors[lanes(i * LANES)]

    def join(self, tile: MicroTile, kv: KVSpan) -> None:
        """Sum the weighted values, and join the span to the state."""
        state = self.scratch.state
        factors = self.factors(tile.index, self.memory[lanes(self.scratch.span_maxima(tile.index))])

        def part(index: Expr, start: Expr, size: int) -> None:
            acc = self._values_of(tile, kv, start, size)

            def output(r: int) -> None:
                first = bound(state.output(tile.first + r) + start * self.n)
                for i in range(size):
                    self.add(first + i * self.n, acc[r][lanes(i * self.n, self.n)], factors, r, self.n)

            self._each_row_that_sees(tile, output)

        self.shape.chunks(tile.num_rows, self.value_dim // self.n).each(part)

        def sums(r: int) -> None:
            added = self.memory[lanes(self.scratch.span_sums(tile.first + r))]
            self.add(state.sums(tile.first + r), added, factors, r, LANES)

        self._each_row_that_sees(tile, sums)

    def factors(self, micro: Expr, span_maxima: Expr) -> Memory:
        """Return the factors of the state's and of the span's outputs, 16 rows each; the state gets the new maxima."""
        where = bound(self.scratch.state.maxima(micro))
        old, new = bound(self.memory[lanes(where)]), bound(span_maxima)
        largest = bound(T.max(old, new))
        factors = registers(2 * LANES, "float32")
        factors[lanes(0)] = exp2(old - largest, self.has_fma)
        factors[lanes(LANES)] = exp2(new - largest, self.has_fma)
        self.memory[lanes(where)] = largest
        return factors

    def add(self, where: Expr, span: Expr, factors: Memory, r: int, n: int) -> None:
        """Add `n` lanes of a span's result to the state, at index `where`."""
        added = span * splat(factors[LANES + r], n)
        self.memory[lanes(where, n)] = fma(self.memory[lanes(where, n)], splat(factors[r], n), added, self.has_fma, n)

    def _each_row_that_sees(self, tile: MicroTile, emit: Any) -> None:
        """Emit code for each row whose token sees the span: for others, even adding 0 would turn -0 into 0."""
        for token, seen in enumerate(tile.seen):
            if len(tile.seen) == 1 and not tile.hidden:
                for r in tile.rows_of(token):
                    emit(r)
            else:
                with when(seen > (tile.hidden[token] if tile.hidden else 0)):
                    for r in tile.rows_of(token):
                        emit(r)

    def _values_of(self, tile: MicroTile, kv: KVSpan, start: Expr, size: int) -> list[Memory]:
        """Return vectors `[start, start + size)` of the weighted sums.

        Unseen values are left out, not multiplied by 0, because they may be NaN.
        """
        n = self.n
        acc = [registers(size * n, "float32") for _ in range(tile.num_rows)]
        for sums in acc:
            for i in range(size):
                sums[lanes(i * n, n)] = const(0, n)
        weights = bound(self.scratch.weights(tile.first))

        def token(page: KVPage, p: Expr, t: Expr, masked: bool) -> None:
            for r, sums in enumerate(acc):
                weight = splat(self.memory[weights + r * SPAN + p * PAGE_SIZE + t], n)
                for i in range(size):
                    where = lanes(i * n, n)
                    total = fma(weight, page.value(t, (start + i) * n, n), sums[where], self.has_fma, n)
                    if masked:
                        sees = tile.sees(p * PAGE_SIZE + t, r // tile.heads)
                        total = T.Select(splat(sees, n), total, sums[where])
                    sums[where] = total

        def some(first: Expr, count: Expr) -> None:
            """Add tokens that not all rows see."""
            with serial(count) as i:
                p = bound((first + i) // PAGE_SIZE)
                token(kv.page(p), p, (first + i) % PAGE_SIZE, True)

        def whole(p: Expr, first: Expr, count: Expr) -> None:
            """Add tokens of a page that all rows see."""
            page = kv.page(p)
            with serial(count) as t:
                page.fetch_next_key(first + t)
                token(page, p, first + t, False)

        common = bound(reduce(T.min, tile.seen))
        if not tile.hidden:
            with serial(common // PAGE_SIZE) as p:
                whole(p, 0, PAGE_SIZE)
            with when(common % PAGE_SIZE > 0):
                whole(bound(common // PAGE_SIZE), 0, common % PAGE_SIZE)
        else:
            last = bound(reduce(T.max, tile.seen))
            first = bound(T.min(reduce(T.max, tile.hidden), last))
            common = bound(T.max(common, first))
            if len(tile.seen) > 1:
                lowest = bound(reduce(T.min, tile.hidden))
                some(lowest, first - lowest)
            with serial((common + (PAGE_SIZE - 1)) // PAGE_SIZE - first // PAGE_SIZE) as i:
                p = bound(first // PAGE_SIZE + i)
                skipped = bound(T.max(first - p * PAGE_SIZE, T.int64(0)))
                whole(p, skipped, T.min(common - p * PAGE_SIZE, T.int64(PAGE_SIZE)) - skipped)
        if len(tile.seen) > 1:
            some(common, reduce(T.max, tile.seen) - common)
        return acc
