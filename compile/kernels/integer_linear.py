"""y = W x for weights in integer codes and activations in 8 bits: integers inside a group, floats across groups.

One row (decode) streams the weights; more rows share them in tiles. Both add the same numbers in the same order,
groups along K one after another, so a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from tvm.script.ir_builder import tirx as T

from ..codegen.builder import SIZE, Kernel, Memory, either, parallel, prefetch, registers, serial, when
from ..codegen.targets import Target
from ..codegen.vector import Expr, const, fma, lanes, splat, to_f32
from ..weights.codes import CODES
from ..weights.layout import CHUNK, CHUNKS, GROUP, ROW_BLOCK
from .integer_dot import Instruction, dot_of
from .linear import LinearSpec, Slabs, Spans, finish
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
SLAB_TILES = 16  # register tiles of rows that share unpacked weights
PANEL = 12  # groups that are unpacked at a time: 18 KiB of L1 for three blocks
DIRECT_TILES = 2


def integer_linear(spec: LinearSpec, target: Target) -> Any:
    """A PrimFunc `(codes, scales, minima, bias, x_codes, x_scales, x_sums, y, num_rows) -> 0`.

    Weights lie as `weights/layout.py` says; `minima` and `bias` are read only if the spec has them. Activations lie as
    `quantized_rows.py` says. Writes (or adds to, if `spec.add_to_output`) columns `[column, column + N)` of `y`,
    float32 `[num_rows, y_stride]`.
    """
    with Kernel() as k:
        codes, scales, minima, bias, x_codes, x_scales, x_sums, y, num_rows = k.arguments(
            codes="uint8",
            scales="float16",
            minima="float16",
            bias="float32",
            x_codes="int32",
            x_scales="float32",
            x_sums="int32",
            y="float32",
            num_rows=SIZE,
        )
        x = QuantizedRows(x_codes, x_scales, x_sums, spec.num_inputs // GROUP, spec.wide)
        matrix = _IntegerMatrix(spec, target, codes, scales, minima, bias, x, y)
        matrix.times_rows(num_rows)
    return k.function


class _IntegerMatrix:
    """Emits the loops over one weight matrix."""

    def __init__(
        self,
        spec: LinearSpec,
        target: Target,
        codes: Memory,
        scales: Memory,
        minima: Memory,
        bias: Memory,
        x: QuantizedRows,
        y: Memory,
    ) -> None:
        self.spec, self.kind, self.x, self.y = spec, spec.kind, x, y
        self.codes, self.scales, self.minima, self.bias = codes, scales, minima, bias
        self.format = CODES[spec.kind.name]
        self.dot, self.has_fma = dot_of(target.integer_dot, self.format.max_code), target.has_fma
        self.has_f16c = target.has_f16c
        self.num_bytes = 2 if spec.wide else 1  # of an activation's code
        self.groups, self.blocks = spec.num_inputs // GROUP, spec.num_outputs // ROW_BLOCK
        # with a scale per 16 inputs the two halves of a group are scaled apart
        self.halves: tuple[int | None, ...] = (None,) if spec.kind.group == GROUP else (0, 1)
        self.tile_rows, self.tile_blocks = TILES[self.dot.instruction]

    def times_rows(self, num_rows: Expr) -> None:
        """A few rows meet the weights as they are stored; for many, weights are unpacked once for 64 rows."""
        num_tiles = (num_rows + (self.tile_rows - 1)) // self.tile_rows
        spans = Spans(self.blocks, self.tile_blocks)

        def few(tile_rows: int) -> None:
            with parallel(spans.count) as span:
                first = span * self.tile_blocks
                spans.each_width(span, lambda width: self._times_few(_Tile(self, first, tile_rows, width), num_rows))

        def many() -> None:
            slabs = Slabs(num_tiles, SLAB_TILES)
            with parallel(spans.count * slabs.count) as item:
                # slabs outermost: a thread keeps to its rows, from kernel to kernel
                slab, span = item // spans.count, item % spans.count
                first, tiles = slabs.first_tile(slab), slabs.tiles(slab)

                def times_slab(width: int) -> None:
                    tile = _Tile(self, span * self.tile_blocks, self.tile_rows, width)
                    self._times_slab(tile, first, tiles, num_rows)

                spans.each_width(span, times_slab)

        with either(num_rows == 1) as (one, more):
            with one:
                few(1)
            with more, either(num_tiles <= DIRECT_TILES) as (some, others):
                with some:
                    few(self.tile_rows)
                with others:
                    many()

    def _times_few(self, tile: _Tile, num_rows: Expr) -> None:
        with serial((num_rows + (tile.rows - 1)) // tile.rows) as t:
            tile.clear()
            with serial(self.groups) as g:
                self._fetch_ahead(tile.first_block + tile.width, t * self.groups + g, tile.width)
                tile.add_group(
                    g, t * tile.rows, lambda n, chunk, piece: self._stored(tile.first_block + n, g, chunk, piece)
                )
            tile.finish(t * tile.rows, num_rows)

    def _times_slab(self, tile: _Tile, first_tile: Expr, tiles: Expr, num_rows: Expr) -> None:
        panel = min(PANEL, self.groups)
        num_panels = -(-self.groups // panel)
        unpacked = registers(panel * tile.width * UNPACKED, "uint8")
        sums = registers(SLAB_TILES * tile.size, "float32")

        def add_panel(p: Expr, is_first: bool, is_last: bool) -> None:
            count = T.min(T.int64(panel), self.groups - p * panel)
            with serial(count) as g:
                self._unpack(unpacked, tile, p * panel + g, g)
            with serial(tiles) as t:
                first_row = (first_tile + t) * tile.rows
                if is_first:
                    tile.clear()
                else:
                    tile.load(sums, t)
                with serial(count) as g:
                    self._fetch_ahead(tile.first_block + tile.width, t * self.groups + p * panel + g, 1)
                    tile.add_group(
                        p * panel + g,
                        first_row,
                        lambda n, chunk, piece: self._loose(unpacked, g * tile.width + n, chunk, piece),
                    )
                if is_last:
                    tile.finish(first_row, num_rows)
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
        scale_bytes = num_groups * len(self.halves) * ROW_BLOCK * 2
        prefetch(self.scales, first * len(self.halves) * ROW_BLOCK, scale_bytes, 2)
        if self.kind.has_minimum:
            prefetch(self.minima, first * len(self.halves) * ROW_BLOCK, scale_bytes, 2)

    def _stored(self, block: Expr, g: Expr, chunk: int, piece: int) -> Expr:
        start, size = (block * self.groups + g) * self.format.group_bytes, self.dot.piece_bytes
        return self.format.piece(self.codes, start, chunk, piece * size, size)

    def _loose(self, unpacked: Memory, index: Expr, chunk: int, piece: int) -> Expr:
        size = self.dot.piece_bytes
        return unpacked[lanes(index * UNPACKED + chunk * CHUNK + piece * size, size)]

    def _unpack(self, unpacked: Memory, tile: _Tile, g: Expr, local: Expr) -> None:
        size = self.dot.piece_bytes
        for n, chunk, piece in product(range(tile.width), range(CHUNKS), range(self.dot.num_pieces)):
            where = (local * tile.width + n) * UNPACKED + chunk * CHUNK + piece * size
            unpacked[lanes(where, size)] = self._stored(tile.first_block + n, g, chunk, piece)

    def _clear(self, acc: Memory, accumulators: int) -> None:
        size = self.dot.piece_lanes
        for i in range(accumulators * self.dot.num_pieces):
            acc[lanes(i * size, size)] = splat(T.int32(0), size)

    def _accumulate(self, acc: Memory, i: int, piece: int, weights: Expr, x: Expr) -> None:
        size = self.dot.piece_lanes
        where = lanes(i * self.dot.accumulator_lanes + piece * size, size)
        acc[where] = self.dot.accumulate(acc[where], weights, x)

    def _outputs(self, acc: Memory, i: int) -> Expr:
        size, base = self.dot.piece_lanes, i * self.dot.accumulator_lanes
        return self.dot.outputs([acc[lanes(base + piece * size, size)] for piece in range(self.dot.num_pieces)])

    def _scaled(self, facc: Expr, total: Expr, block: Expr, g: Expr, row: Expr, half: int | None) -> Expr:
        """`facc + scale * x_scale * (total - zero * sum) + minimum * x_scale * sum`."""
        where = lanes(((block * self.groups + g) * len(self.halves) + (half or 0)) * ROW_BLOCK)
        if self.kind.zero:
            total = total - splat(self.x.sum(g, row, half)) * splat(T.int32(self.kind.zero))
        scale = self._f32(self.scales[where]) * splat(self.x.scale(g, row))
        facc = fma(T.Cast("float32x16", total), scale, facc, self.has_fma)
        if self.kind.has_minimum:
            facc = fma(self._f32(self.minima[where]), splat(self.x.scaled_sum(g, row, half)), facc, self.has_fma)
        return facc

    def _f32(self, stored: Expr) -> Expr:
        return to_f32(stored, "float16", has_f16c=self.has_f16c)

    def _finish(self, value: Expr, row: Expr, block: Expr) -> None:
        finish(self.spec, value, self.bias, self.y, row, block)


class _Tile:
    """Outputs of `rows` rows times `width` blocks, in registers while groups are added one after another."""

    def __init__(self, matrix: _IntegerMatrix, first_block: Expr, rows: int, width: int) -> None:
        self.matrix, self.first_block, self.rows, self.width = matrix, first_block, rows, width
        self.cells = list(product(range(rows), range(width)))
        self.size = len(self.cells) * ROW_BLOCK
        self.floats = registers(self.size, "float32")
        self.integers = registers(len(self.cells) * matrix.dot.accumulator_lanes, "int32")
        self.keeps_high = matrix.dot.in_pairs and matrix.num_bytes == 2
        if self.keeps_high:
            self.high = registers(self.size, "int32")

    def clear(self) -> None:
        """Begin with zeros."""
        for i in range(len(self.cells)):
            self.floats[lanes(i * ROW_BLOCK)] = const(0)

    def load(self, memory: Memory, index: Expr) -> None:
        """Go on from what `store` left."""
        for i in range(len(self.cells)):
            self.floats[lanes(i * ROW_BLOCK)] = memory[lanes(index * self.size + i * ROW_BLOCK)]

    def store(self, memory: Memory, index: Expr) -> None:
        """Leave the sums so far."""
        for i in range(len(self.cells)):
            memory[lanes(index * self.size + i * ROW_BLOCK)] = self.floats[lanes(i * ROW_BLOCK)]

    def add_group(self, g: Expr, first_row: Expr, weights: Callable[[int, int, int], Expr]) -> None:
        """Add the products of group `g`; `weights(block, chunk, piece)` are its codes."""
        matrix = self.matrix
        for half in matrix.halves:
            chunks = range(CHUNKS) if half is None else range(half * CHUNKS // 2, (half + 1) * CHUNKS // 2)
            matrix._clear(self.integers, len(self.cells))
            for byte in range(matrix.num_bytes):
                if byte:
                    self._shift()
                for chunk, (i, (m, n)), piece in product(chunks, enumerate(self.cells), range(matrix.dot.num_pieces)):
                    x = matrix.x.chunk(g, first_row + m, chunk, byte)
                    matrix._accumulate(self.integers, i, piece, weights(n, chunk, piece), x)
            for i, (m, n) in enumerate(self.cells):
                total, where = matrix._outputs(self.integers, i), lanes(i * ROW_BLOCK)
                if self.keeps_high:
                    total = total + self.high[where]
                self.floats[where] = matrix._scaled(
                    self.floats[where], total, self.first_block + n, g, first_row + m, half
                )

    def _shift(self) -> None:
        """From sums of high bytes to what low bytes are added to: 32 * 255 * 32512 still fits an int32."""
        dot, eight = self.matrix.dot, T.int32(8)
        if self.keeps_high:
            for i in range(len(self.cells)):
                self.high[lanes(i * ROW_BLOCK)] = T.shift_left(self.matrix._outputs(self.integers, i), splat(eight))
            self.matrix._clear(self.integers, len(self.cells))
            return
        for i in range(len(self.cells) * dot.num_pieces):
            where = lanes(i * dot.piece_lanes, dot.piece_lanes)
            self.integers[where] = T.shift_left(self.integers[where], splat(eight, dot.piece_lanes))

    def finish(self, first_row: Expr, num_rows: Expr) -> None:
        """Write the outputs of rows that are no padding."""
        for m in range(self.rows):
            with when(first_row + m < num_rows):
                for n in range(self.width):
                    value = self.floats[lanes((m * self.width + n) * ROW_BLOCK)]
                    self.matrix._finish(value, first_row + m, self.first_block + n)
