"""Rows of the embedding, from the same packed weights that the output matrix may share."""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from ..quantization import WeightKind
from .builder import SIZE, Kernel, Memory, for_each_row, serial
from .float_linear import DTYPES
from .integer_dot import CHUNK
from .layout import GROUP, ROW_BLOCK, padded_inputs
from .vector import Expr, storage_type, to_f32


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
            with serial(hidden_size) as i:
                if kind.is_quantized:
                    value = _dequantized(kind, codes, scales, minima, block, lane, i, inputs)
                else:
                    value = to_f32(codes[(block * inputs + i) * ROW_BLOCK + lane], DTYPES[kind.name], 1)
                y[m * y_stride + i] = value
            with serial(y_stride - hidden_size) as i:
                y[m * y_stride + hidden_size + i] = T.float32(0)

        for_each_row(num_rows, row)
    return k.function


def _dequantized(
    kind: WeightKind, codes: Memory, scales: Memory, minima: Memory, block: Expr, lane: Expr, i: Expr, inputs: int
) -> Expr:
    """Element `i` of the row `lane` of a block (see `layout.py`)."""
    group, chunk, byte = block * (inputs // GROUP) + i // GROUP, i % GROUP // 4, lane * 4 + i % 4
    if kind.name == "q4":
        packed = T.Cast("int32", codes[(group * 4 + chunk // 2) * CHUNK + byte])
        code = T.bitwise_and(T.shift_right(packed, T.Cast("int32", chunk % 2 * 4)), T.int32(15))
    else:
        code = T.Cast("int32", codes[(group * 8 + chunk) * CHUNK + byte])
    where = (block * (inputs // kind.group) + i // kind.group) * ROW_BLOCK + lane
    value = T.Cast("float32", code - T.int32(kind.zero)) * to_f32(scales[where], "float16", 1)
    return value + to_f32(minima[where], "float16", 1) if kind.has_minimum else value
