"""States of one matrix a head, which fades and to which each token adds: the gated delta rule, and Mamba-2.

Tokens are taken one after the other, value columns beside each other, and sums over keys run in an order that the
sizes alone decide: a token's bits depend on its own row and on the state before it, and never on where a step begins.
"""

from __future__ import annotations

from collections.abc import Callable
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


_COLUMNS = (64, 32, 16)  # of a value that a thread takes at a time
_CHAINS = 4  # of additions, each of which waits for the one before it


@dataclass(frozen=True)
class MatrixShape:
    """Heads, and how their rows lie; `value_dim` is a multiple of 16.

    Attributes:
        tiled: value head `h` has the query and key of head `h % num_key_heads`, and not those that neighbours share.
        query, key, value: the columns at which those of the first head begin.
        x_stride: of rows that hold queries, keys and values of all heads.
        scalars_stride: of rows that hold the fading of each value head, and in the second half how much it learns.
        slot_items: numbers of a slot, of this layer and others.
        corrects: a token adds what lacks of its value, not all of it.
        skips: a value, times a number of its head, is added to what its head gives.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    tiled: bool
    query: int
    key: int
    value: int
    x_stride: int
    scalars_stride: int
    y_stride: int
    slot_items: int
    corrects: bool
    skips: bool = False


def matrix_state(shape: MatrixShape, target: Target) -> Any:
    """A PrimFunc `(x, scalars, row_of_token, state_in, state_out, skip, pool, y, first, num_tokens) -> 0`.

    For each value head and token, with its matrix S, `S *= fading`, `S += k (learns * (v - S^T k))^T`, `y = S^T q +
    skip * v`; S^T k only where the shape corrects. A sequence's matrices `[num_value_heads, key_dim, value_dim]` lie
    behind `first` numbers of its slots of `pool`: they are read from `state_in[row]`, and those of `state_out[row]` are
    worked in. Tokens of a row lie side by side.
    """
    dk, dv, has_fma = shape.key_dim, shape.value_dim, target.has_fma
    columns = next(size for size in _COLUMNS if dv % size == 0)
    parts, half = dv // columns, shape.scalars_stride // 2
    vectors = range(0, columns, LANES)
    chains = max(1, _CHAINS // len(vectors))
    ratio = shape.num_value_heads // shape.num_key_heads
    with Kernel() as k:
        x, scalars, row_of_token, state_in, state_out, skip, pool, y, first, num_tokens = k.arguments(
            x="float32",
            scalars="float32",
            row_of_token="int32",
            state_in="int32",
            state_out="int32",
            skip="float32",
            pool="float32",
            y="float32",
            first=SIZE,
            num_tokens=SIZE,
        )
        with parallel(shape.num_value_heads * parts) as item:
            head, column = bound(item // parts), bound(item % parts * columns)
            key_head = bound(head % shape.num_key_heads if shape.tiled else head // ratio)
            before = bound(first + head * (dk * dv) + column * dk)
            sums, added = registers(chains * columns, "float32"), registers(columns, "float32")

            def total(v: int) -> Expr:
                return sum((sums[lanes(c * columns + v)] for c in range(1, chains)), sums[lanes(v)])

            def each_key(some: Callable[[Expr, int], None]) -> None:
                """For all keys, in turns of `chains`, each of which adds to sums of its own."""
                with serial(dk // chains) as i:
                    for chain in range(chains):
                        some(i * chains + chain, chain * columns)
                for i in range(dk // chains * chains, dk):
                    some(T.int64(i), i % chains * columns)

            def clear() -> None:
                for v in range(0, chains * columns, LANES):
                    sums[lanes(v)] = const(0)

            with serial(num_tokens) as token:
                row = bound(T.Cast("int64", row_of_token[token]))
                matrix = bound(T.Cast("int64", state_out[row]) * shape.slot_items + before)
                previous = row_of_token[T.max(token - 1, T.int64(0))]
                with when(tvm.tirx.Or(token == 0, previous != row_of_token[token])):
                    source = bound(T.Cast("int64", state_in[row]) * shape.slot_items + before)
                    with when(source != matrix), serial(dk) as i:
                        for v in vectors:
                            pool[lanes(matrix + i * columns + v)] = pool[lanes(source + i * columns + v)]
                query = bound(token * shape.x_stride + shape.query + key_head * dk)
                key = bound(token * shape.x_stride + shape.key + key_head * dk)
                value = bound(token * shape.x_stride + shape.value + head * dv + column)
                fading = bound(scalars[token * shape.scalars_stride + head])
                learns = bound(scalars[token * shape.scalars_stride + half + head])
                if shape.corrects:
                    clear()

                    def recall(i: Expr, into: int) -> None:
                        for v in vectors:
                            kept, so_far = pool[lanes(matrix + i * columns + v)], lanes(into + v)
                            sums[so_far] = fma(kept, splat(x[key + i]), sums[so_far], has_fma)

                    each_key(recall)
                for v in vectors:
                    lacks = x[lanes(value + v)]
                    lacks = lacks - total(v) * splat(fading) if shape.corrects else lacks
                    added[lanes(v)] = lacks * splat(learns)
                clear()

                def add_and_read(i: Expr, into: int) -> None:
                    for v in vectors:
                        where, so_far = lanes(matrix + i * columns + v), lanes(into + v)
                        kept = fma(splat(x[key + i]), added[lanes(v)], pool[where] * splat(fading), has_fma)
                        kept = bound(kept)
                        pool[where] = kept
                        sums[so_far] = fma(kept, splat(x[query + i]), sums[so_far], has_fma)

                each_key(add_and_read)
                for v in vectors:
                    given = total(v)
                    if shape.skips:
                        given = fma(x[lanes(value + v)], splat(skip[head]), given, has_fma)
                    y[lanes(token * shape.y_stride + head * dv + column + v)] = given
    return k.function
