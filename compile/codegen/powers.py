"""Powers of two, which attention uses as weights: cheaper than powers of e, and 2**0 is exactly 1."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script.ir_builder import tirx as T

from .builder import bound, registers
from .vector import LANES, ROUNDING, Expr, const, fma, lanes, splat

# 2**r - 1 over r for |r| <= 1/2, largest relative error of 2**r 9e-8 (a least squares fit, reweighted until flat)
_POWERS = (0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149)


ROUGH_POWERS = (0.69312419, 0.24024099, 0.05590643, 0.00958285)  # the same to 2.8e-6


def exp2(x: Expr, has_fma: bool, powers: Sequence[float] = _POWERS) -> Expr:
    """Return 2 to the power of each of 16 lanes, all at most 0, to 2e-7 relative.

    0 gives exactly 1, NaN gives NaN, and exponents below -126 count as -126. `ROUGH_POWERS` is faster, to 3e-6.
    """
    x = bound(T.Select(x < const(-126.0), const(-126.0), x))  # T.max would return -126 for NaN and hide it
    memory = registers(LANES, "float32")  # because TVM simplifies x + c - c to x if it sees both at once
    memory[lanes(0)] = x + const(ROUNDING)
    rounded = memory[lanes(0)]
    r = x - (rounded - const(ROUNDING))
    p = const(powers[-1])
    for c in (*powers[-2::-1], 1.0):
        p = fma(p, r, const(c), has_fma)
    exponent = T.shift_left(T.reinterpret("int32x16", rounded), splat(T.int32(23)))
    return T.reinterpret("float32x16", T.reinterpret("int32x16", p) + exponent)
