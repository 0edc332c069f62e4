"""y = W x for weights in integer codes and activations in 8 bits: integers inside a group, floats across groups.

One row (decode) streams the weights; more rows share them in tiles. Both add the same numbers in the same order,
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
from .experts.entries import SLAB_ENTRIES, ExpertLists, ExpertRows
from .integer_dot import Instruction, dot_of
from .integer_tile import SUPER_SPANS, OneOutput, Tile, TileArithmetic
from .linear import LinearSpec, Neighbours, Slabs, Spans, TileRows
from .quantized_rows import QuantizedRows

UNPACKED = CHUNKS * CHUNK  # bytes of a group of a block, one for each code
# Rows and blocks of a register tile: with 512 bits 12 integer and 12 float accumulators, of 32 registers.
TILES: dict[Instruction, tuple[int, int]] = {
    "vnni512": (4, 3),
    "vnni256": (4, 1),
    "madd512": (4, 1),
    "madd256": (2, 1),
    "pairs512": (4, 2),
    "pairs256": (2, 1),
    "portable": (2, 1),
}
SLAB_TILES = 32  # register tiles of rows that share unpacked weights
PANEL = 14  # groups that are unpacked at a time: 21 KiB for three blocks; with 7, sums are stored more often
DIRECT_TILES = 2


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
        matrix = _IntegerMatrix(arithmetic, target, codes)
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

    def __init__(self, arithmetic: TileArithmetic, target: Target, codes: Memory) -> None:
        self.arithmetic, self.codes, self.shuffled = arithmetic, codes, target.shuffled_bytes
        self.dot, self.kind = arithmetic.dot, arithmetic.kind
        self.format = CODES[self.kind.codes]
        self.groups = arithmetic.spec.num_inputs // GROUP
        self.blocks = arithmetic.spec.num_outputs // ROW_BLOCK
        self.tile_rows, self.tile_blocks = TILES[self.dot.instruction]

    def times_rows(self, num_rows: Expr) -> None:
        """A few rows meet the weights as they are stored; for many, weights are unpacked once for 128 rows."""
        num_tiles = (num_rows + (self.tile_rows - 1)) // self.tile_rows
        spans = Spans(self.blocks, self.tile_blocks)

        def few(tile_rows: int) -> None:
            def times(span: Expr, width: int) -> None:
                tile = Tile(self.arithmetic, span * self.tile_blocks, tile_rows, width)
                tiles = (num_rows + (tile_rows - 1)) // tile_rows
                self._times_few(tile, tiles, lambda t: Neighbours(t * tile_rows, num_rows))

            with parallel(spans.count) as span:
                spans.each_width(span, lambda width: times(span, width))

        def many() -> None:
            slabs = Slabs(num_tiles, SLAB_TILES)
            with parallel(spans.count * slabs.count) as item:
                # slabs outermost: a thread keeps to its rows, from kernel to kernel
                slab, span = item // spans.count, item % spans.count
                first, tiles = slabs.first_tile(slab), slabs.tiles(slab)

                def times_slab(width: int) -> None:
                    tile = Tile(self.arithmetic, span * self.tile_blocks, self.tile_rows, width)
                    self._times_slab(tile, tiles, lambda t: Neighbours((first + t) * tile.rows, num_rows))

                spans.each_width(span, times_slab)

        with either(num_rows == 1) as (one, more):
            with one:
                few(1)
            with more, either(num_tiles <= DIRECT_TILES) as (some, others):
                with some:
                    few(self.tile_rows)
                with others:
                    many()

    def times_entries(self, lists: ExpertLists, experts: ExpertRows) -> None:
        """The same, slab by slab: a thread goes through an expert's weights, and on to the next expert's."""
        spans = Spans(self.blocks, self.tile_blocks)
        with parallel(lists.num_slabs * spans.count) as item:
            slab, span = lists.slab(item // spans.count), bound(item % spans.count)
            after = lists.slab(T.min(item // spans.count + 1, lists.num_slabs - 1))
            num_tiles = bound((slab.count + (self.tile_rows - 1)) // self.tile_rows)
            expert = bound(slab.expert * self.blocks)
            first_block = bound(expert + span * self.tile_blocks)

            def times(width: int, tile_rows: int, num_tiles: Expr, step: Callable[..., None]) -> None:
                last = span == spans.count - 1
                following = bound(T.if_then_else(last, after.expert * self.blocks, first_block + width))
                tile = Tile(self.arithmetic, first_block, tile_rows, width, expert, following)
                step(tile, num_tiles, lambda t: experts.rows(lists, slab, t * tile_rows, tile_rows))

            def times_span(width: int) -> None:
                with either(slab.count == 1) as (one, more):
                    with one:
                        times(width, 1, T.int64(1), self._times_few)
                    with more, either(num_tiles <= DIRECT_TILES) as (some, others):
                        with some:
                            times(width, self.tile_rows, num_tiles, self._times_few)
                        with others:
                            times(width, self.tile_rows, num_tiles, self._times_slab)

            spans.each_width(span, times_span)

    def times_candidates(self, candidates: Memory, count: int, num_rows: Expr) -> None:
        """One output of one row after another; the block of the next one is asked for meanwhile."""
        with parallel(num_rows * count) as item:
            row = bound(item // count)
            output = bound(T.Cast("int64", candidates[item]))
            after = bound(T.Cast("int64", candidates[T.min(item + 1, num_rows * count - 1)]))
            tile = OneOutput(self.arithmetic, output, after)
            self._times_few(tile, T.int64(1), lambda t: Neighbours(row, row + 1))

    def _times_few(self, tile: Tile, num_tiles: Expr, rows_of: Callable[[Expr], TileRows]) -> None:
        with serial(num_tiles) as t:
            rows = rows_of(t)

            def add(g: Expr) -> None:
                self._fetch_ahead(tile.next_block, t * self.groups + g, tile.width)
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

    def _times_slab(self, tile: Tile, num_tiles: Expr, rows_of: Callable[[Expr], TileRows]) -> None:
        panel = SUPER_SPANS if self.kind.is_nested else min(PANEL, self.groups)
        num_panels = -(-self.groups // panel)
        unpacked = registers(panel * tile.width * UNPACKED, "uint8")
        sums = registers(max(SLAB_TILES, SLAB_ENTRIES // tile.rows) * tile.size, "float32")

        def begin(t: Expr, is_first: bool) -> None:
            if is_first:
                tile.clear()
            else:
                tile.load(sums, t)

        def add_panel(p: Expr, is_first: bool, is_last: bool) -> None:
            count = T.min(T.int64(panel), self.groups - p * panel)
            with serial(count) as g:
                self._unpack(unpacked, tile, p * panel + g, g)
            with serial(num_tiles) as t:
                rows = rows_of(t)
                if self.kind.is_nested:
                    tile.clear_super()
                else:
                    begin(t, is_first)
                with serial(count) as g:
                    with when(t < tile.width):  # a block each: what comes after the next span is too early
                        self._fetch_ahead(tile.next_block, t * self.groups + p * panel + g, 1)
                    tile.add_group(
                        p * panel + g,
                        rows,
                        lambda n, chunk, piece: self._loose(unpacked, g * tile.width + n, chunk, piece),
                    )
                if self.kind.is_nested:  # the sums take no registers while groups are added
                    begin(t, is_first)
                    tile.add_super(p, rows)
                if is_last:
                    tile.finish(rows)
                else:
                    tile.store(sums, t)

        add_panel(T.int64(0), True, num_panels == 1)
        if num_panels > 2:
            with serial(num_panels - 2) as p:
                add_panel(p + 1, False, False)
        if num_panels > 1:
            add_panel(T.int64(num_panels - 1), False, True)

    def _fetch_ahead(self, block: Expr, step: Expr, num_groups: int) -> None:
        """Ask for what the next blocks will read: step by step `num_groups` groups, from `block` on.

        A thread's blocks are neighbours, but a tile reads several side by side, which no hardware follows.
        """
        first = block * self.groups + step * num_groups
        size = num_groups * self.format.group_bytes
        prefetch(self.codes, first * self.format.group_bytes, size, 1)
        self.arithmetic.scales.fetch(first, num_groups)

    def _stored(self, block: Expr, g: Expr, chunk: int, piece: int) -> Expr:
        start, size = (block * self.groups + g) * self.format.group_bytes, self.dot.piece_bytes
        return self.format.piece(self.codes, start, chunk, piece * size, size, self.shuffled)

    def _loose(self, unpacked: Memory, index: Expr, chunk: int, piece: int) -> Expr:
        size = self.dot.piece_bytes
        return unpacked[lanes(index * UNPACKED + chunk * CHUNK + piece * size, size)]

    def _unpack(self, unpacked: Memory, tile: Tile, g: Expr, local: Expr) -> None:
        size = self.dot.piece_bytes
        for n, chunk, piece in product(range(tile.width), range(CHUNKS), range(self.dot.num_pieces)):
            where = (local * tile.width + n) * UNPACKED + chunk * CHUNK + piece * size
            unpacked[lanes(where, size)] = self._stored(tile.first_block + n, g, chunk, piece)
