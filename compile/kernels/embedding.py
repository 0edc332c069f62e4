"""Rows of the embedding, from the same packed weights that the output matrix may share."""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from ..codegen.builder import SIZE, Kernel, Memory, for_each_row, serial
from ..codegen.vector import Expr, lanes, splat, storage_type, to_f32, vector_type
from ..weights.codes import CODES
from ..weights.layout import GROUP, ROW_BLOCK
from ..weights.packing import padded_inputs
from ..weights.quantization import WeightKind
from .float_linear import DTYPES

_NEIGHBOURS = 4  # inputs of a token that lie side by side


def embedding(kind: WeightKind, hidden_size: int, y_stride: int) -> Any:
    """A PrimFunc `(token_ids, codes, scales, minima, y, num_rows) -> 0`; `y` float32 `[num_rows, y_stride]`.

    Columns past `hidden_size` become zero.
    """
    inputs = padded_inputs(kind, hidden_size)
    with Kernel() as k:
        token_ids, codes, scales, minima, y, num_rows = k.arguments(
            token_ids="int32",
            codes="uint8" if kind.is_quantized else storage_type(DTYPES[kind.name]),
            scales="float16",
            minima="float16",
            y="float32",
            num_rows=SIZE,
        )

        def row(m: Expr) -> None:
            token = T.Cast("int64", token_ids[m])
            block, lane = token // ROW_BLOCK, token % ROW_BLOCK

            def some(i: Expr, n: int) -> None:
                value = _dequantized(kind, codes, scales, minima, block, lane, i, inputs, n)
                y[lanes(m * y_stride + i, n)] = value

            if kind.is_quantized:
                with serial(hidden_size // GROUP) as g:
                    for i in range(0, GROUP, _NEIGHBOURS):
                        some(g * GROUP + i, _NEIGHBOURS)
                for i in range(hidden_size // GROUP * GROUP, hidden_size):
                    some(T.int64(i), 1)
            else:
                with serial(hidden_size) as i:
                    code = codes[(block * inputs + i) * ROW_BLOCK + lane]
                    y[m * y_stride + i] = to_f32(code, DTYPES[kind.name], 1)
            with serial(y_stride - hidden_size) as i:
                y[m * y_stride + hidden_size + i] = T.float32(0)

        for_each_row(num_rows, row)
    return k.function


def _dequantized(
    kind: WeightKind,
    codes: Memory,
    scales: Memory,
    minima: Memory,
    block: Expr,
    lane: Expr,
    i: Expr,
    inputs: int,
    n: int,
) -> Expr:
    """Elements `[i, i + n)` of row `lane` of a block: one, or all of a chunk."""
    group, chunk, byte = block * (inputs // GROUP) + i // GROUP, i % GROUP // 4, lane * 4 + i % 4
    code = CODES[kind.name].some(codes, group, chunk, byte, n)
    where = (block * (inputs // kind.group) + i // kind.group) * ROW_BLOCK + lane
    value = T.Cast(vector_type("float32", n), code - splat(T.int32(kind.zero), n))
    value = value * splat(to_f32(scales[where], "float16", 1), n)
    return value + splat(to_f32(minima[where], "float16", 1), n) if kind.has_minimum else value
