"""States of one decaying matrix per head, updated by each token: the gated delta rule, and Mamba-2.

Tokens are computed one after the other, value columns in parallel. Sums over keys run in an order that depends on the
sizes alone. A token's bits depend on its own row and on the state before it, not on where a step begins.
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
    """Layout of heads that are normalized to unit length: the first `2 * num_heads` parts of rows.

    Queries come first, then keys. Each part has `size` numbers, a multiple of 16.
    """

    num_heads: int
    size: int
    x_stride: int


def unit_heads(shape: UnitHeads, target: Target) -> Any:
    """Return the PrimFunc `(x, num_rows) -> 0`: heads get unit length, queries also over the root of their size."""
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
    """Columns of each head's step and of its gate `b`; without `b`, the step is also the learning rate.

    Input rows have a multiple of 16 heads; so do both halves of `stride` in output rows.
    """

    step: int
    b: int | None
    x_stride: int
    stride: int


def head_scalars(shape: HeadScalars, target: Target) -> Any:
    """Return the PrimFunc `(x, rate, bias, scalars, num_rows) -> 0`, which computes decays and learning rates.

    With `steps = softplus(step + bias)`, the decay is `exp(rate * steps)`, and the learning rate `sigmoid(b)` or
    `steps`.
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
    """A norm of each of `num_parts` parts of `size` numbers of a row; gates begin at `column` of their rows.

    Attributes:
        gates_first: true to multiply by the gates before the norm, not after it.
        own_gains: true if each part has gains of its own.
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
    """Return the PrimFunc `(y, gates, gain, num_rows) -> 0`: `y / rms(y) * gain * silu(gates)` by part, in place."""
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


_COLUMNS = (64, 32, 16)  # numbers of columns of a value that a thread can take at a time
_CHAINS = 4  # chains of additions; each addition waits for the one before it


@dataclass(frozen=True)
class MatrixShape:
    """Heads and the layout of their rows; `value_dim` is a multiple of 16.

    Attributes:
        tiled: true if value head `h` has the query and key of head `h % num_key_heads`; otherwise neighbours share
            them.
        query, key, value: columns of the first head's query, key and value.
        x_stride: length of rows with queries, keys and values of all heads.
        scalars_stride: length of rows with the decay of each value head and, in the second half, its learning rate.
        slot_items: numbers of a slot, of this layer and others.
        corrects: true if a token adds the error of its value (delta rule), not the whole value.
        skips: true if the output gets the value times a number of its head.
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
    """Return the PrimFunc `(x, scalars, row_of_token, state_in, state_out, skip, pool, y, first, num_tokens) -> 0`.

    For each value head and token, with its matrix S: `S *= decay`, `S += k (learns * (v - S^T k))^T`, `y = S^T q + skip
    * v`; S^T k only if the shape corrects. A sequence's matrices `[num_value_heads, key_dim, value_dim]` begin after
    `first` numbers of its slots of `pool`. They are read from slot `state_in[row]` and updated in slot
    `state_out[row]`. Tokens of a row are adjacent.
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
                """Call `some` for all keys, in runs of `chains`, each of which adds to a sum of its own."""
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
