"""Attention of a micro-tile of rows to one span of codes: integer products, with a softmax in between.

A score is the sum of products of codes times the scales of key and query. A row's weights, each times its value's
scale, become unsigned codes of 8 bits; 255 is the row's largest in the span. Integer sums are exact in any order. The
rest of a row's result depends on the row and the span alone, as in `attention_steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import tvm
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from tvm.script.ir_builder import tirx as T

from ...codegen.builder import Memory, bound, registers, serial
from ...codegen.lane_reductions import reduce_each
from ...codegen.powers import ROUGH_POWERS, exp2
from ...codegen.vector import LANES, ROUNDING, Expr, const, fma, lanes, splat
from ..attention_rows import LOWEST, QueryRows, RowScratch
from ..attention_shape import AttentionShape
from ..attention_steps import AttentionSteps
from ..integer_dot import PairDot, dot_of_values
from ..kv_pool import TOKENS_AT_ONCE
from ..kv_spans import KVPage, KVSpan, StoredPage
from ..micro_tiles import MicroTile
from .rows import CodePage, CodeRows, CodeScratch

MOST_CODE = 255
_Masked = Callable[[int, Expr, float], Expr]
_LEAST_WEIGHT = 1e-35  # minimum of a row's largest weight, so that its inverse is finite


def rows_of(shape: AttentionShape, *memories: Any) -> QueryRows:
    """Return the rows of attention for the pool's number format."""
    return (CodeRows if shape.layout.has_codes else QueryRows)(shape, *memories)


def steps_of(shape: AttentionShape, scratch: RowScratch) -> AttentionSteps:
    """Return the steps of attention for the pool's number format."""
    return (CodeSteps if shape.layout.has_codes else AttentionSteps)(shape, scratch)


