"""Products of 8-bit integers added in groups of four, and of 16-bit integers added in pairs.

The former is `acc[n] += sum_b w[4n + b] * x[b]` for 16 outputs n. This is the only module that knows which instructions
multiply integers. Every variant computes the same integers exactly. Weights are unsigned (0..255, or up to the largest
code of their format). Activations are signed (-127..127, and the low bytes of wide ones -128..127).

Without an instruction for it, vpmaddubsw adds two products in 16 bits. With 4 bits the products of a whole group fit:
32 / 2 * 15 * 128 = 30,720 < 2**15. With 5 bits those of half a group fit, with 6 those of 8 inputs. With 8 bits, two do
not: 2 * 255 * 127 > 2**15. So 128 is subtracted and the sign moved to the activation: 2 * 128 * 127 < 2**15. A low byte
of a wide activation can be -128, which has no opposite: there, weights are widened.

Arm multiplies signed integers (`sdot`, `smull`; `usdot` came later). Weights of up to 7 bits are valid as signed. From
others 128 is subtracted, and their outputs are sums of `level - 128`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import tvm
from tvm.script import tirx as T

from ..codegen.targets import IntegerDot
from ..codegen.vector import LANES, Expr, splat, vector_type
from ..weights.layout import CHUNK, CHUNKS

# pairs512, pairs256: an accumulator holds two int16 per output, of products with weights of a few bits; smlal: four.
# signs256: magnitudes of weights times activations with the weights' signs
Instruction = IntegerDot | Literal["pairs512", "pairs256", "signs256", "smlal"]
_MIDDLE = 128  # the unsigned weight that becomes the signed 0


@dataclass(frozen=True)
class Dot:
    """A target's integer product: `num_pieces` pieces of `CHUNK`, each with an accumulator of `piece_lanes` int32.

    Accumulators of int16 have room for the products of `short_chunks` chunks. `zero` is the level that adds nothing.
    """

    instruction: Instruction
    num_pieces: int
    piece_lanes: int
    short_chunks: int = 0
    zero: int = 0

    @property
    def is_short(self) -> bool:
        """True if accumulators are int16, several per output."""
        return self.short_chunks > 0

    @property
    def needs_order(self) -> bool:
        """True if a tile's sums, added in trees, do not fit AVX2's registers, as was measured; see `library.py`."""
        return self.instruction == "signs256" or (self.instruction == "pairs256" and self.short_chunks >= CHUNKS // 2)

    @property
    def piece_bytes(self) -> int:
        """Number of weight bytes that one piece reads."""
        return CHUNK // self.num_pieces

    @property
    def accumulator_lanes(self) -> int:
        """Number of int32 lanes in an accumulator of 16 outputs."""
        return self.num_pieces * self.piece_lanes

    def accumulate(self, acc: Expr, weights: Expr, x: Expr) -> Expr:
        """Add `weights` (uint8 x piece_bytes) times `x` (4 int8 in an int32). Returns the new accumulator."""
        if self.instruction in _NEON:
            size = self.piece_bytes
            return self._neon(acc, self._signed(weights), T.reinterpret(vector_type("int8", size), splat(x, size // 4)))
        if self.instruction in ("vnni512", "vnni256"):
            signed = T.reinterpret(vector_type("int8", self.piece_bytes), splat(x, self.piece_lanes))
            name = f"llvm.x86.avx512.vpdpbusd.{self.piece_bytes * 8}"
            return T.call_llvm_pure_intrin(vector_type("int32", self.piece_lanes), name, acc, weights, signed)
        if self.instruction == "portable":
            return _portable(acc, weights, x)
        if self.instruction == "signs256":
            return self._multiply_magnitudes(acc, self._signed(weights), x)
        return self._add_pairs(acc, weights, x) if self.is_short else self._multiply_widened(acc, weights, x)

    def _signed(self, weights: Expr) -> Expr:
        """Return weights as the instruction takes them: signed, or unsigned for usdot."""
        if self.instruction == "usdot":
            return weights
        moved = T.bitwise_xor(weights, splat(T.uint8(_MIDDLE), self.piece_bytes)) if self.zero else weights
        return T.reinterpret(vector_type("int8", self.piece_bytes), moved)

    def _neon(self, acc: Expr, weights: Expr, x: Expr) -> Expr:
        """Add products of bytes by group, or for smull by pair. Returns the new accumulator."""
        if self.instruction in ("sdot", "usdot"):
            name = f"llvm.aarch64.neon.{self.instruction}.v4i32.v16i8"
            return T.call_llvm_pure_intrin("int32x4", name, acc, weights, x)
        products = T.Cast("int16x16", weights) * T.Cast("int16x16", x)  # smull and smull2, or smlal with an addition
        if self.is_short:
            return T.reinterpret("int32x8", T.reinterpret("int16x16", acc) + products)
        return acc + _added_pairs(products)

    def _add_pairs(self, acc: Expr, weights: Expr, x: Expr) -> Expr:
        """Multiply bytes, add neighbouring products in 16 bits, and add these sums to the accumulator.

        `acc` and the result are int32 vectors whose bits are 16-bit sums.
        """
        size = self.piece_bytes
        signed = T.reinterpret(vector_type("int8", size), splat(x, self.piece_lanes))
        name = "llvm.x86.avx512.pmaddubs.w.512" if size == 64 else "llvm.x86.avx2.pmadd.ub.sw"
        pairs = vector_type("int16", size // 2)
        products = T.call_llvm_pure_intrin(pairs, name, weights, signed)
        return T.reinterpret(vector_type("int32", self.piece_lanes), T.reinterpret(pairs, acc) + products)

    def _multiply_magnitudes(self, acc: Expr, weights: Expr, x: Expr) -> Expr:
        """Add products of signed weights, -128 to 127, and activations of -127 to 127. Returns the new accumulator."""
        size = self.piece_bytes
        byte, pairs = vector_type("int8", size), vector_type("int16", size // 2)
        magnitudes = T.call_llvm_pure_intrin(byte, "llvm.abs", weights, T.bool(False))
        signed = T.call_llvm_pure_intrin(
            byte, "llvm.x86.avx2.psign.b", T.reinterpret(byte, splat(x, size // 4)), weights
        )
        products = T.call_llvm_pure_intrin(pairs, "llvm.x86.avx2.pmadd.ub.sw", magnitudes, signed)
        return acc + _madd(products, splat(T.int16(1), size // 2), size // 4)

    def _multiply_widened(self, acc: Expr, weights: Expr, x: Expr) -> Expr:
        """Add products of weights widened to 16 bits. Returns the new accumulator."""
        size = self.piece_bytes
        wide_weights = T.Cast(vector_type("int16", size), weights)
        wide_x = T.Cast(vector_type("int16", size), T.reinterpret(vector_type("int8", size), splat(x, size // 4)))
        return acc + _madd(wide_weights, wide_x, size // 2)

    def accumulate_values(self, acc: Expr, values: Expr, weights: Expr) -> Expr:
        """Add `values` (int8 x piece_bytes) times `weights` (4 uint8 in an int32). Returns the new accumulator."""
        size = self.piece_bytes
        if self.instruction in _NEON:
            unsigned = T.reinterpret(vector_type("uint8", size), splat(weights, size // 4))
            if self.zero:  # the contribution of the middle is the same for all rows, and is computed once
                half = splat(T.int8(_MIDDLE // 2), size)
                acc = acc + self._neon(self._neon(splat(T.int32(0), self.piece_lanes), half, values), half, values)
            return self._neon(acc, self._signed(unsigned), values)
        if self.instruction in ("vnni512", "vnni256"):
            unsigned = T.reinterpret(vector_type("uint8", size), splat(weights, self.piece_lanes))
            name = f"llvm.x86.avx512.vpdpbusd.{size * 8}"
            return T.call_llvm_pure_intrin(vector_type("int32", self.piece_lanes), name, acc, unsigned, values)
        if self.instruction == "portable":
            return _portable_values(acc, values, weights)
        wide = T.Cast(vector_type("int16", size), T.reinterpret(vector_type("uint8", size), splat(weights, size // 4)))
        return acc + _madd(T.Cast(vector_type("int16", size), values), wide, size // 2)

    def outputs(self, pieces: list[Expr]) -> Expr:
        """Return the 16 outputs, from the accumulators of all pieces."""
        if self.is_short:
            n = 2 * self.piece_lanes
            short = [T.reinterpret(vector_type("int16", n), piece) for piece in pieces]
            ones = splat(T.int16(1), n)
            pieces = [_added_pairs(one) if self.instruction in _NEON else _madd(one, ones, n // 2) for one in short]
        if self.num_pieces == 1:
            return pieces[0]
        if self.accumulator_lanes == LANES:
            return tvm.tirx.Shuffle(pieces, list(range(LANES)))
        even = tvm.tirx.Shuffle(pieces, list(range(0, 2 * LANES, 2)))
        odd = tvm.tirx.Shuffle(pieces, list(range(1, 2 * LANES, 2)))
        return even + odd


def _added_pairs(a: Expr) -> Expr:
    """Return 8 int32, each the sum of two of 16 int16."""
    halves = [tvm.tirx.Shuffle([a], list(range(first, first + 8))) for first in (0, 8)]
    name = "llvm.aarch64.neon.saddlp.v4i32.v8i16"
    return tvm.tirx.Shuffle([T.call_llvm_pure_intrin("int32x4", name, half) for half in halves], list(range(8)))


def _madd(a: Expr, b: Expr, n: int) -> Expr:
    """Return `n` int32, each the sum of two products of int16."""
    name = "llvm.x86.avx512.pmaddw.d.512" if n == LANES else "llvm.x86.avx2.pmadd.wd"
    return T.call_llvm_pure_intrin(vector_type("int32", n), name, a, b)


@dataclass(frozen=True)
class PairDot:
    """A target's product of 16-bit integers, added in pairs.

    It is `acc[n] += a[2n] * x[0] + a[2n + 1] * x[1]` for 16 outputs n, in `num_pieces` pieces.
    """

    instruction: IntegerDot
    num_pieces: int

    @classmethod
    def of(cls, instruction: IntegerDot) -> PairDot:
        """Return the product of a target with this instruction."""
        return cls(instruction, 2 if instruction in ("vnni256", "madd256") else 1)

    @property
    def piece_lanes(self) -> int:
        """Number of int32 lanes of a piece's accumulator."""
        return LANES // self.num_pieces

    def accumulate(self, acc: Expr, a: Expr, x: Expr) -> Expr:
        """Add `a` (int16 x 2 piece_lanes) times `x` (2 int16 in an int32). Returns the new accumulator."""
        n = self.piece_lanes
        if self.instruction == "portable":
            words, low = T.reinterpret(vector_type("int32", n), a), T.int32(16)
            first = T.shift_right(T.shift_left(words, splat(low, n)), splat(low, n))
            acc = acc + first * splat(T.shift_right(T.shift_left(x, low), low), n)
            return acc + T.shift_right(words, splat(low, n)) * splat(T.shift_right(x, low), n)
        if self.instruction in _NEON:  # widening multiply-adds: LLVM sees that both factors have 16 bits
            numbers, wide = T.reinterpret("int16x2", x), vector_type("int32", n)
            for i in range(2):
                every_other = tvm.tirx.Shuffle([a], list(range(i, 2 * n, 2)))
                factor = splat(tvm.tirx.Shuffle([numbers], [i]), n)
                acc = acc + T.Cast(wide, every_other) * T.Cast(wide, factor)
            return acc
        pairs = T.reinterpret(vector_type("int16", 2 * n), splat(x, n))
        if self.instruction in ("vnni512", "vnni256"):
            name = f"llvm.x86.avx512.vpdpwssd.{32 * n}"
            return T.call_llvm_pure_intrin(vector_type("int32", n), name, acc, a, pairs)
        return acc + _madd(a, pairs, n)


