"""Products of 8-bit integers, added in groups of four: `acc[n] += sum_b w[4n + b] * x[b]` for 16 outputs n.

The one place that knows instruction sets. Every variant computes the same integers exactly. Weights are unsigned
(0..255), activations signed (-127..127), so no 16-bit intermediate overflows: 255 * 127 < 2**15.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm.script import tirx as T

from ..targets import IntegerDot
from .vector import LANES, Expr, lanes, splat, vector_type

CHUNK = 64  # bytes of weights for 16 outputs and 4 inputs


@dataclass(frozen=True)
class Dot:
    """How a target does it: in `num_pieces` pieces of `CHUNK`, each with an accumulator of `piece_lanes` int32."""

    instruction: IntegerDot
    num_pieces: int
    piece_lanes: int

    @property
    def piece_bytes(self) -> int:
        """Weight bytes that one piece reads."""
        return CHUNK // self.num_pieces

    @property
    def accumulator_lanes(self) -> int:
        """int32 lanes that an accumulator of 16 outputs takes."""
        return self.num_pieces * self.piece_lanes

    def accumulate(self, acc: Expr, weights: Expr, x: Expr) -> Expr:
        """The piece's accumulator after adding `weights` (uint8 x piece_bytes) times `x` (4 int8 in an int32)."""
        if self.instruction in ("vnni512", "vnni256"):
            signed = T.reinterpret(vector_type("int8", self.piece_bytes), splat(x, self.piece_lanes))
            name = f"llvm.x86.avx512.vpdpbusd.{self.piece_bytes * 8}"
            return T.call_llvm_pure_intrin(vector_type("int32", self.piece_lanes), name, acc, weights, signed)
        if self.instruction == "portable":
            return _portable(acc, weights, x)
        return self._multiply_add_pairs(acc, weights, x)

    def _multiply_add_pairs(self, acc: Expr, weights: Expr, x: Expr) -> Expr:
        size = self.piece_bytes
        wide_weights = T.Cast(vector_type("int16", size), weights)
        wide_x = T.Cast(vector_type("int16", size), T.reinterpret(vector_type("int8", size), splat(x, size // 4)))
        name = "llvm.x86.avx512.pmaddw.d.512" if size == 32 else "llvm.x86.avx2.pmadd.wd"
        return acc + T.call_llvm_pure_intrin(vector_type("int32", size // 2), name, wide_weights, wide_x)

    def outputs(self, pieces: list[Expr]) -> Expr:
        """The 16 outputs, from the accumulators of all pieces."""
        if self.num_pieces == 1:
            return pieces[0]
        if self.accumulator_lanes == LANES:
            return tvm.tirx.Shuffle(pieces, list(range(LANES)))
        even = tvm.tirx.Shuffle(pieces, list(range(0, 2 * LANES, 2)))
        odd = tvm.tirx.Shuffle(pieces, list(range(1, 2 * LANES, 2)))
        return even + odd


def _portable(acc: Expr, weights: Expr, x: Expr) -> Expr:
    words = T.reinterpret("int32x16", weights)
    for byte in range(4):
        weight = T.bitwise_and(T.shift_right(words, splat(T.int32(8 * byte))), splat(T.int32(255)))
        signed = T.shift_right(T.shift_left(x, T.int32(24 - 8 * byte)), T.int32(24))
        acc = acc + weight * splat(signed)
    return acc


DOTS: dict[IntegerDot, Dot] = {
    "vnni512": Dot("vnni512", 1, 16),
    "vnni256": Dot("vnni256", 2, 8),
    "madd512": Dot("madd512", 2, 16),
    "madd256": Dot("madd256", 4, 8),
    "portable": Dot("portable", 1, 16),
}


def code_bytes(weights: Expr, start: Expr, chunk: int, piece: int, dot: Dot, bits: int) -> Expr:
    """Codes of a chunk's piece as uint8, from a group's packed bytes that begin at `start` (see `layout.py`)."""
    offset = piece * dot.piece_bytes
    size = dot.piece_bytes
    if bits == 8:
        return weights[lanes(start + chunk * CHUNK + offset, size)]
    packed = weights[lanes(start + chunk // 2 * CHUNK + offset, size)]
    if chunk % 2 == 0:
        return T.bitwise_and(packed, splat(T.uint8(15), size))
    return T.shift_right(packed, splat(T.uint8(4), size))
