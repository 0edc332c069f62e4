"""A gated convolution over the last tokens of each sequence, with the state of the step before.

Tokens are computed one after the other, columns in parallel. A token's bits depend on its own row and on the state
before it, not on where a step begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from tvm.script.ir_builder import tirx as T

from ...codegen.builder import SIZE, Kernel, bound, either, parallel, registers, serial, when
from ...codegen.elementwise import silu
from ...codegen.targets import Target
from ...codegen.vector import LANES, Expr, const, fma, lanes

_MOST_VECTORS = 4  # vectors that a thread takes at a time
_REGISTERS = 256  # number of float32 that LLVM keeps on the stack
_SERIAL_TOKENS = 8  # so few tokens take less time than waking threads


@dataclass(frozen=True)
class ConvolutionShape:
    """Layout of `width` columns with `kernel_size` taps; a slot holds `slot_items` numbers, of this layer and others.

    A convolution without gates is followed by SiLU, and its width is a multiple of 16.
    """

    width: int
    kernel_size: int
    x_stride: int
    y_stride: int
    slot_items: int
    has_bias: bool = False
    is_gated: bool = True


def short_convolution(shape: ConvolutionShape, target: Target) -> Any:
    """Return the PrimFunc `(gates, row_of_token, state_in, state_out, taps, bias, pool, y, first, num_tokens) -> 0`.

    `gates` float32 `[num_tokens, x_stride]` has the columns of b, c and x. `y` `[num_tokens, y_stride]` becomes `c *
    (bias + sum(taps[:, i] * (b * x)[t - kernel_size + 1 + i]))`, and zeros past `width`. Without gates there is x only,
    and `y` becomes SiLU of the sum. `taps` are `[width, kernel_size]`, that of the oldest token first.

    The inputs of the tokens before the step, `[kernel_size - 1, width]`, begin after `first` numbers of slot
    `state_in[row]` of `pool`. Those for the next step are written to slot `state_out[row]`. Tokens of a row are
    adjacent.
    """
    width, size = shape.width, shape.kernel_size
    assert shape.is_gated or width % LANES == 0
    vectors = max(1, min(_MOST_VECTORS, _REGISTERS // (LANES * size)))
    block = vectors * LANES
    with Kernel() as k:
        gates, row_of_token, state_in, state_out, taps, bias, pool, y, first, num_tokens = k.arguments(
            gates="float32",
            row_of_token="int32",
            state_in="int32",
            state_out="int32",
            taps="float32",
            bias="float32",
            pool="float32",
            y="float32",
            first=SIZE,
            num_tokens=SIZE,
        )

        def columns(start: Expr, count: int) -> None:
            """Compute all tokens, in columns `[start, start + count)`."""
            pieces = [(i, LANES) for i in range(0, count // LANES * LANES, LANES)]
            pieces += [(i, 1) for i in range(count // LANES * LANES, count)]
            weight, state = registers(size * count, "float32"), registers((size - 1) * count, "float32")
            for i, n in pieces:
                for tap in range(size):
                    at = (start + i) * size + tap
                    weight[lanes(tap * count + i, n)] = taps[at if n == 1 else T.ramp(at, size, n)]

            def move(slots: Any, row: Expr, *, load: bool) -> None:
                slot = bound(T.Cast("int64", slots[row]) * shape.slot_items + first + start)
                for age in range(size - 1):
                    for i, n in pieces:
                        kept, stored = lanes(age * count + i, n), lanes(slot + age * width + i, n)
                        if load:
                            state[kept] = pool[stored]
                        else:
                            pool[stored] = state[kept]

            with serial(num_tokens) as token:
                row = bound(T.Cast("int64", row_of_token[token]))
                before, behind = T.max(token - 1, T.int64(0)), T.min(token + 1, num_tokens - 1)
                with when(_is_end(token == 0, row_of_token[before], row_of_token[token])):
                    move(state_in, row, load=True)
                x = bound(token * shape.x_stride + start)
                for i, n in pieces:
                    gated = gates[lanes(x + i, n)]
                    gated = bound(gated * gates[lanes(x + 2 * width + i, n)] if shape.is_gated else gated)
                    total = bias[lanes(start + i, n)] if shape.has_bias else const(0, n)
                    for tap in range(size - 1):
                        total = fma(
                            weight[lanes(tap * count + i, n)], state[lanes(tap * count + i, n)], total, has_fma, n
                        )
                    total = fma(weight[lanes((size - 1) * count + i, n)], gated, total, has_fma, n)
                    result = gates[lanes(x + width + i, n)] * total if shape.is_gated else silu(total, has_fma)
                    y[lanes(token * shape.y_stride + start + i, n)] = result
                    for age in range(size - 2):
                        state[lanes(age * count + i, n)] = state[lanes((age + 1) * count + i, n)]
                    state[lanes((size - 2) * count + i, n)] = gated
                with when(_is_end(token == num_tokens - 1, row_of_token[behind], row_of_token[token])):
                    move(state_out, row, load=False)

        has_fma, num_blocks = target.has_fma, width // block
        with either(num_tokens <= _SERIAL_TOKENS) as (then, otherwise):
            with then, serial(num_blocks) as i:
                columns(i * block, block)
            with otherwise, parallel(num_blocks) as i:
                columns(i * block, block)
        if width % block:
            columns(T.int64(num_blocks * block), width % block)
        if shape.y_stride > width:
            with serial(num_tokens) as token, serial(shape.y_stride - width) as i:
                y[token * shape.y_stride + width + i] = T.float32(0)
    return k.function


def _is_end(is_last: Expr, neighbour: Expr, row: Expr) -> Expr:
    """Return whether the row's tokens begin or end here."""
    return tvm.tirx.Or(is_last, neighbour != row)
