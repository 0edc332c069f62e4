"""A register tile of an integer matrix: outputs of some rows times some blocks, added group by group.

Integers inside a group, floats across groups. Knows the arithmetic, not how work is divided between threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from tvm.script.ir_builder import tirx as T

from ..codegen.builder import Memory, bound, registers, serial, when
from ..codegen.vector import Expr, const, fma, lanes, splat
from ..weights.kinds import SUPER_GROUP
from ..weights.layout import CHUNKS, GROUP, ROW_BLOCK
from ..weights.scales import WeightScales
from .integer_dot import Dot, Instruction
from .linear import LinearSpec, TileRows, finish
from .quantized_rows import QuantizedRows

SUPER_SPANS = SUPER_GROUP // GROUP  # spans of `GROUP` inputs whose nested scales share a float16


@dataclass(frozen=True)
class Tiling:
    """Register tiles of a kernel: one row times `blocks` blocks, or up to `many` rows times one block.

    One row waits for memory, which is fastest block by block. A long row would come from the L2 cache for each block,
    so several blocks share it. Many rows use a weight as often as there are registers for sums; the remaining rows form
    a lower tile. With `unpacks`, `sharing` tiles or more share weights that are unpacked once. Otherwise each tile
    unpacks them in slots that its products leave free.
    """

    blocks: int
    many: int
    sharing: int = 3
    unpacks: bool = True


# 512 bits, 32 registers: 3 integer and 3 float sums; or of many rows 8 and 8, and 8 more if scales are nested.
TILINGS: dict[Instruction, Tiling] = {
    "vnni512": Tiling(3, 8, unpacks=False),
    "vnni256": Tiling(1, 4),
    "madd512": Tiling(1, 6, unpacks=False),
    "madd256": Tiling(1, 2),
    "pairs512": Tiling(2, 4),
    "pairs256": Tiling(1, 2, sharing=2),
    "signs256": Tiling(1, 2, sharing=2),
    "portable": Tiling(1, 2),
    "usdot": Tiling(2, 2),
    "sdot": Tiling(2, 2),
    "smull": Tiling(1, 2),
    "smlal": Tiling(1, 2),
}


class TileArithmetic:
    """State that all tiles of a matrix share: its spec, scales and rows, and the integer product."""

    def __init__(
        self,
        spec: LinearSpec,
        dot: Dot,
        scales: WeightScales,
        x: QuantizedRows,
        bias: Memory,
        y: Memory,
        has_fma: bool,
    ) -> None:
        self.spec, self.kind, self.dot, self.scales = spec, spec.kind, dot, scales
        self.x, self.bias, self.y, self.has_fma = x, bias, y, has_fma
        self.num_bytes = 2 if spec.wide else 1  # bytes of an activation's code
        # with a scale per 16 inputs, the two halves of a group are scaled separately
        self.halves: tuple[int | None, ...] = (0, 1) if spec.kind.group < GROUP else (None,)

    def clear(self, acc: Memory, accumulators: int) -> None:
        """Set this many accumulators to zero."""
        size = self.dot.piece_lanes
        for i in range(accumulators * self.dot.num_pieces):
            acc[lanes(i * size, size)] = splat(T.int32(0), size)

    def accumulate(self, acc: Memory, i: int, piece: int, weights: Expr, x: Expr) -> None:
        """Add a piece's products to accumulator `i`."""
        size = self.dot.piece_lanes
        where = lanes(i * self.dot.accumulator_lanes + piece * size, size)
        acc[where] = self.dot.accumulate(acc[where], weights, x)

    def outputs(self, acc: Memory, i: int) -> Expr:
        """Return the 16 sums in accumulator `i`."""
        size, base = self.dot.piece_lanes, i * self.dot.accumulator_lanes
        return self.dot.outputs([acc[lanes(base + piece * size, size)] for piece in range(self.dot.num_pieces)])

    def scaled(self, facc: Expr, total: Expr, block: Expr, g: Expr, row: Expr, half: int | None) -> Expr:
        """Return `facc + scale * x_scale * (total - zero * sum) + minimum * x_scale * sum`.

        Nested minima are added later.
        """
        kind, group, zero = self.kind, self.group_of(g, half), self.kind.zero - self.dot.zero
        if zero:
            total = total - splat(self.x.sum(g, row, half)) * splat(T.int32(zero))
        stored = self.scales.scale(block, group)
        scale = stored * splat(self.x.scale(g, row))
        facc = fma(T.Cast("float32x16", total), scale, facc, self.has_fma)
        if kind.has_minimum and not kind.is_nested:
            minimum = self.scales.minimum(block, group)
            facc = fma(minimum, splat(self.x.scaled_sum(g, row, half)), facc, self.has_fma)
        if kind.has_zeros:
            minimum = const(0) - self.scales.zero(block, group) * stored
            facc = fma(minimum, splat(self.x.scaled_sum(g, row, half)), facc, self.has_fma)
        return facc

    def group_of(self, g: Expr, half: int | None) -> Expr:
        """Return the index of a row's group with span `g` of `GROUP` inputs, or with half of it."""
        if half is not None:
            return g * 2 + half
        return g if self.kind.group == GROUP else g // (self.kind.group // GROUP)


