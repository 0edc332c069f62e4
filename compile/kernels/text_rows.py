"""Rows that depend on their whole text: the token type of each token of a pair, and the mean of a text's rows.

The step has all tokens of a text, one after the other: that is so in models whose tokens see those after them.
"""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from ..codegen.builder import SIZE, Kernel, bound, for_each_row, registers, serial, when
from ..codegen.vector import LANES, Expr, lanes


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
    """Return the PrimFunc `(x, first_rows, row_of_token, y, num_tokens, num_rows) -> 0`.

    Row `r` of `y` is the mean of the rows of `x` from `first_rows[r]` to the last one of the same text. They are added
    in float64, in order of position. Rows have `stride` float32, a multiple of 16.
    """
    with Kernel() as k:
        x, first_rows, row_of_token, y, num_tokens, num_rows = k.arguments(
            x="float32", first_rows="int32", row_of_token="int32", y="float32", num_tokens=SIZE, num_rows=SIZE
        )

        def row(r: Expr) -> None:
            first = bound(T.Cast("int64", first_rows[r]))
            count = registers(1, "int64")
            count[0] = T.int64(0)
            with serial(num_tokens - first) as i, when(row_of_token[first + i] == row_of_token[first]):
                count[0] = count[0] + 1
            total = registers(LANES, "float64")
            with serial(stride // LANES) as column:
                total[lanes(0)] = T.broadcast(T.float64(0), LANES)
                with serial(count[0]) as i:
                    values = x[lanes((first + i) * stride + column * LANES)]
                    total[lanes(0)] = total[lanes(0)] + T.Cast(f"float64x{LANES}", values)
                mean = total[lanes(0)] / T.broadcast(T.Cast("float64", count[0]), LANES)
                y[lanes(r * stride + column * LANES)] = T.Cast(f"float32x{LANES}", mean)

        for_each_row(num_rows, row)
    return k.function
