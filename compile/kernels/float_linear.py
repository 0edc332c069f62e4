"""y = W x for weights in f32, f16 or bf16 and activations in f32. Inputs are added one after another for every row."""

from __future__ import annotations

from typing import Any

from ..targets import Target
from .builder import SIZE, Kernel, parallel, registers, serial
from .integer_linear import finish
from .layout import ROW_BLOCK, LinearSpec
from .vector import const, fma, lanes, splat, storage_type, to_f32

DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
TILE_ROWS = 6
TILE_BLOCKS = 2


def float_linear(spec: LinearSpec, target: Target, x_stride: int) -> Any:
    """A PrimFunc `(weights, bias, x, y, num_rows) -> 0`; `x` is float32 `[num_rows, x_stride]`.

    Weights lie as `layout.py` says, `y` as in `integer_linear`.
    """
    dtype = DTYPES[spec.kind.name]
    blocks = spec.num_outputs // ROW_BLOCK
    width = TILE_BLOCKS if blocks % TILE_BLOCKS == 0 else 1
    with Kernel() as k:
        weights, bias, x, y, num_rows = k.arguments(
            weights=storage_type(dtype), bias="float32", x="float32", y="float32", num_rows=SIZE
        )

        def tile(wide_block: Any, first_row: Any, rows: int) -> None:
            acc = registers(rows * width * ROW_BLOCK, "float32")
            for i in range(rows * width):
                acc[lanes(i * ROW_BLOCK)] = const(0)
            with serial(spec.num_inputs) as i:
                for m in range(rows):
                    for n in range(width):
                        row_of_weights = ((wide_block * width + n) * spec.num_inputs + i) * ROW_BLOCK
                        w = to_f32(weights[lanes(row_of_weights)], dtype)
                        where = lanes((m * width + n) * ROW_BLOCK)
                        acc[where] = fma(splat(x[(first_row + m) * x_stride + i]), w, acc[where], target.has_fma)
            for m in range(rows):
                for n in range(width):
                    value = acc[lanes((m * width + n) * ROW_BLOCK)]
                    finish(spec, value, bias, y, first_row + m, wide_block * width + n)

        with parallel(blocks // width) as wide_block:
            with serial(num_rows // TILE_ROWS) as i:
                tile(wide_block, i * TILE_ROWS, TILE_ROWS)
            with serial(num_rows % TILE_ROWS) as i:
                tile(wide_block, num_rows // TILE_ROWS * TILE_ROWS + i, 1)
    return k.function
