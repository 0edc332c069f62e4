"""y = W x for weights in 4 or 8 bits and activations in 8: integers inside a group, floats across groups.

One row (decode) streams the weights; more rows share them in tiles. Both add the same numbers in the same order,
groups along K one after another, so a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from tvm.script.ir_builder import tirx as T

from ..targets import Target
from .builder import SIZE, Kernel, Memory, either, parallel, registers, serial
from .integer_dot import CHUNK, DOTS, code_bytes
from .layout import GROUP, ROW_BLOCK, LinearSpec
from .vector import Expr, const, fma, lanes, splat, to_f32

CHUNKS = GROUP // 4  # of a group
TILES = 16  # register tiles that share unpacked weights: 64 rows of 32 columns of float32 are 8 KiB of L1


def integer_linear(spec: LinearSpec, target: Target) -> Any:
    """A PrimFunc `(codes, scales, minima, bias, x_codes, x_scales, x_sums, y, num_rows, padded_rows) -> 0`.

    Weights lie as `layout.py` says; `minima` and `bias` are read only if the spec has them. Activations lie as
    `activation.py` says. Writes (or adds to, if `spec.add_to_output`) columns `[column, column + N)` of `y`, float32
    `[num_rows, y_stride]`.
    """
    with Kernel() as k:
        codes, scales, minima, bias, x_codes, x_scales, x_sums, y, num_rows, padded_rows = k.arguments(
            codes="uint8",
            scales="float16",
            minima="float16",
            bias="float32",
            x_codes="int32",
            x_scales="float32",
            x_sums="int32",
            y="float32",
            num_rows=SIZE,
            padded_rows=SIZE,
        )
        x = _Activations(x_codes, x_scales, x_sums, padded_rows, 2 * CHUNKS if spec.wide else CHUNKS)
        matrix = _IntegerMatrix(spec, target, codes, scales, minima, bias, x, y)
        with either(num_rows == 1) as (then, otherwise):
            with then:
                matrix.times_one_row()
            with otherwise:
                matrix.times_rows(num_rows)
    return k.function


@dataclass(frozen=True)
class _Activations:
    """Quantized rows, as `activation.py` lays them out: `stride` padded rows, `words` int32 of a row's group."""

    codes: Memory
    scales: Memory
    sums: Memory
    stride: Expr
    words: int

    def chunk(self, g: Expr, row: Expr, chunk: int, byte: int) -> Expr:
        """4 int8 of a row, in an int32; of wide codes, byte 0 is the high one."""
        return self.codes[(g * self.stride + row) * self.words + byte * CHUNKS + chunk]

    def scale(self, g: Expr, row: Expr) -> Expr:
        """The scale of a row's group."""
        return self.scales[g * self.stride + row]

    def sum(self, g: Expr, row: Expr, half: int | None) -> Expr:
        """The sum of a row's 32 codes in a group, or of half of them."""
        start = (g * self.stride + row) * 2
        return self.sums[start] + self.sums[start + 1] if half is None else self.sums[start + half]


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
        x: _Activations,
        y: Memory,
    ) -> None:
        self.spec, self.kind, self.x, self.y = spec, spec.kind, x, y
        self.codes, self.scales, self.minima, self.bias = codes, scales, minima, bias
        self.dot, self.has_fma = DOTS[target.integer_dot], target.has_fma
        self.bits = 4 if spec.kind.name == "q4" else 8
        self.num_bytes = 2 if spec.wide else 1  # of an activation's code
        self.zero = 0 if spec.kind.has_minimum else 1 << (self.bits - 1)
        self.groups, self.blocks = spec.num_inputs // GROUP, spec.num_outputs // ROW_BLOCK
        self.group_bytes = ROW_BLOCK * GROUP * self.bits // 8
        # with a scale per 16 inputs the two halves of a group are scaled apart
        self.halves: tuple[int | None, ...] = (None,) if spec.kind.group == GROUP else (0, 1)
        big = self.dot.instruction == "vnni"  # the register file holds 4 rows x 2 blocks
        self.tile_rows, self.tile_blocks = (4, 2 if big and self.blocks % 2 == 0 else 1) if big else (2, 1)

    def times_one_row(self) -> None:
        """Stream the weights past a single row."""
        with parallel(self.blocks) as block:
            facc = registers(ROW_BLOCK, "float32")
            acc = registers(2 * self.dot.accumulator_lanes, "int32")
            facc[lanes(0)] = const(0)
            with serial(self.groups) as g:
                start = (block * self.groups + g) * self.group_bytes
                self._clear(acc, 2)
                for byte in range(self.num_bytes):
                    if byte:
                        self._shift(acc, 2)
                    for chunk in range(CHUNKS):  # halves apart: two chains of additions, not one
                        for piece in range(self.dot.num_pieces):
                            weights = code_bytes(self.codes, start, chunk, piece, self.dot, self.bits)
                            x = self.x.chunk(g, 0, chunk, byte)
                            self._accumulate(acc, chunk // (CHUNKS // 2), piece, weights, x)
                parts = [self._outputs(acc, 0), self._outputs(acc, 1)]
                for half in self.halves:
                    total = parts[0] + parts[1] if half is None else parts[half]
                    facc[lanes(0)] = self._scaled(facc[lanes(0)], total, block, g, 0, half)
            self._finish(facc[lanes(0)], 0, block)

    def times_rows(self, num_rows: Expr) -> None:
        """Unpack a block's weights once for 64 rows, and multiply them in register tiles."""
        tile_rows, width = self.tile_rows, self.tile_blocks
        most_rows = TILES * tile_rows
        with parallel(self.blocks // width) as wide_block:
            facc = registers(most_rows * width * ROW_BLOCK, "float32")
            # one buffer a block: below 1024 bytes each
            unpacked = [registers(CHUNKS * CHUNK, "uint8") for _ in range(width)]
            acc = registers(tile_rows * width * self.dot.accumulator_lanes, "int32")
            num_tiles = (num_rows + (tile_rows - 1)) // tile_rows
            with serial((num_tiles + (TILES - 1)) // TILES) as slab:
                tiles = T.min(T.int64(TILES), num_tiles - slab * TILES)
                with serial(tiles * (tile_rows * width)) as i:
                    facc[lanes(i * ROW_BLOCK)] = const(0)
                with serial(self.groups) as g:
                    self._unpack(unpacked, wide_block, g)
                    with serial(tiles) as tile:
                        self._tile(facc, unpacked, acc, wide_block, g, slab * TILES + tile, tile)
                with serial(T.min(T.int64(most_rows), num_rows - slab * most_rows)) as row:
                    for n in range(width):
                        value = facc[lanes((row * width + n) * ROW_BLOCK)]
                        self._finish(value, slab * most_rows + row, wide_block * width + n)

    def _unpack(self, unpacked: list[Memory], wide_block: Expr, g: Expr) -> None:
        for n, buffer in enumerate(unpacked):
            start = ((wide_block * self.tile_blocks + n) * self.groups + g) * self.group_bytes
            for chunk in range(CHUNKS):
                for piece in range(self.dot.num_pieces):
                    size = self.dot.piece_bytes
                    where = lanes(chunk * CHUNK + piece * size, size)
                    buffer[where] = code_bytes(self.codes, start, chunk, piece, self.dot, self.bits)

    def _tile(
        self, facc: Memory, unpacked: list[Memory], acc: Memory, wide_block: Expr, g: Expr, tile: Expr, local: Expr
    ) -> None:
        width, size = self.tile_blocks, self.dot.piece_bytes
        for half in self.halves:
            chunks = range(CHUNKS) if half is None else range(half * CHUNKS // 2, (half + 1) * CHUNKS // 2)
            self._clear(acc, self.tile_rows * width)
            for byte in range(self.num_bytes):
                if byte:
                    self._shift(acc, self.tile_rows * width)
                for chunk, m, n, piece in product(
                    chunks, range(self.tile_rows), range(width), range(self.dot.num_pieces)
                ):
                    weights = unpacked[n][lanes(chunk * CHUNK + piece * size, size)]
                    x = self.x.chunk(g, tile * self.tile_rows + m, chunk, byte)
                    self._accumulate(acc, m * width + n, piece, weights, x)
            for m in range(self.tile_rows):
                for n in range(width):
                    where = lanes(((local * self.tile_rows + m) * width + n) * ROW_BLOCK)
                    total = self._outputs(acc, m * width + n)
                    block, row = wide_block * width + n, tile * self.tile_rows + m
                    facc[where] = self._scaled(facc[where], total, block, g, row, half)

    def _clear(self, acc: Memory, accumulators: int) -> None:
        size = self.dot.piece_lanes
        for i in range(accumulators * self.dot.num_pieces):
            acc[lanes(i * size, size)] = splat(T.int32(0), size)

    def _shift(self, acc: Memory, accumulators: int) -> None:
        """From sums of high bytes to what low bytes are added to: 32 * 255 * 32512 still fits an int32."""
        size = self.dot.piece_lanes
        for i in range(accumulators * self.dot.num_pieces):
            where = lanes(i * size, size)
            acc[where] = T.shift_left(acc[where], splat(T.int32(8), size))

    def _accumulate(self, acc: Memory, i: int, piece: int, weights: Expr, x: Expr) -> None:
        size = self.dot.piece_lanes
        where = lanes(i * self.dot.accumulator_lanes + piece * size, size)
        acc[where] = self.dot.accumulate(acc[where], weights, x)

    def _outputs(self, acc: Memory, i: int) -> Expr:
        size, base = self.dot.piece_lanes, i * self.dot.accumulator_lanes
        return self.dot.outputs([acc[lanes(base + piece * size, size)] for piece in range(self.dot.num_pieces)])

    def _scaled(self, facc: Expr, total: Expr, block: Expr, g: Expr, row: Expr, half: int | None) -> Expr:
        """`facc + scale * x_scale * (total - zero * sum) + minimum * x_scale * sum`."""
        x_scale, x_sum = self.x.scale(g, row), self.x.sum(g, row, half)
        per_group = len(self.halves)
        where = lanes(((block * self.groups + g) * per_group + (half or 0)) * ROW_BLOCK)
        if self.zero:
            total = total - splat(x_sum * self.zero)
        scale = to_f32(self.scales[where], "float16") * splat(x_scale)
        facc = fma(T.Cast("float32x16", total), scale, facc, self.has_fma)
        if self.kind.has_minimum:
            minimum = to_f32(self.minima[where], "float16")
            facc = fma(minimum, splat(x_scale * T.Cast("float32", x_sum)), facc, self.has_fma)
        return facc

    def _finish(self, value: Expr, row: Expr, block: Expr) -> None:
        finish(self.spec, value, self.bias, self.y, row, block)


def finish(spec: LinearSpec, value: Expr, bias: Memory, y: Memory, row: Expr, block: Expr) -> None:
    """Add what the spec adds, and store a block of outputs of a row."""
    where = lanes(row * spec.y_stride + spec.column + block * ROW_BLOCK)
    if spec.has_bias:
        value = value + bias[lanes(block * ROW_BLOCK)]
    if spec.add_to_output:
        value = value + y[where]
    y[where] = value
