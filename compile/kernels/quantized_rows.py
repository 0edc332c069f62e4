"""Layout of quantized activations, which a rounding kernel writes and the matrices read.

Rows are stored in tiles of 4, so that a tile's groups are adjacent. Padding rows of the last tile are undefined.

- `codes`: int32 `[rows/4, K/32, 4, 8]`, 4 int8 each.
- `scales`: float32 `[rows/4, K/32, 4, 2]`, the scale, and the scale times the sum of the codes.
- `sums`: int32 `[rows/4, K/32, 4, 2]`, the sums of halves of 16.

If a matrix is sensitive its activations are `wide`: 16 bits, as two int8 with `code = 256 * high + low`. Their `codes`
are `[rows/4, K/32, 4, 16]`, high ones first. That doubles the multiplications, and adds no memory traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from ..codegen.builder import Memory
from ..codegen.vector import Expr
from ..weights.layout import CHUNKS, GROUP, round_up

ROW_TILE = 4


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of `num_groups` quantized groups in three buffers."""

    codes: Memory
    scales: Memory
    sums: Memory
    num_groups: int
    wide: bool

    def chunk(self, g: Expr, row: Expr, chunk: int, byte: int) -> Expr:
        """Return 4 int8 of a row, in an int32; byte 0 of wide codes is the high one."""
        return self.codes[self.first_chunk(g, row) + byte * CHUNKS + chunk]

    def first_chunk(self, g: Expr, row: Expr) -> Expr:
        """Return the index of a group's first codes."""
        return self._record(g, row) * (2 * CHUNKS if self.wide else CHUNKS)

    def scale(self, g: Expr, row: Expr) -> Expr:
        """Return the scale of a row's group."""
        return self.scales[self.pair(g, row)]

    def scaled_sum(self, g: Expr, row: Expr, half: int | None) -> Expr:
        """Return the sum of a row's 32 codes in a group, or of half of them, times the scale."""
        if half is None:
            return self.scales[self.pair(g, row) + 1]
        return self.scale(g, row) * T.Cast("float32", self.sum(g, row, half))

    def sum(self, g: Expr, row: Expr, half: int | None) -> Expr:
        """Return the sum of a row's 32 codes in a group, or of half of them."""
        start = self.pair(g, row)
        return self.sums[start] + self.sums[start + 1] if half is None else self.sums[start + half]

    def pair(self, g: Expr, row: Expr) -> Expr:
        """Return the index of a group's two scales, or of its two sums."""
        return self._record(g, row) * 2

    def _record(self, g: Expr, row: Expr) -> Expr:
        """Return the position of a row's group among all groups."""
        return (row // ROW_TILE * self.num_groups + g) * ROW_TILE + row % ROW_TILE


def quantized_bytes(num_rows: int, width: int, wide: bool) -> tuple[int, int, int]:
    """Return the bytes of codes, scales and sums of this many rows."""
    groups = round_up(num_rows, ROW_TILE) * (round_up(width, GROUP) // GROUP)
    return groups * GROUP * (2 if wide else 1), groups * 8, groups * 8
