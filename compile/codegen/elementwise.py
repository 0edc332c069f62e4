"""Activation functions on 16 lanes: gates, and functions that replace a gate in models without one.

Each takes float32 vectors and whether the target has fused multiply-add. NaN gives NaN, so T.min and T.max are not
used: they return their other operand. Values that are used more than once are bound, or they would be compiled at each
use. Knows formulas, not rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.script import tirx as T

from .builder import bound
from .vector import Expr, const, fma, splat
from .vector import exp as _exp
from .vector import tanh as _tanh

Unary = Callable[[Expr, bool], Expr]
Binary = Callable[[Expr, Expr, bool], Expr]


def identity(x: Expr, has_fma: bool) -> Expr:
    """Return `x`."""
    return x


# erfc(a) * exp(a * a) / t over t = 1 / (1 + a / 2), to 6e-8 relative for a <= 10 (fitted at Chebyshev nodes)
_ERFC = (
    -0.05955763961,
    0.2868402665,
    -0.491620402,
    0.2827868791,
    -0.02962459276,
    0.2038409991,
    0.2428427462,
    0.2824068268,
    0.28208487,
)
_LOG1P = (0.2816145375, 0.279643447, 0.4002465133, 0.6666632041, 2.0)  # 2 atanh(s) / s over s * s <= 1/9, to 4e-9
_SWIGLU_LIMIT, _SWIGLU_SLOPE = 7.0, 1.702  # of gpt-oss


def exp(x: Expr, has_fma: bool) -> Expr:
    """Return e to the power of each lane, bound."""
    return bound(_exp(bound(x), has_fma))


def sigmoid(x: Expr, has_fma: bool) -> Expr:
    """Return `1 / (1 + exp(-x))`."""
    x = bound(x)
    value = const(1) / (const(1) + exp(const(0) - x, has_fma))
    # compared as integers, in whose order NaN follows infinity: LLVM takes `x >= x` for true
    magnitude = T.bitwise_and(T.reinterpret("int32x16", x), splat(T.int32(0x7FFFFFFF)))
    return T.Select(magnitude > splat(T.int32(0x7F800000)), x, value)


def softplus(x: Expr, has_fma: bool) -> Expr:
    """Return `log(1 + exp(x))`, as max(x, 0) + log(1 + e) with e = exp(-|x|), and that as 2 atanh(e / (2 + e))."""
    x = bound(x)
    e = exp(T.Select(x < const(0), x, const(0) - x), has_fma)
    s = bound(e / (const(2) + e))
    return T.Select(x < const(0), const(0), x) + s * _polynomial(_LOG1P, bound(s * s), has_fma)


def silu(x: Expr, has_fma: bool) -> Expr:
    """Return `x * sigmoid(x)`."""
    x = bound(x)
    return x / (const(1) + exp(const(0) - x, has_fma))


def gelu_tanh(x: Expr, has_fma: bool) -> Expr:
    """Return `x / 2 * (1 + tanh(u))` with `u = sqrt(2 / pi) * (x + 0.044715 x^3)`, which is `x * sigmoid(2 u)`."""
    x = bound(x)
    slope = fma(x * x, const(-0.0713548162726), const(-1.5957691216057308), has_fma)
    return x / (const(1) + exp(slope * x, has_fma))


def gelu(x: Expr, has_fma: bool) -> Expr:
    """Return `x * Phi(x)`, with the normal distribution `Phi(x) = erfc(-x / sqrt(2)) / 2`, to 4e-7 of `x`."""
    x = bound(x)
    a = bound(T.Select(x < const(0), const(0) - x, x) * const(0.7071067811865476))
    t = bound(const(1) / fma(a, const(0.5), const(1), has_fma))
    tail = bound(const(0.5) * t * _polynomial(_ERFC, t, has_fma) * exp(const(0) - a * a, has_fma))
    return x * T.Select(x < const(0), tail, const(1) - tail)


def relu2(x: Expr, has_fma: bool) -> Expr:
    """Return the square of `max(x, 0)` (So et al., 2021)."""
    positive = bound(T.Select(x < const(0), const(0), x))
    return positive * positive


def tanh(x: Expr, has_fma: bool) -> Expr:
    """Return the hyperbolic tangent of `x`."""
    return _tanh(bound(x), has_fma)


def silu_mul(gate: Expr, up: Expr, has_fma: bool) -> Expr:
    """Return SwiGLU of a gate: `silu(gate) * up` (Shazeer, 2020)."""
    gate = bound(gate)
    return up * gate / (const(1) + exp(const(0) - gate, has_fma))


def swiglu_clamped(gate: Expr, up: Expr, has_fma: bool) -> Expr:
    """Return gpt-oss's SwiGLU: the gate is at most 7, `up` is clamped to [-7, 7] and 1 is added to it."""
    limit, least = const(_SWIGLU_LIMIT), const(-_SWIGLU_LIMIT)
    gate, up = bound(gate), bound(up)
    gate = bound(T.Select(gate > limit, limit, gate))
    up = T.Select(up > limit, limit, T.Select(up < least, least, up))
    return (up + const(1)) * (gate / (const(1) + exp(gate * const(-_SWIGLU_SLOPE), has_fma)))


def times(function: Unary) -> Binary:
    """Return the gated function `function(gate) * up`."""
    return lambda gate, up, has_fma: up * function(gate, has_fma)


def _polynomial(coefficients: Sequence[float], x: Expr, has_fma: bool) -> Expr:
    """Return the polynomial at `x`; coefficients have the highest power first."""
    p = const(coefficients[0])
    for c in coefficients[1:]:
        p = fma(p, x, const(c), has_fma)
    return p
