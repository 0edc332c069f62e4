"""Operations on vectors of 16 lanes in TVMScript, in which kernels are written.

LLVM splits the vectors into the target's registers. These Python functions build expressions; names are short because
kernels are read as formulas. Flags say whether the target has an instruction for fused multiply-add (`has_fma`) or
float16 conversion (`has_f16c`).

Contraction is always explicit, so that kernels that add the same numbers in the same order get the same bits. It is
`fma`, or a product and a sum in one expression, which TVM makes `llvm.fmuladd`. Bind a product that must be rounded
before an addition.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

LANES = 16
# A float32 plus this has the nearest integer (ties to even) in its low bits, for magnitudes up to 2**22.
ROUNDING = 1.5 * 2**23
Expr = Any  # a TVM expression
_WHOLE = ROUNDING + 127  # 127 is the exponent bias
_WHOLE_BITS = 0x4B40007F  # bits of the same float32


def lanes(start: Expr, n: int = LANES) -> Expr:
    """Return `n` consecutive indices from `start`; for n = 1 `start` itself, because vectors need two lanes."""
    return start if n == 1 else T.ramp(start, 1, n)


def splat(value: Expr, n: int = LANES) -> Expr:
    """Return a vector with `value` in every lane."""
    return value if n == 1 else T.broadcast(value, n)


def const(value: float, n: int = LANES) -> Expr:
    """Return a vector with a float32 constant in every lane."""
    return splat(T.float32(value), n)


def vector_type(dtype: str, n: int = LANES) -> str:
    """Return TVM's name of a vector type; one lane is the scalar type."""
    return dtype if n == 1 else f"{dtype}x{n}"


def to_f32(value: Expr, dtype: str, n: int = LANES, *, has_f16c: bool = True) -> Expr:
    """Return stored numbers (`float32`, `float16`, or `bfloat16` as its 16 bits) as float32, exactly."""
    if dtype == "float32":
        return value
    if dtype == "bfloat16":  # bfloat16 is the upper half of a float32
        return _from_bits(T.shift_left(T.Cast(vector_type("uint32", n), value), _bits(16, n)), n)
    if not has_f16c:
        return _f16_to_f32(value, n)
    return T.Cast(vector_type("float32", n), value)


def _f16_to_f32(value: Expr, n: int) -> Expr:
    """Convert float16 without an instruction: LLVM would call a function per lane, 40 times as slow."""
    half = T.Cast(vector_type("uint32", n), T.reinterpret(vector_type("uint16", n), value))
    magnitude = T.shift_left(T.bitwise_and(half, _bits(0x7FFF, n)), _bits(13, n))
    sign = T.shift_left(T.bitwise_and(half, _bits(0x8000, n)), _bits(16, n))
    # the exponent bias is 15 there and 127 here; a product is right for subnormal numbers, too
    scaled = _from_bits(magnitude, n) * _from_bits(_bits((127 + 127 - 15) << 23, n), n)
    is_finite = magnitude < _bits(0x7C00 << 13, n)
    special = T.Select(is_finite, _bits(0, n), _bits(0x7F800000, n))
    return _from_bits(T.bitwise_or(T.bitwise_or(T.reinterpret(vector_type("uint32", n), scaled), sign), special), n)


def _bits(value: int, n: int) -> Expr:
    """Return uint32 bits in `n` lanes."""
    return T.uint32(value) if n == 1 else splat(T.uint32(value), n)


def _from_bits(bits: Expr, n: int) -> Expr:
    """Return bits as float32 in `n` lanes."""
    return T.reinterpret(vector_type("float32", n), bits)


def storage_type(dtype: str) -> str:
    """Return the type of a kernel's buffer for numbers of `dtype`."""
    return "uint16" if dtype == "bfloat16" else dtype


def fma(a: Expr, b: Expr, c: Expr, has_fma: bool, n: int = LANES, bits: int = 32) -> Expr:
    """Return `a * b + c` of floats of `bits` bits, rounded once if the target can."""
    if not has_fma:
        return a * b + c
    name = f"llvm.fma.f{bits}" if n == 1 else f"llvm.fma.v{n}f{bits}"
    return T.call_llvm_pure_intrin(vector_type(f"float{bits}", n), name, a, b, c)


def reduce_max(value: Expr) -> Expr:
    """Return the largest of 16 float32 lanes."""
    return T.call_llvm_pure_intrin("float32", "llvm.vector.reduce.fmax.v16f32", value)


def reduce_sum_i32(value: Expr) -> Expr:
    """Return the sum of 16 int32 lanes."""
    return T.call_llvm_pure_intrin("int32", "llvm.vector.reduce.add.v16i32", value)


def nearest_integer(x: Expr) -> Expr:
    """Round 16 float32 of magnitudes up to 2**22 to int32, ties to even; other numbers give any result.

    Bind `x` if it is a product. `T.nearbyint` would call libm on old CPUs, once for each lane.
    """
    shifted = T.reinterpret("int32x16", x + const(ROUNDING))
    return shifted - splat(T.int32(0x4B400000))


def exp(x: Expr, has_fma: bool) -> Expr:
    """Return e to the power of each of 16 lanes, to 1e-7 relative; arguments below -87 count as -87.

    The polynomial is that of Cephes' expf (S. L. Moshier); a vector `T.exp` would be 16 calls of libm.
    """
    x = T.min(T.max(x, const(-87.0)), const(88.0))
    # added to so large a number, only integers are distinct, and its last bits are the power's exponent
    shifted = fma(x, const(1.4426950408889634), const(_WHOLE), has_fma)
    bits = T.reinterpret("int32x16", shifted)
    # TVM folds visible additions: `(x * c + _WHOLE) - _WHOLE` would become `x * c`
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
    """Return the hyperbolic tangent of each of 16 lanes, to 2e-7 relative; NaN gives NaN.

    `x` is computed several times. Near 0 it is the odd polynomial of Cephes' tanhf (S. L. Moshier). Farther away, e to
    the power of 2 |x| is exact enough.
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
