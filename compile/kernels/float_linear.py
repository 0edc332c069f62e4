"""y = W x for weights in f32, f16 or bf16 and activations in f32.

An output is one chain of multiply-adds over its inputs in order, for any number of rows. A row's result therefore does
not depend on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from tvm.script.ir_builder import tirx as T

from ..codegen.builder import SIZE, Kernel, Memory, bound, either, parallel, prefetch, registers, serial, when
from ..codegen.targets import IntegerDot, Target
from ..codegen.vector import Expr, const, fma, lanes, splat, storage_type, to_f32
from ..weights.layout import ROW_BLOCK
from .experts.entries import ExpertLists, ExpertRows
from .linear import LinearSpec, Slabs, Spans, TileRows, finish

DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
# Rows and blocks of a register tile: as many accumulators as leave registers for weights. There are 32 registers of 16
# lanes, 16 of 8 or 16 of 4; Arm has 32 of 4. An output is one chain, so a tile needs at least eight to hide the latency
# of a multiply-add.
TILES: dict[IntegerDot, tuple[int, int]] = {
    "vnni512": (8, 3),
    "madd512": (8, 3),
    "vnni256": (6, 1),
    "madd256": (6, 1),
    "portable": (3, 1),
    "usdot": (6, 1),
    "sdot": (6, 1),
    "smull": (6, 1),
}
MOST_BLOCKS = 3  # in a tile of few rows; more blocks are more memory streams at once
SLAB_ROWS = 64  # rows that a thread multiplies with one span of weights
AHEAD = 128  # prefetch distance in inputs; 32 gives two thirds of the speed


def float_linear(spec: LinearSpec, target: Target, x_stride: int, experts: ExpertRows | None = None) -> Any:
    """Return the PrimFunc `(weights, bias, x, y, num_rows) -> 0`; `x` is float32 `[num_rows, x_stride]`.

    Weights have the layout of `layout.py`; `y` and experts are as in `integer_linear`.
    """
    with Kernel() as k:
        weights, bias, x, y, rows = k.arguments(
            weights=storage_type(DTYPES[spec.kind.codes]),
            bias="float32",
            x="float32",
            y="float32",
            **({"lists": "int32"} if experts else {"num_rows": SIZE}),
        )
        matrix = _FloatMatrix(spec, target, x_stride, weights, bias, x, y)
        if experts:
            matrix.times_entries(ExpertLists(rows, experts.limits), experts)
        else:
            matrix.times_rows(rows)
    return k.function


@dataclass(frozen=True)
class _ShiftedRows:
    """Rows from `start` on; those before `first` belong to the previous tile and are not stored."""

    start: Expr
    first: Expr

    def x(self, m: int) -> Expr:
        """Return the input row of tile row `m`."""
        return self.start + m

    def y(self, m: int) -> Expr:
        """Return the output row of tile row `m`."""
        return self.start + m

    def is_wanted(self, m: int) -> Expr:
        """Return whether tile row `m` is stored."""
        return self.start + m >= self.first


class _FloatMatrix:
    """An emitter of the loops over one weight matrix."""

    def __init__(
        self, spec: LinearSpec, target: Target, x_stride: int, weights: Memory, bias: Memory, x: Memory, y: Memory
    ) -> None:
        self.spec, self.target, self.x_stride = spec, target, x_stride
        self.weights, self.bias, self.x, self.y = weights, bias, x, y
        self.inputs, self.blocks = spec.num_inputs, spec.num_outputs // ROW_BLOCK

    def times_rows(self, num_rows: Expr) -> None:
        """Multiply rows in tiles; fewer rows than a tile get a tile of their own height, with more blocks instead."""
        tile_rows, tile_blocks = TILES[self.target.integer_dot]
        for rows in range(1, tile_rows):
            with when(num_rows == rows):
                self._times_tiles(rows, max(1, min(MOST_BLOCKS, tile_rows * tile_blocks // rows)), num_rows)
        with when(num_rows >= tile_rows):
            self._times_tiles(tile_rows, tile_blocks, num_rows)

    def _times_tiles(self, rows: int, width: int, num_rows: Expr) -> None:
        """Multiply rows in tiles of `rows` rows and `width` blocks."""
        spans = Spans(self.blocks, width)
        slabs = Slabs((num_rows + (rows - 1)) // rows, max(1, SLAB_ROWS // rows))
        with parallel(slabs.count * spans.count) as item:
            # slabs are the outer loop: a thread keeps its rows from kernel to kernel
            slab, span = item // spans.count, item % spans.count

            def times_slab(width: int) -> None:
                with serial(slabs.tiles(slab)) as t:
                    # the last tile starts earlier to be whole, and stores only the missing rows
                    first_row = (slabs.first_tile(slab) + t) * rows
                    moved = _ShiftedRows(T.min(first_row, num_rows - rows), first_row)
                    self._times_tile(rows, width, span * spans.width, moved)

            spans.each_width(span, times_slab)

    def times_entries(self, lists: ExpertLists, experts: ExpertRows) -> None:
        """Multiply the rows of each slab of an expert's entries."""
        tile_rows, tile_blocks = TILES[self.target.integer_dot]
        spans = Spans(self.blocks, tile_blocks)
        with parallel(lists.num_slabs * spans.count) as item:
            slab, span = lists.slab(item // spans.count), bound(item % spans.count)
            expert = bound(slab.expert * self.blocks)

            def times_span(width: int) -> None:
                def times(rows: int) -> None:
                    with serial((slab.count + (rows - 1)) // rows) as t:
                        entries = experts.rows(lists, slab, t * rows, rows)
                        self._times_tile(rows, width, expert + span * spans.width, entries, expert)

                with either(slab.count == 1) as (one, more):
                    with one:
                        times(1)
                    with more:
                        times(tile_rows)

            spans.each_width(span, times_span)

    def _times_tile(self, rows: int, width: int, first_block: Expr, where: TileRows, expert: Expr = 0) -> None:
        """Compute a tile of rows times `width` blocks of the expert whose blocks begin at `expert`."""
        cells = {(m, n): registers(ROW_BLOCK, "float32") for m, n in product(range(rows), range(width))}
        for cell in cells.values():
            cell[lanes(0)] = const(0)
        with serial(self.inputs) as i:
            self._fetch_ahead(first_block, width, i)
            for (m, n), cell in cells.items():
                x = splat(self.x[where.x(m) * self.x_stride + i])
                cell[lanes(0)] = fma(x, self._weight(first_block + n, i), cell[lanes(0)], self.target.has_fma)
        for m in range(rows):
            with when(where.is_wanted(m)):
                for n in range(width):
                    value, block = cells[m, n][lanes(0)], first_block + n
                    finish(self.spec, value, self.bias, self.y, where.y(m), block - expert, block)

    def _fetch_ahead(self, first_block: Expr, width: int, i: Expr) -> None:
        """Prefetch the next inputs of these blocks, then of the next blocks: hardware prefetch stops at a page."""
        ahead = i + AHEAD
        if width > 1:  # past the end of a block is its neighbour, which is already being read
            ahead = ahead + T.if_then_else(ahead >= self.inputs, T.int64((width - 1) * self.inputs), T.int64(0))
        for n in range(width):
            prefetch(self.weights, ((first_block + n) * self.inputs + ahead) * ROW_BLOCK, 1, 1)

    def _weight(self, block: Expr, i: Expr) -> Expr:
        """Return 16 weights of input `i` as float32."""
        stored = self.weights[lanes((block * self.inputs + i) * ROW_BLOCK)]
        return to_f32(stored, DTYPES[self.spec.kind.codes], has_f16c=self.target.has_f16c)
