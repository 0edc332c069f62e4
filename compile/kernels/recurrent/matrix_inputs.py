"""What enters states of one matrix a head, and what stands behind them: lengths, fading, norms with gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as T

from ...codegen import elementwise
from ...codegen.builder import SIZE, Kernel, bound, for_each_row, registers, serial
from ...codegen.targets import Target
from ...codegen.vector import LANES, Expr, lanes, splat
from ..row_norms import inverse_rms

_L2_EPS = 1e-6


@dataclass(frozen=True)
class UnitHeads:
    """The first `2 * num_heads` parts of rows, each of `size`, a multiple of 16: queries, and behind them keys."""

    num_heads: int
    size: int
    x_stride: int


def unit_heads(shape: UnitHeads, target: Target) -> Any:
    """A PrimFunc `(x, num_rows) -> 0`: heads get a length of one, queries also over the root of their size."""
    dim = shape.size
    with Kernel() as k:
        x, num_rows = k.arguments(x="float32", num_rows=SIZE)

        def row(token: Expr) -> None:
            with serial(2 * shape.num_heads) as head:
                start = bound(token * shape.x_stride + head * dim)
                scale = registers(1, "float32")
                scale[0] = inverse_rms(dim, _L2_EPS / dim, x, start, target.has_fma)
                scale[0] = scale[0] * T.Select(head < shape.num_heads, T.float32(1 / dim), T.float32(dim**-0.5))
                with serial(dim // LANES) as i:
                    x[lanes(start + i * LANES)] = x[lanes(start + i * LANES)] * splat(scale[0])

        for_each_row(num_rows, row)
    return k.function


@dataclass(frozen=True)
class HeadScalars:
    """Where rows hold a step of each head, and `b`, or None: a head then learns by its step.

    Rows have numbers for a multiple of 16 heads, and so have the rows that come of them, in both halves of `stride`.
    """

    step: int
    b: int | None
    x_stride: int
    stride: int


def head_scalars(shape: HeadScalars, target: Target) -> Any:
    """A PrimFunc `(x, rate, bias, scalars, num_rows) -> 0`.

    With `steps = softplus(step + bias)`, a head's fading is `exp(rate * steps)`, and it learns `sigmoid(b)` or `steps`.
    """
    half, has_fma = shape.stride // 2, target.has_fma
    with Kernel() as k:
        x, rate, bias, scalars, num_rows = k.arguments(
            x="float32", rate="float32", bias="float32", scalars="float32", num_rows=SIZE
        )

        def row(m: Expr) -> None:
            for i in range(0, half, LANES):
                at, into = m * shape.x_stride + i, m * shape.stride + i
                steps = bound(elementwise.softplus(x[lanes(at + shape.step)] + bias[lanes(i)], has_fma))
                scalars[lanes(into)] = elementwise.exp(rate[lanes(i)] * steps, has_fma)
                learns = steps if shape.b is None else elementwise.sigmoid(x[lanes(at + shape.b)], has_fma)
                scalars[lanes(into + half)] = learns

        for_each_row(num_rows, row)
    return k.function


@dataclass(frozen=True)
class GatedNorm:
    """Rows of `num_parts` of `size` numbers, each normalized by itself; gates begin at `column` of their rows.

    Attributes:
        gates_first: gates are multiplied with before the norm, and not behind it.
        own_gains: each part has gains of its own.
    """

    num_parts: int
    size: int
    y_stride: int
    gate_stride: int
    column: int
    eps: float
    gates_first: bool = False
    own_gains: bool = False


def gated_norm(shape: GatedNorm, target: Target) -> Any:
    """A PrimFunc `(y, gates, gain, num_rows) -> 0`: `y / rms(y) * gain * silu(gates)` in place, part by part."""
    vectors = shape.size // LANES
    with Kernel() as k:
        y, gates, gain, num_rows = k.arguments(y="float32", gates="float32", gain="float32", num_rows=SIZE)

        def row(m: Expr) -> None:
            with serial(shape.num_parts) as part:
                start = bound(m * shape.y_stride + part * shape.size)
                gate = bound(m * shape.gate_stride + shape.column + part * shape.size)
                first_gain = part * shape.size if shape.own_gains else T.int64(0)

                def through(i: Expr) -> Expr:
                    return elementwise.silu(gates[lanes(gate + i * LANES)], target.has_fma)

                if shape.gates_first:
                    with serial(vectors) as i:
                        y[lanes(start + i * LANES)] = y[lanes(start + i * LANES)] * through(i)
                scale = registers(1, "float32")
                scale[0] = inverse_rms(shape.size, shape.eps, y, start, target.has_fma)
                with serial(vectors) as i:
                    normed = y[lanes(start + i * LANES)] * splat(scale[0]) * gain[lanes(first_gain + i * LANES)]
                    y[lanes(start + i * LANES)] = normed if shape.gates_first else normed * through(i)

        for_each_row(num_rows, row)
    return k.function