class Tile:
    """Outputs of `rows` rows times `width` blocks, kept in registers while groups are added one after another.

    If scales are nested, `add_group` adds up a super-group, and `add_super` adds that to the sums. `first_of_expert` is
    the first block of the expert's matrix, `next_block` the one that the thread reads next.
    """

    def __init__(
        self,
        matrix: TileArithmetic,
        first_block: Expr,
        rows: int,
        width: int,
        first_of_expert: Expr = 0,
        next_block: Expr | None = None,
    ) -> None:
        self.first_of_expert = first_of_expert
        self.next_block = first_block + width if next_block is None else next_block
        self.matrix, self.first_block, self.rows, self.width = matrix, first_block, rows, width
        self.cells = list(product(range(rows), range(width)))
        self.size = len(self.cells) * ROW_BLOCK
        self.floats = registers(self.size, "float32")
        self.integers = registers(len(self.cells) * matrix.dot.accumulator_lanes, "int32")
        self.sums = registers(self.size, "float32") if matrix.kind.is_nested else self.floats
        dot, chunks = matrix.dot, CHUNKS // len(matrix.halves)
        # int16 hold few products, so overflow is moved to 32 bits
        self.run = min(chunks, dot.short_chunks) if dot.is_short else chunks
        self.keeps_totals = dot.is_short and (matrix.num_bytes == 2 or self.run < chunks)
        if self.keeps_totals:
            self.totals = registers(self.size, "int32")

    def clear(self) -> None:
        """Set the sums to zero."""
        self._clear(self.sums)

    def load(self, memory: Memory, index: Expr) -> None:
        """Load the sums that `store` saved."""
        for i in range(len(self.cells)):
            self.sums[lanes(i * ROW_BLOCK)] = memory[lanes(index * self.size + i * ROW_BLOCK)]

    def store(self, memory: Memory, index: Expr) -> None:
        """Save the sums so far."""
        for i in range(len(self.cells)):
            memory[lanes(index * self.size + i * ROW_BLOCK)] = self.sums[lanes(i * ROW_BLOCK)]

    def clear_super(self) -> None:
        """Begin a super-group."""
        self._clear(self.floats)

    def add_super(self, s: Expr, rows: TileRows) -> None:
        """Add the finished super-group `s` to the sums, and then its minima."""
        matrix, first = self.matrix, s * (SUPER_GROUP // self.matrix.kind.group)
        self._add_product(lambda block: matrix.scales.super_scale(block, first))
        if not matrix.kind.has_minimum:
            return
        self._clear(self.floats)
        with serial(SUPER_SPANS) as j:
            g = s * SUPER_SPANS + j
            for half, (i, (m, n)) in product(matrix.halves, enumerate(self.cells)):
                where = lanes(i * ROW_BLOCK)
                minimum = matrix.scales.minimum(self.first_block + n, matrix.group_of(g, half))
                scaled_sum = splat(matrix.x.scaled_sum(g, rows.x(m), half))
                self.floats[where] = fma(minimum, scaled_sum, self.floats[where], matrix.has_fma)
        self._add_product(lambda block: matrix.scales.super_minimum(block, first))

    def add_group(self, g: Expr, rows: TileRows, weights: Callable[[int, int, int], Expr]) -> None:
        """Add the products of span `g` of `GROUP` inputs; `weights(block, chunk, piece)` are its levels."""
        matrix = self.matrix
        for half in matrix.halves:
            chunks = range(CHUNKS) if half is None else range(half * CHUNKS // 2, (half + 1) * CHUNKS // 2)
            runs = [chunks[start : start + self.run] for start in range(0, len(chunks), self.run)]
            matrix.clear(self.integers, len(self.cells))
            for byte in range(matrix.num_bytes):
                if byte and not self.keeps_totals:
                    self._shift()
                for number, run in enumerate(runs):
                    self._accumulate(g, rows, run, byte, weights)
                    is_last_run = number == len(runs) - 1
                    if self.keeps_totals and not (is_last_run and byte == matrix.num_bytes - 1):
                        self._keep(is_first=number == byte == 0, shifted=is_last_run)
            for i, (m, n) in enumerate(self.cells):
                total, where = matrix.outputs(self.integers, i), lanes(i * ROW_BLOCK)
                if self.keeps_totals:
                    total = total + self.totals[where]
                block = self.first_block + n
                self.floats[where] = matrix.scaled(self.floats[where], total, block, g, rows.x(m), half)

    def finish(self, rows: TileRows) -> None:
        """Write the outputs of rows that are not padding."""
        matrix = self.matrix
        for m in range(self.rows):
            with when(rows.is_wanted(m)):
                for n in range(self.width):
                    value, block = self.sums[lanes((m * self.width + n) * ROW_BLOCK)], self.first_block + n
                    of_expert = block - self.first_of_expert
                    finish(matrix.spec, value, matrix.bias, matrix.y, rows.y(m), of_expert, block)

    def _clear(self, floats: Memory) -> None:
        """Set the floats of all cells to zero."""
        for i in range(len(self.cells)):
            floats[lanes(i * ROW_BLOCK)] = const(0)

    def _add_product(self, factor: Callable[[Expr], Expr]) -> None:
        """Add the integer sums times `factor(block)` to the float sums."""
        for i, (_, n) in enumerate(self.cells):
            where = lanes(i * ROW_BLOCK)
            super_scale = factor(self.first_block + n)
            self.sums[where] = fma(super_scale, self.floats[where], self.sums[where], self.matrix.has_fma)

    def _accumulate(
        self, g: Expr, rows: TileRows, chunks: range, byte: int, weights: Callable[[int, int, int], Expr]
    ) -> None:
        """Add the integer products of some chunks of span `g`."""
        matrix = self.matrix
        for chunk, (i, (m, n)), piece in product(chunks, enumerate(self.cells), range(matrix.dot.num_pieces)):
            x = matrix.x.chunk(g, rows.x(m), chunk, byte)
            matrix.accumulate(self.integers, i, piece, weights(n, chunk, piece), x)

    def _keep(self, is_first: bool, shifted: bool) -> None:
        """Add the int16 pairs to the totals and clear them; `shifted` makes room for low bytes."""
        for i in range(len(self.cells)):
            where, total = lanes(i * ROW_BLOCK), self.matrix.outputs(self.integers, i)
            if not is_first:
                total = total + self.totals[where]
            self.totals[where] = T.shift_left(total, splat(T.int32(8))) if shifted else total
        self.matrix.clear(self.integers, len(self.cells))

    def _shift(self) -> None:
        """Shift sums of high bytes so that low bytes can be added: 32 * 255 * 32512 still fits an int32."""
        dot = self.matrix.dot
        for i in range(len(self.cells) * dot.num_pieces):
            where = lanes(i * dot.piece_lanes, dot.piece_lanes)
            self.integers[where] = T.shift_left(self.integers[where], splat(T.int32(8), dot.piece_lanes))


class OneOutput(Tile):
    """One output of one row. The other outputs of its block are computed with it, and dropped."""

    def __init__(self, matrix: TileArithmetic, output: Expr, next_output: Expr) -> None:
        block = bound(output // ROW_BLOCK)
        super().__init__(matrix, block, 1, 1, next_block=bound(next_output // ROW_BLOCK))
        self.output = output

    def finish(self, rows: TileRows) -> None:
        """Write the output."""
        spec, outputs = self.matrix.spec, registers(ROW_BLOCK, "float32")
        assert spec.factor == 1 and not spec.add_to_output, "outputs are written over others"
        outputs[lanes(0)] = self.sums[lanes(0)]
        if spec.has_bias:
            outputs[lanes(0)] = outputs[lanes(0)] + self.matrix.bias[lanes(self.first_block * ROW_BLOCK)]
        self.matrix.y[rows.y(0) * spec.y_stride + spec.column + self.output] = outputs[self.output % ROW_BLOCK]
