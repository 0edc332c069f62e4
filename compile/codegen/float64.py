"""Sine, cosine and logarithm: computed in float64, rounded to float32 once, without libm.

Only sums, products and divisions are used, each rounded by itself, so results are the same bits on every target.
Products are bound, because TVM would fuse them with sums. A libm's results differ between systems. Knows vectors, not
tokens.
"""

from __future__ import annotations

import math

from tvm.script.ir_builder import tirx as T

from .builder import bound, registers
from .vector import Expr, lanes, splat, vector_type

_ROUNDING = 1.5 * 2**52  # a float64 plus this is an integer plus this; the low bits of its encoding hold the integer
# pi / 2 in three parts. The first two have 23 bits, so their products with integers up to 2**30 are exact.
_HALF_PI = (1.570796251296997, 7.549789415861596e-08, 5.390302858158119e-15)
# Taylor series over the square of an angle of at most pi / 4; both are off by 2e-14 at most.
_SINE = tuple((-1) ** k / math.factorial(2 * k + 1) for k in range(7))
_COSINE = tuple((-1) ** k / math.factorial(2 * k) for k in range(8))
_ATANH = tuple(1 / (2 * k + 1) for k in range(9))  # over a square of at most 0.03: off by 1e-15
_EXPONENT_ONE = 1023 << 52  # the exponent bits of a float64 from 1 to 2


def cosines_and_sines(angles: Expr, n: int) -> tuple[Expr, Expr]:
    """Return cosine and sine of `n` float32 of at most 2**30, to 0.5001 units in the last place."""
    x = bound(T.Cast(_doubles(n), angles))
    memory = registers(n, "float64")  # because TVM simplifies x + c - c to x if it sees both at once
    memory[lanes(0, n)] = bound(x * _double(2 / math.pi, n)) + _double(_ROUNDING, n)
    shifted = bound(memory[lanes(0, n)])
    turns = bound(shifted - _double(_ROUNDING, n))
    r = x
    for part in _HALF_PI:
        r = bound(r - bound(turns * _double(part, n)))
    square = bound(r * r)
    cosine, sine = bound(_series(_COSINE, square, n)), bound(r * _series(_SINE, square, n))
    quadrant = bound(T.reinterpret(vector_type("int64", n), shifted))
    is_odd = T.bitwise_and(quadrant, _integer(1, n)) > _integer(0, n)
    # cosines are negative in quadrants 1 and 2, sines in 2 and 3
    return (
        _rounded(T.Select(is_odd, sine, cosine), quadrant + _integer(1, n), n),
        _rounded(T.Select(is_odd, cosine, sine), quadrant, n),
    )


def logarithm(count: Expr) -> Expr:
    """Return the natural logarithm of an int32 of at least 1 as float32, to 0.5001 units in the last place."""
    bits = bound(T.reinterpret("int64", T.Cast("float64", count)))
    fraction = T.bitwise_or(T.bitwise_and(bits, T.int64((1 << 52) - 1)), T.int64(_EXPONENT_ONE))
    m = bound(T.reinterpret("float64", fraction))  # from 1 to 2
    is_large = m > T.float64(math.sqrt(2))
    exponent = T.Cast("float64", T.shift_right(bits, T.int64(52)) - T.int64(1023)) + T.Select(
        is_large, T.float64(1), T.float64(0)
    )
    m = bound(m * T.Select(is_large, T.float64(0.5), T.float64(1)))
    s = bound((m - T.float64(1)) / (m + T.float64(1)))  # log m = 2 atanh s
    series = _series(_ATANH, bound(s * s), 1)
    return T.Cast("float32", bound(exponent * T.float64(math.log(2))) + bound(T.float64(2) * s * series))


def _rounded(value: Expr, quadrant: Expr, n: int) -> Expr:
    """Return `value` as float32, negated in quadrants 2 and 3."""
    sign = T.shift_left(T.bitwise_and(quadrant, _integer(2, n)), _integer(62, n))
    bits = T.bitwise_xor(T.reinterpret(vector_type("int64", n), value), sign)
    return T.Cast(vector_type("float32", n), T.reinterpret(_doubles(n), bits))


def _series(coefficients: tuple[float, ...], x: Expr, n: int) -> Expr:
    """Return the polynomial at `x`, of `n` lanes; coefficients have the lowest power first."""
    value = _double(coefficients[-1], n)
    for c in coefficients[-2::-1]:
        value = bound(value * x) + _double(c, n)
    return value


def _doubles(n: int) -> str:
    """Return TVM's name of a vector of `n` float64."""
    return vector_type("float64", n)


def _double(value: float, n: int) -> Expr:
    """Return a vector of `n` equal float64."""
    return splat(T.float64(value), n)


def _integer(value: int, n: int) -> Expr:
    """Return a vector of `n` equal int64."""
    return splat(T.int64(value), n)
