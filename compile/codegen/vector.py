"""Vectors of 16 lanes in TVMScript: the vocabulary that kernels are written in.

LLVM splits them into whatever registers the target has. These are Python functions that build expressions; the names
are short because kernels are read as formulas. Functions are told whether the target has an instruction: to multiply
and add, or to convert float16. Contraction is always asked for explicitly, so that two kernels that add the same
numbers in the same order get the same bits.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

LANES = 16
Expr = Any  # a TVM expression
_WHOLE = 1.5 * 2**23 + 127  # 127: the bias of an exponent
_WHOLE_BITS = 0x4B40007F  # the same float32


def lanes(start: Expr, n: int = LANES) -> Expr:
    """The index of `n` neighbours, `start` first; of one it is `start`, since a vector has two lanes at least."""
    return start if n == 1 else T.ramp(start, 1, n)


def splat(value: Expr, n: int = LANES) -> Expr:
    """`value` in every lane."""
    return value if n == 1 else T.broadcast(value, n)


def const(value: float, n: int = LANES) -> Expr:
    """A float32 constant in every lane."""
    return splat(T.float32(value), n)


def vector_type(dtype: str, n: int = LANES) -> str:
    """TVM's name of a vector type; one lane is the scalar type."""
    return dtype if n == 1 else f"{dtype}x{n}"


def to_f32(value: Expr, dtype: str, n: int = LANES, *, has_f16c: bool = True) -> Expr:
    """Stored numbers (`float32`, `float16`, or `bfloat16` as its 16 bits) as float32, exactly."""
    if dtype == "float32":
        return value
    if dtype == "bfloat16":  # the upper half of a float32
        return _from_bits(T.shift_left(T.Cast(vector_type("uint32", n), value), _bits(16, n)), n)
    if not has_f16c:
        return _f16_to_f32(value, n)
    return T.Cast(vector_type("float32", n), value)


def _f16_to_f32(value: Expr, n: int) -> Expr:
    """What a processor without the instruction does: LLVM would call a function for each lane, 40 times as slow."""
    half = T.Cast(vector_type("uint32", n), T.reinterpret(vector_type("uint16", n), value))
    magnitude = T.shift_left(T.bitwise_and(half, _bits(0x7FFF, n)), _bits(13, n))
    sign = T.shift_left(T.bitwise_and(half, _bits(0x8000, n)), _bits(16, n))
    # the exponent's bias is 15 there and 127 here; a product gets subnormal numbers right too
    scaled = _from_bits(magnitude, n) * _from_bits(_bits((127 + 127 - 15) << 23, n), n)
    is_finite = magnitude < _bits(0x7C00 << 13, n)
    special = T.Select(is_finite, _bits(0, n), _bits(0x7F800000, n))
    return _from_bits(T.bitwise_or(T.bitwise_or(T.reinterpret(vector_type("uint32", n), scaled), sign), special), n)


def _bits(value: int, n: int) -> Expr:
    return T.uint32(value) if n == 1 else splat(T.uint32(value), n)


def _from_bits(bits: Expr, n: int) -> Expr:
    return T.reinterpret(vector_type("float32", n), bits)


def storage_type(dtype: str) -> str:
    """The type that a kernel's buffer has for numbers of `dtype`."""
    return "uint16" if dtype == "bfloat16" else dtype


def fma(a: Expr, b: Expr, c: Expr, has_fma: bool, n: int = LANES, bits: int = 32) -> Expr:
    """`a * b + c` of floats of so many bits, rounded once where the target can."""
    if not has_fma:
        return a * b + c
    name = f"llvm.fma.f{bits}" if n == 1 else f"llvm.fma.v{n}f{bits}"
    return T.call_llvm_pure_intrin(vector_type(f"float{bits}", n), name, a, b, c)


def reduce_max(value: Expr) -> Expr:
    """The largest of 16 float32 lanes."""
    return T.call_llvm_pure_intrin("float32", "llvm.vector.reduce.fmax.v16f32", value)


def reduce_sum_i32(value: Expr) -> Expr:
    """The sum of 16 int32 lanes."""
    return T.call_llvm_pure_intrin("int32", "llvm.vector.reduce.add.v16i32", value)


def exp(x: Expr, has_fma: bool) -> Expr:
    """e to the power of each of 16 lanes, to 1e-7 relative; arguments below -87 count as -87.

    The polynomial is Cephes' expf (S. L. Moshier): a vector `T.exp` would be 16 calls of libm.
    """
    x = T.min(T.max(x, const(-87.0)), const(88.0))
    # beside so large a number only whole ones can be told apart, and its last bits are the power's exponent
    shifted = fma(x, const(1.4426950408889634), const(_WHOLE), has_fma)
    bits = T.reinterpret("int32x16", shifted)
    # TVM takes an addition back that it sees: `(x * c + _WHOLE) - _WHOLE` would be `x * c`
    n = shifted - const(_WHOLE) if has_fma else T.Cast("float32x16", bits - splat(T.int32(_WHOLE_BITS)))
    r = fma(n, const(-0.693359375), x, has_fma)
    r = fma(n, const(2.12194440e-4), r, has_fma)
    p = const(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, const(c), has_fma)
    y = fma(p, r * r, r + const(1.0), has_fma)
    power = T.shift_left(bits, T.broadcast(T.int32(23), LANES))
    return y * T.reinterpret("float32x16", power)


def tanh(x: Expr, has_fma: bool) -> Expr:
    """The hyperbolic tangent of each of 16 lanes, to 2e-7 relative; NaN gives NaN. `x` is computed several times.

    The odd polynomial near 0 is Cephes' tanhf (S. L. Moshier); farther away e to the power of 2 |x| is exact enough.
    """
    bits = T.reinterpret("int32x16", x)
    magnitude = T.reinterpret("float32x16", T.bitwise_and(bits, splat(T.int32(0x7FFFFFFF))))
    square = x * x
    p = const(-5.70498872745e-3)
    for c in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        p = fma(p, square, const(c), has_fma)
    near = fma(p * square, x, x, has_fma)
    far = const(1.0) - const(2.0) / (exp(magnitude * const(2.0), has_fma) + const(1.0))
    sign = T.bitwise_and(bits, splat(T.int32(-0x80000000)))
    far = T.reinterpret("float32x16", T.bitwise_or(T.reinterpret("int32x16", far), sign))
    return T.Select(magnitude >= const(0.625), far, near)  # not `<`: NaN must come from the polynomial
