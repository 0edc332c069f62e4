"""Rows of the embedding, from the same packed weights that a tied output matrix uses; learned rows; rows of texts.

Inputs are reordered for a matrix whose format sorts them by their groups. A step has all tokens of a text whose types
or means are computed, one after the other: that is so in models whose tokens see those after them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as T

from ..codegen.builder import SIZE, Kernel, Memory, bound, for_each_lanes, for_each_row, registers, serial, when
from ..codegen.vector import LANES, Expr, const, lanes, splat, storage_type, to_f32, vector_type
from ..weights.codes import CODES
from ..weights.kinds import WeightKind
from ..weights.layout import GROUP, ROW_BLOCK
from ..weights.packing import padded_inputs
from ..weights.scales import WeightScales, scale_dtypes
from .float_linear import DTYPES

_NEIGHBOURS = 4  # inputs of a token that are adjacent in memory


def embedding(kind: WeightKind, hidden_size: int, y_stride: int, factor: float = 1.0) -> Any:
    """Return the PrimFunc `(token_ids, codes, scales, offsets, y, num_rows) -> 0`.

    `y` is float32 `[num_rows, y_stride]`. Numbers are multiplied by `factor`. Columns past `hidden_size` become zero.
    """
    inputs = padded_inputs(kind, hidden_size)
    with Kernel() as k:
        token_ids, codes, scales, offsets, y, num_rows = k.arguments(
            token_ids="int32",
            codes="uint8" if kind.is_quantized else storage_type(DTYPES[kind.codes]),
            **scale_dtypes(kind),
            y="float32",
            num_rows=SIZE,
        )
        stored = WeightScales(kind, scales, offsets, inputs) if kind.is_quantized else None

        def row(m: Expr) -> None:
            token = T.Cast("int64", token_ids[m])
            block, lane = token // ROW_BLOCK, token % ROW_BLOCK

            def some(i: Expr, n: int) -> None:
                assert stored is not None
                value = _dequantized(codes, stored, block, lane, i, n)
                y[lanes(m * y_stride + i, n)] = value if factor == 1 else value * const(factor, n)

            if stored is not None:
                with serial(hidden_size // GROUP) as g:
                    for i in range(0, GROUP, _NEIGHBOURS):
                        some(g * GROUP + i, _NEIGHBOURS)
                for i in range(hidden_size // GROUP * GROUP, hidden_size):
                    some(T.int64(i), 1)
            else:
                with serial(hidden_size) as i:
                    code = codes[(block * inputs + i) * ROW_BLOCK + lane]
                    value = to_f32(code, DTYPES[kind.codes], 1)
                    y[m * y_stride + i] = value if factor == 1 else value * const(factor, 1)
            with serial(y_stride - hidden_size) as i:
                y[m * y_stride + hidden_size + i] = T.float32(0)

        for_each_row(num_rows, row)
    return k.function


def _dequantized(codes: Memory, stored: WeightScales, block: Expr, lane: Expr, i: Expr, n: int) -> Expr:
    """Return elements `[i, i + n)` of row `lane` of a block: one, or all of a chunk."""
    kind, inputs = stored.kind, stored.num_inputs
    span, chunk, byte = block * (inputs // GROUP) + i // GROUP, i % GROUP // 4, lane * 4 + i % 4
    level, group = CODES[kind.codes].some(codes, span, chunk, byte, n), i // kind.group
    value = T.Cast(vector_type("float32", n), level - splat(T.int32(kind.zero), n))
    if kind.has_zeros:
        value = value - splat(stored.zero(block, group, lane, 1), n)
    value = value * splat(stored.scale(block, group, lane, 1), n)
    if kind.is_nested:
        value = value * splat(stored.super_scale(block, group, lane, 1), n)
    if not kind.has_minimum:
        return value
    minimum = stored.minimum(block, group, lane, 1)
    return value + splat(minimum * stored.super_minimum(block, group, lane, 1) if kind.is_nested else minimum, n)


@dataclass(frozen=True)
class AddRowsSpec:
    """An addition of rows of a table: row `first + index`, or always row `first` without indices."""

    width: int
    stride: int
    first: int = 0
    has_indices: bool = True


def add_rows(spec: AddRowsSpec) -> Any:
    """Return the PrimFunc `(x, table, indices, num_rows) -> 0`: `x[r] += table[first + indices[r]]`, as the spec says.

    `x` is float32 `[num_rows, stride]`, `table` `[any, width]`.
    """
    with Kernel() as k:
        x, table, indices, num_rows = k.arguments(x="float32", table="float32", indices="int32", num_rows=SIZE)

        def row(r: Expr) -> None:
            index = T.Cast("int64", indices[r]) if spec.has_indices else T.int64(0)
            start = bound((index + spec.first) * spec.width)

            def some(i: Expr, n: int) -> None:
                where = lanes(r * spec.stride + i, n)
                x[where] = x[where] + table[lanes(start + i, n)]

            for_each_lanes(spec.width, some)

        for_each_row(num_rows, row)
    return k.function


def token_types(separator_id: int) -> Any:
    """Return the PrimFunc `(token_ids, positions, types, num_rows) -> 0`: 0 up to a text's first separator, then 1.

    All are int32 `[num_rows]`. The separator's own type is 0.
    """
    with Kernel() as k:
        token_ids, positions, types, num_rows = k.arguments(
            token_ids="int32", positions="int32", types="int32", num_rows=SIZE
        )
        current = registers(1, "int32")
        with serial(num_rows) as r:
            with when(positions[r] == 0):
                current[0] = T.int32(0)
            types[r] = current[0]
            with when(token_ids[r] == separator_id):
                current[0] = T.int32(1)
    return k.function


def mean_rows(stride: int) -> Any:
    """Return the PrimFunc `(x, row_of_token, num_rows) -> 0`: rows become means of those from each to its text's end.

    They are added in float64, from the last one on. Rows have `stride` float32, a multiple of 16.
    """
    with Kernel() as k:
        x, row_of_token, num_rows = k.arguments(x="float32", row_of_token="int32", num_rows=SIZE)

        def column(c: Expr) -> None:
            total, count = registers(LANES, "float64"), registers(1, "float64")
            total[lanes(0)], count[0] = T.broadcast(T.float64(0), LANES), T.float64(0)
            with serial(num_rows) as i:
                r = bound(num_rows - 1 - i)
                with when(row_of_token[r] != row_of_token[T.min(r + 1, num_rows - 1)]):
                    total[lanes(0)], count[0] = T.broadcast(T.float64(0), LANES), T.float64(0)
                where = lanes(r * stride + c * LANES)
                total[lanes(0)] = total[lanes(0)] + T.Cast(f"float64x{LANES}", x[where])
                count[0] = count[0] + T.float64(1)
                x[where] = T.Cast(f"float32x{LANES}", total[lanes(0)] / T.broadcast(count[0], LANES))

        for_each_row(T.int64(stride // LANES), column)
    return k.function


def gather_columns(width: int, x_stride: int, y_stride: int) -> Any:
    """Return the PrimFunc `(x, order, y, num_rows) -> 0`: `y[r, i] = x[r, order[i]]` for `i < width`, float32 rows."""
    with Kernel() as k:
        x, order, y, num_rows = k.arguments(x="float32", order="int32", y="float32", num_rows=SIZE)

        def row(r: Expr) -> None:
            with serial(width) as i:
                y[r * y_stride + i] = x[r * x_stride + T.Cast("int64", order[i])]

        for_each_row(num_rows, row)
    return k.function
