"""y = W x for weights in integer codes and activations in 8 bits: integers inside a group, floats across groups.

One row (decode) streams the weights; more rows share them in tiles. All add the same numbers in the same order,
groups along K one after another, so a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from tvm.script.ir_builder import tirx as T

from ..codegen.builder import SIZE, Kernel, Memory, bound, either, parallel, prefetch, registers, serial, when
from ..codegen.targets import Target
from ..codegen.vector import Expr, lanes
from ..weights.codes import CODES
from ..weights.layout import CHUNK, CHUNKS, GROUP, ROW_BLOCK
from ..weights.scales import WeightScales, scale_dtypes
from .experts.entries import ExpertLists, ExpertRows
from .integer_dot import dot_of
from .integer_tile import SUPER_SPANS, TILINGS, UNPACKED_TILES, OneOutput, Tile, TileArithmetic
from .linear import LinearSpec, Neighbours, Slabs, Spans, TileRows
from .quantized_rows import QuantizedRows

UNPACKED = CHUNKS * CHUNK  # bytes of a group of a block, one for each code
SLAB_ROWS = 128  # that a thread multiplies with a span of weights before it goes on to the next
MANY_SPANS = 32  # of which each of 16 threads gets two or more; fewer are cut into blocks
PANEL = 14  # groups that are unpacked at a time: 7 KiB; with fewer, sums are stored more often


def integer_linear(spec: LinearSpec, target: Target, experts: ExpertRows | None = None) -> Any:
    """A PrimFunc `(codes, scales, offsets, bias, x_codes, x_scales, x_sums, y, num_rows) -> 0`.

    With `experts` the weights are those of all experts, one after another, each of `spec.num_outputs` outputs; what
    `find_slabs` wrote is the last argument, in place of `num_rows`, and rows of `y` are entries.

    Weights lie as `weights/layout.py` says; `offsets` and `bias` are read only if the spec has them. Activations lie as
    `quantized_rows.py` says. Writes (or adds to, if `spec.add_to_output`) columns `[column, column + N)` of `y`,
    float32 `[num_rows, y_stride]`.
    """
    with Kernel() as k:
        codes, scales, offsets, bias, x_codes, x_scales, x_sums, y, rows = k.arguments(
            codes="uint8",
            **scale_dtypes(spec.kind),
            bias="float32",
            x_codes="int32",
            x_scales="float32",
            x_sums="int32",
            y="float32",
            **({"lists": "int32"} if experts else {"num_rows": SIZE}),
        )
        x = QuantizedRows(x_codes, x_scales, x_sums, spec.num_inputs // GROUP, spec.wide)
        stored = WeightScales(spec.kind, scales, offsets, spec.num_inputs, target.has_f16c)
        dot = dot_of(target.integer_dot, CODES[spec.kind.codes].max_level)
        arithmetic = TileArithmetic(spec, dot, stored, x, bias, y, target.has_fma)
        matrix = _IntegerMatrix(arithmetic, target, codes, of_experts=experts is not None)
        if experts:
            matrix.times_entries(ExpertLists(rows, experts.limits), experts)
        else:
            matrix.times_rows(rows)
    return k.function


def integer_candidates(spec: LinearSpec, count: int, target: Target) -> Any:
    """A PrimFunc `(codes, scales, offsets, bias, x_codes, x_scales, x_sums, y, candidates, num_rows) -> 0`.

    Computes `count` outputs of each row, those of int32 `candidates` `[num_rows, count]`, and writes them over what is
    in `y`. They have the bits that `integer_linear` gives them. A candidate may stand twice.
    """
    with Kernel() as k:
        codes, scales, offsets, bias, x_codes, x_scales, x_sums, y, candidates, num_rows = k.arguments(
            codes="uint8",
            **scale_dtypes(spec.kind),
            bias="float32",
            x_codes="int32",
            x_scales="float32",
            x_sums="int32",
            y="float32",
            candidates="int32",
            num_rows=SIZE,
        )
        x = QuantizedRows(x_codes, x_scales, x_sums, spec.num_inputs // GROUP, spec.wide)
        stored = WeightScales(spec.kind, scales, offsets, spec.num_inputs, target.has_f16c)
        dot = dot_of(target.integer_dot, CODES[spec.kind.codes].max_level)
        arithmetic = TileArithmetic(spec, dot, stored, x, bias, y, target.has_fma)
        _IntegerMatrix(arithmetic, target, codes).times_candidates(candidates, count, num_rows)
    return k.function


class _IntegerMatrix:
    """Emits the loops over one weight matrix."""

    def __init__(self, arithmetic: TileArithmetic, target: Target, codes: Memory, *, of_experts: bool = False) -> None:
        self.arithmetic, self.codes, self.shuffled = arithmetic, codes, target.shuffled_bytes
        self.dot, self.kind = arithmetic.dot, arithmetic.kind
        self.format = CODES[self.kind.codes]
        self.groups = arithmetic.spec.num_inputs // GROUP
        self.blocks = arithmetic.spec.num_outputs // ROW_BLOCK
        self.tiling = TILINGS[self.dot.instruction]
        is_narrow = not of_experts and self.blocks < MANY_SPANS * self.tiling.blocks
        self.spans = Spans(self.blocks, 1 if is_narrow else self.tiling.blocks)
        # where halves of a group are scaled apart, that takes the free slots
        self.unpacks = self.tiling.unpacks or len(arithmetic.halves) > 1

    def times_rows(self, num_rows: Expr) -> None:
        """Slab by slab of rows: a thread keeps to its rows, from kernel to kernel."""
        many, count = self.tiling.many, self.spans.count
        slabs = Slabs((num_rows + (many - 1)) // many, SLAB_ROWS // many)
        with parallel(count * slabs.count) as item:
            slab, span = bound(item // count), bound(item % count)
            first = bound(slabs.first_tile(slab) * many)
            rows_of_slab = bound(T.min(slabs.first_tile(slab + 1) * many, num_rows) - first)
            self._times_span(
                span,
                rows_of_slab,
                lambda start, _: Neighbours(first + start, num_rows),
                lambda block, rows, width: Tile(self.arithmetic, block, rows, width),
            )

    def times_entries(self, lists: ExpertLists, experts: ExpertRows) -> None:
        """The same by slabs of entries: a thread goes through an expert's weights, and on to the next expert's."""
        count = self.spans.count
        with parallel(lists.num_slabs * count) as item:
            slab, span = lists.slab(item // count), bound(item % count)
            after = lists.slab(T.min(item // count + 1, lists.num_slabs - 1))
            expert, next_expert = bound(slab.expert * self.blocks), bound(after.expert * self.blocks)

            def tile(block: Expr, rows: int, width: int) -> Tile:
                end = bound(block + width)
                following = bound(T.if_then_else(end == self.blocks, next_expert, expert + end))
                return Tile(self.arithmetic, expert + block, rows, width, expert, following)

            self._times_span(span, slab.count, lambda start, rows: experts.rows(lists, slab, start, rows), tile)

    def _times_span(
        self,
        span: Expr,
        num_rows: Expr,
        rows_of: Callable[[Expr, int], TileRows],
        tile_of: Callable[[Expr, int, int], Tile],
    ) -> None:
        """Multiply a span of blocks with a slab of rows.

        Args:
            rows_of: the rows of a tile, by the first of them in the slab and their number.
            tile_of: a tile, by its first block, its rows and its blocks.
        """
        first = bound(span * self.spans.width)

        with either(num_rows == 1) as (one, more):
            with one:
                self.spans.each_width(span, lambda width: self._times(tile_of(first, 1, width), rows_of(T.int64(0), 1)))
            with more:
                self._times_many(first, num_rows, rows_of, tile_of)

    def _times_many(
        self,
        first: Expr,
        num_rows: Expr,
        rows_of: Callable[[Expr, int], TileRows],
        tile_of: Callable[[Expr, int, int], Tile],
    ) -> None:
        """Block by block: whole tiles, and a lower one for the rest of the rows.

        Tiles have an even number of rows, of which the last may be one too many: half as many kinds are compiled.
        """
        many, even = self.tiling.many, bound((num_rows + 1) // 2 * 2)
        tiles, rest = bound(even // many), bound(even % many)

        def times_tiles(block: Expr) -> None:
            tile = tile_of(block, many, 1)
            with serial(tiles) as t:
                self._times(tile, rows_of(t * many, many), t)

        with serial(T.min(T.int64(self.spans.width), self.blocks - first)) as n:
            block = bound(first + n)
            if self.unpacks:
                with either(tiles >= UNPACKED_TILES) as (enough, others):
                    with enough:
                        self._times_unpacked(tile_of(block, many, 1), tiles, lambda t: rows_of(t * many, many))
                    with others:
                        times_tiles(block)
            else:
                times_tiles(block)
            for rows in range(2, many, 2):
                with when(rest == rows):
                    self._times(tile_of(block, rows, 1), rows_of(tiles * many, rows), tiles)

    def times_candidates(self, candidates: Memory, count: int, num_rows: Expr) -> None:
        """One output of one row after another; the block of the next one is asked for meanwhile."""
        with parallel(num_rows * count) as item:
            row = bound(item // count)
            output = bound(T.Cast("int64", candidates[item]))
            after = bound(T.Cast("int64", candidates[T.min(item + 1, num_rows * count - 1)]))
            tile = OneOutput(self.arithmetic, output, after)
            self._times(tile, Neighbours(row, row + 1))

    def _times(self, tile: Tile, rows: TileRows, before: Expr = 0) -> None:
        """Multiply a tile, with weights as they are stored; `before` counts tiles of the same blocks."""

        def add(g: Expr) -> None:
            with when(before == 0):  # the first tile asks for all that follows
                self._fetch_ahead(tile, g)
            tile.add_group(g, rows, lambda n, chunk, piece: self._stored(tile.first_block + n, g, chunk, piece))

        tile.clear()
        if self.kind.is_nested:
            with serial(self.groups // SUPER_SPANS) as s:
                tile.clear_super()
                with serial(SUPER_SPANS) as j:
                    add(s * SUPER_SPANS + j)
                tile.add_super(s, rows)
        else:
            with serial(self.groups) as g:
                add(g)
        tile.finish(rows)

    def _times_unpacked(self, tile: Tile, num_tiles: Expr, rows_of: Callable[[Expr], TileRows]) -> None:
        """Multiply tiles of a block, panel by panel of groups: what is unpacked stays in the first level."""
        panel = SUPER_SPANS if self.kind.is_nested else min(PANEL, self.groups)
        num_panels = -(-self.groups // panel)
        unpacked = registers(panel * UNPACKED, "uint8")
        sums = registers(-(-SLAB_ROWS // tile.rows) * tile.size, "float32")

        def begin(p: Expr, t: Expr) -> None:
            with either(p == 0) as (first, later):
                with first:
                    tile.clear()
                with later:
                    tile.load(sums, t)

        with serial(num_panels) as p:
            count = bound(T.min(T.int64(panel), self.groups - p * panel))
            with serial(count) as g:
                self._unpack(unpacked, tile, p * panel + g, g)
            with serial(num_tiles) as t:
                rows = rows_of(t)
                if self.kind.is_nested:  # the sums take no registers while groups are added
                    tile.clear_super()
                else:
                    begin(p, t)
                with serial(count) as g:
                    with when(t == 0):
                        self._fetch_ahead(tile, p * panel + g)
                    tile.add_group(p * panel + g, rows, lambda n, *part: unpacked[self._loose(g, *part)])
                if self.kind.is_nested:
                    begin(p, t)
                    tile.add_super(p, rows)
                with either(p == num_panels - 1) as (last, earlier):
                    with last:
                        tile.finish(rows)
                    with earlier:
                        tile.store(sums, t)

    def _fetch_ahead(self, tile: Tile, g: Expr) -> None:
        """Ask for what the next blocks will read, as many groups of it as group `g` of this tile has.

        A thread's blocks are neighbours, but a tile reads several side by side, which no hardware follows.
        """
        first, size = tile.next_block * self.groups + g * tile.width, tile.width * self.format.group_bytes
        prefetch(self.codes, first * self.format.group_bytes, size, 1)
        self.arithmetic.scales.fetch(first, tile.width)

    def _stored(self, block: Expr, g: Expr, chunk: int, piece: int) -> Expr:
        start, size = (block * self.groups + g) * self.format.group_bytes, self.dot.piece_bytes
        return self.format.piece(self.codes, start, chunk, piece * size, size, self.shuffled)

    def _loose(self, g: Expr, chunk: int, piece: int) -> Expr:
        size = self.dot.piece_bytes
        return lanes(g * UNPACKED + chunk * CHUNK + piece * size, size)

    def _unpack(self, unpacked: Memory, tile: Tile, g: Expr, at: Expr) -> None:
        for chunk, piece in product(range(CHUNKS), range(self.dot.num_pieces)):
            unpacked[self._loose(at, chunk, piece)] = self._stored(tile.first_block, g, chunk, piece)
