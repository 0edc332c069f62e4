"""Products of 8-bit integers, added in groups of four: `acc[n] += sum_b w[4n + b] * x[b]` for 16 outputs n; and of
16-bit integers in pairs.

The one place that knows which instructions multiply integers. Every variant computes the same integers exactly.
Weights are unsigned (0..255, or up to the largest code of their format), activations signed (-127..127, and the low
bytes of wide ones -128..127).

Where the target has no instruction for it, 8-bit weights are widened first, for vpmaddubsw adds two products into 16
bits: 2 * 255 * 127 > 2**15. In 4 bits the products of a whole group fit: 32 / 2 * 15 * 128 = 30,720 < 2**15; in 5
bits those of half a group, in 6 those of 8 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import tvm
from tvm.script import tirx as T

from ..codegen.targets import IntegerDot
from ..codegen.vector import LANES, Expr, splat, vector_type
from ..weights.layout import CHUNK

# pairs512, pairs256: an accumulator holds two int16 for an output, of products with weights of a few bits
Instruction = IntegerDot | Literal["pairs512", "pairs256"]


@dataclass(frozen=True)
class Dot:
    """How a target does it: in `num_pieces` pieces of `CHUNK`, each with an accumulator of `piece_lanes` int32.

    Accumulators of int16 have room for the products of `pair_chunks` chunks.
    """

    instruction: Instruction
    num_pieces: int
    piece_lanes: int
    pair_chunks: int = 0

    @property
    def in_pairs(self) -> bool:
        """Whether accumulators are int16, two for an output."""
        return self.instruction in ("pairs512", "pairs256")

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
        return self._add_pairs(acc, weights, x) if self.in_pairs else self._multiply_widened(acc, weights, x)

    def _add_pairs(self, acc: Expr, weights: Expr, x: Expr) -> Expr:
        size = self.piece_bytes
        signed = T.reinterpret(vector_type("int8", size), splat(x, self.piece_lanes))
        name = "llvm.x86.avx512.pmaddubs.w.512" if size == 64 else "llvm.x86.avx2.pmadd.ub.sw"
        pairs = vector_type("int16", size // 2)
        products = T.call_llvm_pure_intrin(pairs, name, weights, signed)
        return T.reinterpret(vector_type("int32", self.piece_lanes), T.reinterpret(pairs, acc) + products)

    def _multiply_widened(self, acc: Expr, weights: Expr, x: Expr) -> Expr:
        size = self.piece_bytes
        wide_weights = T.Cast(vector_type("int16", size), weights)
        wide_x = T.Cast(vector_type("int16", size), T.reinterpret(vector_type("int8", size), splat(x, size // 4)))
        return acc + _madd(wide_weights, wide_x, size // 2)

    def accumulate_values(self, acc: Expr, values: Expr, weights: Expr) -> Expr:
        """The piece's accumulator after adding `values` (int8 x piece_bytes) times `weights` (4 uint8 in an int32)."""
        size = self.piece_bytes
        if self.instruction in ("vnni512", "vnni256"):
            unsigned = T.reinterpret(vector_type("uint8", size), splat(weights, self.piece_lanes))
            name = f"llvm.x86.avx512.vpdpbusd.{size * 8}"
            return T.call_llvm_pure_intrin(vector_type("int32", self.piece_lanes), name, acc, unsigned, values)
        if self.instruction == "portable":
            return _portable_values(acc, values, weights)
        wide = T.Cast(vector_type("int16", size), T.reinterpret(vector_type("uint8", size), splat(weights, size // 4)))
        return acc + _madd(T.Cast(vector_type("int16", size), values), wide, size // 2)

    def outputs(self, pieces: list[Expr]) -> Expr:
        """The 16 outputs, from the accumulators of all pieces."""
        if self.in_pairs:
            n = 2 * self.piece_lanes
            ones = splat(T.int16(1), n)
            pieces = [_madd(T.reinterpret(vector_type("int16", n), piece), ones, n // 2) for piece in pieces]
        if self.num_pieces == 1:
            return pieces[0]
        if self.accumulator_lanes == LANES:
            return tvm.tirx.Shuffle(pieces, list(range(LANES)))
        even = tvm.tirx.Shuffle(pieces, list(range(0, 2 * LANES, 2)))
        odd = tvm.tirx.Shuffle(pieces, list(range(1, 2 * LANES, 2)))
        return even + odd


def _madd(a: Expr, b: Expr, n: int) -> Expr:
    """`n` int32, each the sum of two products of int16."""
    name = "llvm.x86.avx512.pmaddw.d.512" if n == LANES else "llvm.x86.avx2.pmadd.wd"
    return T.call_llvm_pure_intrin(vector_type("int32", n), name, a, b)


@dataclass(frozen=True)
class PairDot:
    """Products of 16-bit integers, added in pairs: `acc[n] += a[2n] * x[0] + a[2n + 1] * x[1]` for 16 outputs n, in
    `num_pieces` pieces."""

    instruction: IntegerDot
    num_pieces: int

    @classmethod
    def of(cls, instruction: IntegerDot) -> PairDot:
        """How a target does it."""
        return cls(instruction, 2 if instruction in ("vnni256", "madd256") else 1)

    @property
    def piece_lanes(self) -> int:
        """int32 lanes of a piece's accumulator."""
        return LANES // self.num_pieces

    def accumulate(self, acc: Expr, a: Expr, x: Expr) -> Expr:
        """The piece's accumulator after adding `a` (int16 x 2 piece_lanes) times `x` (2 int16 in an int32)."""
        n = self.piece_lanes
        if self.instruction == "portable":
            words, low = T.reinterpret(vector_type("int32", n), a), T.int32(16)
            first = T.shift_right(T.shift_left(words, splat(low, n)), splat(low, n))
            acc = acc + first * splat(T.shift_right(T.shift_left(x, low), low), n)
            return acc + T.shift_right(words, splat(low, n)) * splat(T.shift_right(x, low), n)
        pairs = T.reinterpret(vector_type("int16", 2 * n), splat(x, n))
        if self.instruction in ("vnni512", "vnni256"):
            name = f"llvm.x86.avx512.vpdpwssd.{32 * n}"
            return T.call_llvm_pure_intrin(vector_type("int32", n), name, acc, a, pairs)
        return acc + _madd(a, pairs, n)


def _portable_values(acc: Expr, values: Expr, weights: Expr) -> Expr:
    words = T.reinterpret("int32x16", values)
    for byte in range(4):
        value = T.shift_right(T.shift_left(words, splat(T.int32(24 - 8 * byte))), splat(T.int32(24)))
        weight = T.bitwise_and(T.shift_right(weights, T.int32(8 * byte)), T.int32(255))
        acc = acc + value * splat(weight)
    return acc


def _portable(acc: Expr, weights: Expr, x: Expr) -> Expr:
    words = T.reinterpret("int32x16", weights)
    for byte in range(4):
        weight = T.bitwise_and(T.shift_right(words, splat(T.int32(8 * byte))), splat(T.int32(255)))
        signed = T.shift_right(T.shift_left(x, T.int32(24 - 8 * byte)), T.int32(24))
        acc = acc + weight * splat(signed)
    return acc


def dot_of(instruction: IntegerDot, max_level: int) -> Dot:
    """How a target multiplies weights whose levels are 0 to `max_level`."""
    pair_chunks = next((chunks for chunks in (8, 4, 2) if chunks * 2 * max_level * 128 < 1 << 15), 0)
    if not pair_chunks or instruction not in _PAIRS:
        return _DOTS[instruction]
    return replace(_PAIRS[instruction], pair_chunks=pair_chunks)


def dot_of_values(instruction: IntegerDot) -> Dot:
    """How a target multiplies weights of 8 bits without a sign and values of 8 bits with one."""
    return _DOTS[instruction]


_DOTS: dict[IntegerDot, Dot] = {
    "vnni512": Dot("vnni512", 1, 16),
    "vnni256": Dot("vnni256", 2, 8),
    "madd512": Dot("madd512", 2, 16),
    "madd256": Dot("madd256", 4, 8),
    "portable": Dot("portable", 1, 16),
}
_PAIRS: dict[IntegerDot, Dot] = {"madd512": Dot("pairs512", 1, 16), "madd256": Dot("pairs256", 2, 8)}
