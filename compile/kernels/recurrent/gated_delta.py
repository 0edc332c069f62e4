"""The gated delta rule: each value head has a matrix that fades, and that each token corrects.

Tokens are taken one after the other, value columns beside each other, and sums over keys run in the order of the keys:
a token's bits depend on its own row and on the state before it, and never on where a step begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from tvm.script.ir_builder import tirx as T

from ...codegen import elementwise
from ...codegen.builder import SIZE, Kernel, bound, for_each_row, parallel, registers, serial, when
from ...codegen.targets import Target
from ...codegen.vector import LANES, Expr, const, fma, lanes, splat
from ..row_norms import inverse_rms

_L2_EPS = 1e-6
_COLUMNS = (64, 32, 16)  # of a value that a thread takes at a time


@dataclass(frozen=True)
class DeltaShape:
    """Heads, and how their rows lie; all sizes but the numbers of heads are multiples of 16.

    Attributes:
        x_stride: of rows that hold queries, keys and values of all heads.
        scalars_stride: of rows that hold the fading of each value head, and in the second half how much it learns.
        slot_items: numbers of a slot, of this layer and others.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    tiled: bool
    x_stride: int
    scalars_stride: int
    y_stride: int
    slot_items: int


def delta_inputs(shape: DeltaShape, joined_stride: int, b: int, a: int, target: Target) -> Any:
    """A PrimFunc `(joined, rate, dt_bias, x, scalars, num_tokens) -> 0`.

    Queries and keys of `x` get a length of one, queries also over the root of their size. `scalars` become
    `exp(rate * softplus(a + dt_bias))` and `sigmoid(b)` of each value head; b and a are columns of `joined`, which like
    `rate` and `dt_bias` have numbers for a multiple of 16 heads.
    """
    dim, heads = shape.key_dim, shape.num_key_heads
    half = shape.scalars_stride // 2
    with Kernel() as k:
        joined, rate, dt_bias, x, scalars, num_tokens = k.arguments(
            joined="float32", rate="float32", dt_bias="float32", x="float32", scalars="float32", num_tokens=SIZE
        )

        def row(token: Expr) -> None:
            with serial(2 * heads) as head:
                start = bound(token * shape.x_stride + head * dim)
                scale = registers(1, "float32")
                scale[0] = inverse_rms(dim, _L2_EPS / dim, x, start, target.has_fma)
                scale[0] = scale[0] * T.Select(head < heads, T.float32(1 / dim), T.float32(dim**-0.5))
                with serial(dim // LANES) as i:
                    x[lanes(start + i * LANES)] = x[lanes(start + i * LANES)] * splat(scale[0])
            for i in range(0, half, LANES):
                at, into = token * joined_stride + i, token * shape.scalars_stride + i
                steps = elementwise.softplus(joined[lanes(at + a)] + dt_bias[lanes(i)], target.has_fma)
                scalars[lanes(into)] = elementwise.exp(rate[lanes(i)] * steps, target.has_fma)
                scalars[lanes(into + half)] = elementwise.sigmoid(joined[lanes(at + b)], target.has_fma)

        for_each_row(num_tokens, row)
    return k.function


def gated_delta(shape: DeltaShape, target: Target) -> Any:
    """A PrimFunc `(x, scalars, row_of_token, state_in, state_out, pool, y, first, num_tokens) -> 0`.

    For each value head and token, with its matrix S, `S *= fading`, `S += k (learns * (v - S^T k))^T`, `y = S^T q`. A
    sequence's matrices `[num_value_heads, key_dim, value_dim]` lie behind `first` numbers of its slots of `pool`: they
    are read from `state_in[row]`, and those of `state_out[row]` are worked in. Tokens of a row lie side by side.
    """
    dk, dv = shape.key_dim, shape.value_dim
    columns = next(size for size in _COLUMNS if dv % size == 0)
    parts, half = dv // columns, shape.scalars_stride // 2
    vectors = range(0, columns, LANES)
    ratio = shape.num_value_heads // shape.num_key_heads
    with Kernel() as k:
        x, scalars, row_of_token, state_in, state_out, pool, y, first, num_tokens = k.arguments(
            x="float32",
            scalars="float32",
            row_of_token="int32",
            state_in="int32",
            state_out="int32",
            pool="float32",
            y="float32",
            first=SIZE,
            num_tokens=SIZE,
        )
        with parallel(shape.num_value_heads * parts) as item:
            head, column = bound(item // parts), bound(item % parts * columns)
            key_head = bound(head % shape.num_key_heads if shape.tiled else head // ratio)
            before = bound(first + head * (dk * dv) + column)
            sums, delta = registers(columns, "float32"), registers(columns, "float32")
            with serial(num_tokens) as token:
                row = bound(T.Cast("int64", row_of_token[token]))
                matrix = bound(T.Cast("int64", state_out[row]) * shape.slot_items + before)
                previous = row_of_token[T.max(token - 1, T.int64(0))]
                with when(tvm.tirx.Or(token == 0, previous != row_of_token[token])):
                    source = bound(T.Cast("int64", state_in[row]) * shape.slot_items + before)
                    with when(source != matrix), serial(dk) as i:
                        for v in vectors:
                            pool[lanes(matrix + i * dv + v)] = pool[lanes(source + i * dv + v)]
                query = bound(token * shape.x_stride + key_head * dk)
                key = bound(query + shape.num_key_heads * dk)
                value = bound(token * shape.x_stride + 2 * shape.num_key_heads * dk + head * dv + column)
                fading = bound(scalars[token * shape.scalars_stride + head])
                learns = bound(scalars[token * shape.scalars_stride + half + head])
                for v in vectors:
                    sums[lanes(v)] = const(0)
                with serial(dk) as i:
                    for v in vectors:
                        kept = pool[lanes(matrix + i * dv + v)]
                        sums[lanes(v)] = fma(kept, splat(x[key + i]), sums[lanes(v)], target.has_fma)
                for v in vectors:
                    off = x[lanes(value + v)] - sums[lanes(v)] * splat(fading)
                    delta[lanes(v)] = off * splat(learns)
                    sums[lanes(v)] = const(0)
                with serial(dk) as i:
                    for v in vectors:
                        where = lanes(matrix + i * dv + v)
                        faded = pool[where] * splat(fading)
                        kept = bound(fma(splat(x[key + i]), delta[lanes(v)], faded, target.has_fma))
                        pool[where] = kept
                        sums[lanes(v)] = fma(kept, splat(x[query + i]), sums[lanes(v)], target.has_fma)
                for v in vectors:
                    y[lanes(token * shape.y_stride + head * dv + column + v)] = sums[lanes(v)]
    return k.function


@dataclass(frozen=True)
class GatedNorm:
    """Rows of `num_parts` of `size` numbers, each normalized by itself; gates begin at `column` of their rows."""

    num_parts: int
    size: int
    y_stride: int
    gate_stride: int
    column: int
    eps: float


def gated_norm(shape: GatedNorm, target: Target) -> Any:
    """A PrimFunc `(y, gates, gain, num_rows) -> 0`: `y / rms(y) * gain * silu(gates)` in place, part by part."""
    with Kernel() as k:
        y, gates, gain, num_rows = k.arguments(y="float32", gates="float32", gain="float32", num_rows=SIZE)

        def row(m: Expr) -> None:
            with serial(shape.num_parts) as part:
                start = bound(m * shape.y_stride + part * shape.size)
                gate = bound(m * shape.gate_stride + shape.column + part * shape.size)
                scale = registers(1, "float32")
                scale[0] = inverse_rms(shape.size, shape.eps, y, start, target.has_fma)
                with serial(shape.size // LANES) as i:
                    through = elementwise.silu(gates[lanes(gate + i * LANES)], target.has_fma)
                    normed = y[lanes(start + i * LANES)] * splat(scale[0]) * gain[lanes(i * LANES)]
                    y[lanes(start + i * LANES)] = normed * through

        for_each_row(num_rows, row)
    return k.function
