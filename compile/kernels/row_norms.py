"""Statistics of a row, and the kernels that normalize, scale or cap whole rows in place.

Sums run in an order that depends on the width alone. Vectors are added in turn to four sums, because each addition
waits for the one before it. Then lanes are added by halves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tvm.script.ir_builder import tirx as T

from ..codegen.builder import SIZE, Kernel, Memory, bound, for_each_lanes, for_each_row, parallel, registers, serial
from ..codegen.lane_reductions import sum_of_lanes
from ..codegen.targets import Target
from ..codegen.vector import LANES, Expr, const, fma, lanes, splat, tanh
from ..weights.layout import ROW_BLOCK, round_up

_SUMS = 4
_COLUMNS = 4096  # of a row of logits that a thread takes at a time


def inverse_rms(width: int, eps: float, x: Memory, start: Expr, has_fma: bool) -> Expr:
    """Return 1 / sqrt(mean of squares + eps) of `x[start..start + width)`, a float32 (Zhang and Sennrich, 2019)."""
    total = _sum(
        width,
        lambda i, so_far: fma(x[lanes(start + i)], x[lanes(start + i)], so_far, has_fma),
        lambda i: x[start + i] * x[start + i],
    )
    total[0] = T.float32(1) / T.sqrt(total[0] / T.float32(width) + T.float32(eps))
    return total[0]


def mean_and_inverse_deviation(width: int, eps: float, x: Memory, start: Expr, has_fma: bool) -> tuple[Expr, Expr]:
    """Return the mean, and 1 / sqrt(variance + eps) (Ba et al., 2016): one pass for the mean, then one for squares."""
    mean = _sum(width, lambda i, so_far: so_far + x[lanes(start + i)], lambda i: x[start + i])
    mean[0] = mean[0] / T.float32(width)

    def squared(i: Expr, so_far: Expr) -> Expr:
        off = x[lanes(start + i)] - splat(mean[0])
        return fma(off, off, so_far, has_fma)

    total = _sum(width, squared, lambda i: (x[start + i] - mean[0]) * (x[start + i] - mean[0]))
    total[0] = T.float32(1) / T.sqrt(total[0] / T.float32(width) + T.float32(eps))
    return mean[0], total[0]


def _sum(width: int, add: Callable[[Expr, Expr], Expr], single: Callable[[Expr], Expr]) -> Memory:
    """Return the sum over a row, one float32.

    `add(i, so_far)` adds 16 neighbours from `i` on; `single(i)` is one element.
    """
    sums, total = registers(_SUMS * LANES, "float32"), registers(1, "float32")
    for i in range(_SUMS):
        sums[lanes(i * LANES)] = const(0)
    total[0] = T.float32(0)
    step = _SUMS * LANES
    with serial(width // step) as i:
        for into in range(_SUMS):
            sums[lanes(into * LANES)] = add(i * step + into * LANES, sums[lanes(into * LANES)])
    for i in range(width // step * step, width // LANES * LANES, LANES):
        where = lanes(i // LANES % _SUMS * LANES)
        sums[where] = add(T.int64(i), sums[where])
    for i in range(width // LANES * LANES, width):
        total[0] = total[0] + single(T.int64(i))
    a, b, c, d = (sums[lanes(i * LANES)] for i in range(_SUMS))
    total[0] = total[0] + sum_of_lanes((a + b) + (c + d))
    return total


@dataclass(frozen=True)
class AddNormSpec:
    """A branch's addition to the residual: `x += factor * norm(y) * gain`; without `normalize` there is no norm."""

    width: int
    x_stride: int
    y_stride: int
    eps: float = 0.0
    factor: float = 1.0
    normalize: bool = True
    has_gain: bool = True