class CodeSteps(AttentionSteps):
    """An emitter of attention's steps on codes; `scratch` is a `CodeScratch`.

    Rows that see nothing are skipped, as in `attention_steps.py`.
    """

    def __init__(self, shape: AttentionShape, scratch: RowScratch) -> None:
        super().__init__(shape, scratch)
        assert isinstance(scratch, CodeScratch) and shape.integer_dot is not None
        self.codes = scratch
        self.pairs, self.dot = PairDot.of(shape.integer_dot), dot_of_values(shape.integer_dot)
        self.scales_late = shape.scores.soft_cap is None  # true if scores lack the queries' scales at first

    def attend(self, tile: MicroTile, kv: KVSpan) -> None:
        """Emit all steps for one micro-tile, because their scratch is that of one micro-tile."""
        self.scores(tile, kv)
        self.weigh(tile, kv)
        self.join(tile, kv)

    def scores_of(self, tile: MicroTile, pages: Sequence[KVPage], numbers: Sequence[Expr]) -> None:
        """Multiply queries and the keys of `pages`; `numbers` are their positions among the weights."""
        dot, n = self.pairs, self.pairs.piece_lanes
        acc = [registers(len(pages) * LANES, "int32") for _ in range(tile.num_rows)]
        for sums in acc:
            for i in range(len(pages)):
                sums[lanes(i * LANES)] = splat(T.int32(0))
        stored = [_code_page(page) for page in pages]
        queries = [bound(self.codes.query(tile.first + r)) for r in range(tile.num_rows)]
        with serial(self.key_dim // 2) as d:
            for page in stored:
                page.fetch_values(d)
            for piece in range(dot.num_pieces):
                keys = [bound(page.keys_of(d, piece * n, n)) for page in stored]
                for r, sums in enumerate(acc):
                    query = bound(T.reinterpret("int32", self.memory[queries[r] + d]))
                    for i, key in enumerate(keys):
                        where = lanes(i * LANES + piece * n, n)
                        sums[where] = dot.accumulate(sums[where], key, query)
        scales = [bound(page.stored.key_scales()) for page in stored]
        for r, sums in enumerate(acc):
            for i, p in enumerate(numbers):
                score = T.Cast("float32x16", sums[lanes(i * LANES)]) * scales[i]
                if not self.scales_late:
                    score = self._capped(score * splat(self._query_scale(tile, r)))
                self.memory[self._weights(tile, r, p)] = score

    def weights_below(self, tile: MicroTile, r: int, p: Expr, largest: Expr) -> Expr:
        """Return the weights of a page's tokens relative to the score `largest`; unseen tokens have arbitrary ones."""
        return self._powers(tile, r, p, bound(T.float32(0) - largest))

    def weigh(self, tile: MicroTile, kv: KVSpan) -> None:
        """Turn scores into weights, and these into codes; unseen tokens of a page get 0."""
        seen = _SeenPages(tile)
        less = registers(LANES, "float32")
        less[lanes(0)] = const(0) - self._maxima(tile, seen)
        self._quantize_weights(tile, seen, self._weigh_seen(tile, seen, kv, less))

    def _maxima(self, tile: MicroTile, seen: _SeenPages) -> Expr:
        """Return the largest score of each row; also stored in the scratch."""
        num, memory, codes = tile.num_rows, self.memory, self.codes
        vectors = registers(num * LANES, "float32")
        for r in range(num):
            vectors[lanes(r * LANES)] = const(LOWEST)

        def largest(p: Expr, masked: _Masked) -> None:
            for r in range(num):
                where, score = lanes(r * LANES), memory[self._weights(tile, r, p)]
                vectors[where] = T.max(vectors[where], masked(r, score, LOWEST))

        seen.each(largest)
        maxima = bound(_in_order([vectors[lanes(r * LANES)] for r in range(num)], T.max))
        if self.scales_late:
            scaled = maxima * memory[lanes(codes.query_scale(tile.first))]
            maxima = bound(T.Select(maxima > const(LOWEST), scaled, const(LOWEST)))
        memory[lanes(codes.span_maxima(tile.index))] = maxima
        return maxima

    def _weigh_seen(self, tile: MicroTile, seen: _SeenPages, kv: KVSpan, less: Memory) -> Expr:
        """Turn scores into weights times the scales of values. Returns the largest of each row; stores the sums."""
        num, memory = tile.num_rows, self.memory
        vectors, tops = registers(num * LANES, "float32"), registers(num * LANES, "uint32")
        for r in range(num):
            vectors[lanes(r * LANES)] = const(0)
            tops[lanes(r * LANES)] = splat(T.reinterpret("uint32", T.float32(_LEAST_WEIGHT)))

        def weights(p: Expr, masked: _Masked) -> None:
            scales = bound(_code_page(kv.page(p)).stored.value_scales())
            for r in range(num):
                where = lanes(r * LANES)
                powers = bound(masked(r, self._powers(tile, r, p, less[r]), 0.0))
                vectors[where] = vectors[where] + powers
                scaled = bound(masked(r, powers * scales, 0.0))  # unseen rows may have any scale
                memory[self._weights(tile, r, p)] = scaled
                # compared as unsigned integers, in whose order NaN comes last
                tops[where] = T.max(tops[where], T.reinterpret("uint32x16", scaled))

        seen.each(weights)
        for r in range(num):
            memory[lanes(self.codes.span_sums(r))] = vectors[lanes(r * LANES)]
        return bound(T.reinterpret("float32x16", _in_order([tops[lanes(r * LANES)] for r in range(num)], T.max)))

    def _quantize_weights(self, tile: MicroTile, seen: _SeenPages, top: Expr) -> None:
        """Emit the rounding of each row's weights to codes, whose scale maps the row's largest weight to `MOST_CODE`.

        Args:
            top: a vector with each row's largest weight, by the row's index in the tile.
        """
        memory, codes = self.memory, self.codes
        memory[lanes(codes.code_scales)] = top * const(1 / MOST_CODE)
        inverse = registers(LANES, "float32")
        inverse[lanes(0)] = const(MOST_CODE) / top
        with serial(seen.count) as i:
            p = bound(seen.first + i)
            for r in range(tile.num_rows):
                whole = fma(memory[self._weights(tile, r, p)], splat(inverse[r]), const(ROUNDING), self.has_fma)
                code = T.Cast("uint8x16", T.reinterpret("int32x16", whole))
                memory[lanes(codes.codes(r) + p * 4, 4)] = T.reinterpret("float32x4", code)

    def join(self, tile: MicroTile, kv: KVSpan) -> None:
        """Emit the sums of a span's values times their weights, and add them to the running state of the softmax."""
        state, memory, codes = self.scratch.state, self.memory, self.codes
        factors = self.factors(tile.index, memory[lanes(codes.span_maxima(tile.index))])

        def part(index: Expr, start: Expr, size: int) -> None:
            acc = self._sums_of(tile, kv, start, size)

            def output(r: int) -> None:
                first = bound(state.output(tile.first + r) + start * LANES)
                scale = splat(bound(memory[codes.code_scales + r]))
                for i in range(size):
                    # the same operation as in a slot, when spans are joined later
                    added = T.Cast("float32x16", acc[r][i]) * scale
                    self.add(first + i * LANES, added, factors, r, LANES)

            self._each_row_that_sees(tile, output)

        self.shape.chunks(tile.num_rows, self.shape.layout.value_columns // LANES).each(part)

        def sums(r: int) -> None:
            self.add(state.sums(tile.first + r), memory[lanes(codes.span_sums(r))], factors, r, LANES)

        self._each_row_that_sees(tile, sums)

    def _sums_of(self, tile: MicroTile, kv: KVSpan, start: Expr, size: int) -> list[list[Expr]]:
        """Return vectors `[start, start + size)` of each row's sums of weight codes times value codes."""
        dot, seen = self.dot, _SeenPages(tile)
        width = dot.accumulator_lanes
        acc = [registers(size * width, "int32") for _ in range(tile.num_rows)]
        for sums in acc:
            for i in range(size * dot.num_pieces):
                sums[lanes(i * dot.piece_lanes, dot.piece_lanes)] = splat(T.int32(0), dot.piece_lanes)
        with serial(seen.count) as j:
            p = bound(seen.first + j)
            page = _code_page(kv.page(p))
            with serial(PAGE_SIZE // TOKENS_AT_ONCE) as group:
                page.fetch_next_keys(group)
                weights = [
                    bound(T.reinterpret("int32", self.memory[self.codes.codes(r) + p * 4 + group]))
                    for r in range(tile.num_rows)
                ]
                for i in range(size):
                    for piece in range(dot.num_pieces):
                        values = bound(
                            page.values_of(group, (start + i) * LANES, piece * dot.piece_bytes, dot.piece_bytes)
                        )
                        where = lanes(i * width + piece * dot.piece_lanes, dot.piece_lanes)
                        for r, sums in enumerate(acc):
                            sums[where] = dot.accumulate_values(sums[where], values, weights[r])
        return [
            [
                dot.outputs(
                    [
                        sums[lanes(i * width + piece * dot.piece_lanes, dot.piece_lanes)]
                        for piece in range(dot.num_pieces)
                    ]
                )
                for i in range(size)
            ]
            for sums in acc
        ]

    def _powers(self, tile: MicroTile, r: int, p: Expr, less: Expr) -> Expr:
        """Return 2 to the power of scores plus `less`."""
        score = self.memory[self._weights(tile, r, p)]
        if self.scales_late:
            exponent = fma(score, splat(self._query_scale(tile, r)), splat(less), self.has_fma)
        else:
            exponent = score + splat(less)
        return exp2(exponent, self.has_fma, ROUGH_POWERS)

    def _query_scale(self, tile: MicroTile, r: int) -> Expr:
        """Return the scale of a row's query."""
        return self.memory[self.codes.query_scale(tile.first + r)]

    def _weights(self, tile: MicroTile, r: int, p: Expr) -> Expr:
        """Return the index of the weights of a page's tokens."""
        return lanes(self.scratch.weights(r) + p * PAGE_SIZE)


class _SeenPages:
    """The pages of a span that any row of a micro-tile sees."""

    def __init__(self, tile: MicroTile) -> None:
        self.tile, self.first = tile, tile.first_page
        self.stop = bound((reduce(T.max, tile.seen) + (PAGE_SIZE - 1)) // PAGE_SIZE)
        # all rows see all pages before these
        self.full = T.int64(0) if tile.hidden else bound(reduce(T.min, tile.seen) // PAGE_SIZE)

    @property
    def count(self) -> Expr:
        """Number of pages."""
        return T.max(self.stop - self.first, T.int64(0))

    def each(self, emit: Callable[[Expr, _Masked], None]) -> None:
        """Call `emit(page, masked)`; `masked(row, vector, other)` has `other` in lanes that the row does not see."""
        tile = self.tile
        if not tile.hidden:
            with serial(self.full) as p:
                emit(p, lambda r, vector, other: vector)
        first = bound(T.max(self.first, self.full))
        with serial(T.max(self.stop - first, T.int64(0))) as i:
            p = bound(first + i)
            visible = [tile.visible(token, p * PAGE_SIZE) for token in range(len(tile.seen))]
            emit(p, lambda r, vector, other: T.Select(visible[r // tile.heads], vector, const(other)))


def _in_order(vectors: Sequence[Expr], combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """Reduce each vector into the lane of its index; other lanes are undefined."""
    reduced = reduce_each(vectors, combine)
    order = [*reduced.lane_of, *[0] * (LANES - len(vectors))]
    return tvm.tirx.Shuffle([reduced.vector] * (LANES // reduced.num_lanes), order)


def _code_page(page: KVPage) -> CodePage:
    """Return the codes of a page, which must be in the pool."""
    assert isinstance(page, StoredPage), "codes are read where they lie"
    return CodePage(page)