def _portable_values(acc: Expr, values: Expr, weights: Expr) -> Expr:
    """Add products of values and weights with 32-bit multiplies. Returns the new accumulator."""
    words = T.reinterpret("int32x16", values)
    for byte in range(4):
        value = T.shift_right(T.shift_left(words, splat(T.int32(24 - 8 * byte))), splat(T.int32(24)))
        weight = T.bitwise_and(T.shift_right(weights, T.int32(8 * byte)), T.int32(255))
        acc = acc + value * splat(weight)
    return acc


def _portable(acc: Expr, weights: Expr, x: Expr) -> Expr:
    """Add products with 32-bit multiplies. Returns the new accumulator."""
    words = T.reinterpret("int32x16", weights)
    for byte in range(4):
        weight = T.bitwise_and(T.shift_right(words, splat(T.int32(8 * byte))), splat(T.int32(255)))
        signed = T.shift_right(T.shift_left(x, T.int32(24 - 8 * byte)), T.int32(24))
        acc = acc + weight * splat(signed)
    return acc


def dot_of(instruction: IntegerDot, max_level: int, *, wide: bool = False) -> Dot:
    """Return a target's product of weights with levels 0 to `max_level`; activations have 16 bits if `wide`, else 8."""
    if instruction in _SHORT:
        short = _SHORT[instruction]
        chunks = next((n for n in (8, 4, 2) if n * short.products * max_level * 128 < 1 << 15), 0)
        if chunks:
            return replace(short.dot, short_chunks=chunks)
    if instruction == "madd256" and max_level >= _MIDDLE and not wide:
        return _SIGNS
    dot = _DOTS[instruction]
    return dot if max_level >= _MIDDLE else replace(dot, zero=0)