def add_norm(spec: AddNormSpec, target: Target) -> Any:
    """Return the PrimFunc `(y, gain, x, num_rows) -> 0`, which adds `y` to `x` as the spec says.

    `x` is float32 `[num_rows, x_stride]`, `y` `[num_rows, y_stride]`.
    """
    has_gain = spec.normalize and spec.has_gain
    with Kernel() as k:
        y, gain, x, num_rows = k.arguments(y="float32", gain="float32", x="float32", num_rows=SIZE)

        def row(m: Expr) -> None:
            scale = registers(1, "float32")
            scale[0] = T.float32(1)
            if spec.normalize:
                scale[0] = inverse_rms(spec.width, spec.eps, y, m * spec.y_stride, target.has_fma)

            def some(i: Expr, n: int) -> None:
                value = y[lanes(m * spec.y_stride + i, n)]
                if spec.normalize:
                    value = value * splat(scale[0], n)
                if has_gain:
                    value = value * gain[lanes(i, n)]
                if spec.factor != 1:
                    value = value * const(spec.factor, n)
                where = lanes(m * spec.x_stride + i, n)
                x[where] = x[where] + value

            for_each_lanes(spec.width, some)

        for_each_row(num_rows, row)
    return k.function


@dataclass(frozen=True)
class NormSpec:
    """A norm of whole rows in place; the bias follows the gain, at `round_up(width, 16)` (at 0 without gain)."""

    width: int
    stride: int
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    has_gain: bool = False
    has_bias: bool = False


def normalize_rows(spec: NormSpec, target: Target) -> Any:
    """Return the PrimFunc `(x, gain, num_rows) -> 0`, which normalizes rows of `x` as the spec says."""
    bias_at = round_up(spec.width, ROW_BLOCK) if spec.has_gain else 0
    with Kernel() as k:
        x, gain, num_rows = k.arguments(x="float32", gain="float32", num_rows=SIZE)

        def row(m: Expr) -> None:
            start = bound(m * spec.stride)
            mean, scale = registers(1, "float32"), registers(1, "float32")
            if spec.kind == "rms":
                scale[0] = inverse_rms(spec.width, spec.eps, x, start, target.has_fma)
            else:
                mean[0], scale[0] = mean_and_inverse_deviation(spec.width, spec.eps, x, start, target.has_fma)

            def some(i: Expr, n: int) -> None:
                where = lanes(start + i, n)
                value = x[where] if spec.kind == "rms" else x[where] - splat(mean[0], n)
                value = value * splat(scale[0], n)
                bias = gain[lanes(bias_at + i, n)] if spec.has_bias else None
                if spec.has_gain and bias is not None:
                    value = fma(value, gain[lanes(i, n)], bias, target.has_fma, n)
                elif spec.has_gain:
                    value = value * gain[lanes(i, n)]
                elif bias is not None:
                    value = value + bias
                x[where] = value

            for_each_lanes(spec.width, some)

        for_each_row(num_rows, row)
    return k.function


def scale_rows(width: int, stride: int) -> Any:
    """Return the PrimFunc `(x, factor, num_rows) -> 0`: `x *= factor[0]` in place."""
    with Kernel() as k:
        x, factor, num_rows = k.arguments(x="float32", factor="float32", num_rows=SIZE)

        def row(m: Expr) -> None:
            def some(i: Expr, n: int) -> None:
                where = lanes(m * stride + i, n)
                x[where] = x[where] * splat(factor[0], n)

            for_each_lanes(width, some)

        for_each_row(num_rows, row)
    return k.function


def bound_rows(stride: int, factor: float, soft_cap: float | None, target: Target) -> Any:
    """Return the PrimFunc `(x, num_rows) -> 0`: `x *= factor`, then `soft_cap * tanh(x / soft_cap)`, in place.

    Rows of logits have `stride` float32, a multiple of 16. They are long, so threads take parts of them.
    """
    chunks = -(-stride // _COLUMNS)
    with Kernel() as k:
        x, num_rows = k.arguments(x="float32", num_rows=SIZE)
        with parallel(num_rows * chunks) as item:
            row, first = item // chunks, item % chunks * _COLUMNS
            with serial(T.min(T.int64(_COLUMNS), stride - first) // LANES) as i:
                where = lanes(row * stride + first + i * LANES)
                value = x[where] if factor == 1 else x[where] * const(factor)
                if soft_cap is not None:
                    value = const(soft_cap) * tanh(bound(value * const(1 / soft_cap)), target.has_fma)
                x[where] = value
    return k.function
