"""Inputs in another order, for a matrix whose format sorts its inputs by their groups."""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from ..codegen.builder import SIZE, Kernel, for_each_row, serial
from ..codegen.vector import Expr


def gather_columns(width: int, x_stride: int, y_stride: int) -> Any:
    """A PrimFunc `(x, order, y, num_rows) -> 0`: `y[r, i] = x[r, order[i]]` for `i` below `width`, float32 rows."""
    with Kernel() as k:
        x, order, y, num_rows = k.arguments(x="float32", order="int32", y="float32", num_rows=SIZE)

        def row(r: Expr) -> None:
            with serial(width) as i:
                y[r * y_stride + i] = x[r * x_stride + T.Cast("int64", order[i])]

        for_each_row(num_rows, row)
    return k.function