def dot_of_values(instruction: IntegerDot) -> Dot:
    """Return a target's product of unsigned 8-bit weights and signed 8-bit values."""
    return _DOTS[instruction]


@dataclass(frozen=True)
class _ShortAccumulators:
    """Accumulators of int16, and the number of products of a chunk that each receives."""

    dot: Dot
    products: int


_NEON = ("usdot", "sdot", "smull", "smlal")
_DOTS: dict[IntegerDot, Dot] = {
    "vnni512": Dot("vnni512", 1, 16),
    "vnni256": Dot("vnni256", 2, 8),
    "madd512": Dot("madd512", 2, 16),
    "madd256": Dot("madd256", 4, 8),
    "portable": Dot("portable", 1, 16),
    "usdot": Dot("usdot", 4, 4),
    "sdot": Dot("sdot", 4, 4, zero=_MIDDLE),
    "smull": Dot("smull", 4, 8, zero=_MIDDLE),
}
_SIGNS = Dot("signs256", 2, 8, zero=_MIDDLE)
_SHORT: dict[IntegerDot, _ShortAccumulators] = {
    "madd512": _ShortAccumulators(Dot("pairs512", 1, 16), 2),
    "madd256": _ShortAccumulators(Dot("pairs256", 2, 8), 2),
    "smull": _ShortAccumulators(Dot("smlal", 4, 8), 1),
}
