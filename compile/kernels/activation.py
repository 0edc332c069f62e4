"""What stands between two linears: normalization or gating of a row, then, if the next linear wants it, 8-bit codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tvm.script.ir_builder import tirx as T

from ..targets import Target
from .builder import SIZE, Kernel, Memory, for_each_row, registers, serial
from .layout import GROUP, round_up
from .quantized_rows import CHUNKS, QuantizedRows
from .vector import LANES, Expr, const, exp, fma, lanes, reduce_max_i32, reduce_sum_i32, splat

Function = Literal["rms_norm", "silu_mul", "identity"]


@dataclass(frozen=True)
class ActivationSpec:
    """`width` numbers of rows `[rows, x_stride]`; `silu_mul` has its gate at column 0 and its factor at `up_column`."""

    function: Function
    width: int
    x_stride: int
    quantize: bool
    keep_float: bool
    y_stride: int = 0
    up_column: int = 0
    eps: float = 0.0
    wide: bool = False


def activation(spec: ActivationSpec, target: Target) -> Any:
    """A PrimFunc `(x, gain, y, codes, scales, sums, num_rows) -> 0`.

    Writes float32 `y` `[num_rows, y_stride]` if `spec.keep_float`, and the codes if `spec.quantize`, as
    `quantized_rows.py` lays them out.
    """
    padded_width = round_up(spec.width, GROUP)
    with Kernel() as k:
        x, gain, y, codes, scales, sums, num_rows = k.arguments(
            x="float32",
            gain="float32",
            y="float32",
            codes="int32",
            scales="float32",
            sums="int32",
            num_rows=SIZE,
        )
        rows = QuantizedRows(codes, scales, sums, padded_width // GROUP, spec.wide)

        def row(m: Expr) -> None:
            values = registers(padded_width, "float32")
            _apply(spec, target, x, gain, values, m)
            if spec.keep_float:
                _copy(values, y, m * spec.y_stride, spec.width)
            if spec.quantize:
                _quantize(values, rows, m)

        for_each_row(num_rows, row)
    return k.function


def _vectors(width: int, vector: Any, scalar: Any) -> None:
    """Emit `vector(start)` over whole vectors, and `scalar(i)` for what is left."""
    with serial(width // LANES) as i:
        vector(i * LANES)
    for i in range(width // LANES * LANES, width):
        scalar(T.int64(i))


def _apply(spec: ActivationSpec, target: Target, x: Memory, gain: Memory, values: Memory, m: Expr) -> None:
    start, width = m * spec.x_stride, spec.width
    for i in range(width // LANES * LANES, round_up(width, GROUP), LANES):  # what padding must not leave undefined
        values[lanes(i)] = const(0)
    if spec.function == "rms_norm":
        factor = _inverse_rms(spec, target, x, start)

        def norm(i: Expr, at: Any, n: int) -> None:
            values[at(i)] = x[at(start + i)] * splat_n(factor[0], n) * gain[at(i)]

        _vectors(width, lambda i: norm(i, lanes, LANES), lambda i: norm(i, _one, 1))
    elif spec.function == "silu_mul":

        def gated(gate: Expr, up: Expr) -> Expr:
            return up * gate / (const(1) + exp(const(0) - gate, target.has_fma))

        def whole(i: Expr) -> None:
            values[lanes(i)] = gated(x[lanes(start + i)], x[lanes(start + spec.up_column + i)])

        def single(i: Expr) -> None:
            pair = registers(2 * LANES, "float32")
            pair[lanes(0)] = splat(x[start + i])
            pair[lanes(LANES)] = splat(x[start + spec.up_column + i])
            pair[lanes(0)] = gated(pair[lanes(0)], pair[lanes(LANES)])
            values[i] = pair[0]

        _vectors(width, whole, single)
    else:

        def same(i: Expr, at: Any) -> None:
            values[at(i)] = x[at(start + i)]

        _vectors(width, lambda i: same(i, lanes), lambda i: same(i, _one))


def _one(i: Expr) -> Expr:
    return i


def splat_n(value: Expr, n: int) -> Expr:
    """`value`, or `value` in every lane of a vector."""
    return value if n == 1 else splat(value, n)


def _inverse_rms(spec: ActivationSpec, target: Target, x: Memory, start: Expr) -> Memory:
    """One float32: 1 / sqrt(mean of squares + eps) (Zhang and Sennrich, 2019), lanes added in a fixed order."""
    squares = registers(LANES, "float32")
    total = registers(1, "float32")
    squares[lanes(0)] = const(0)
    total[0] = T.float32(0)

    def whole(i: Expr) -> None:
        value = x[lanes(start + i)]
        squares[lanes(0)] = fma(value, value, squares[lanes(0)], target.has_fma)

    def single(i: Expr) -> None:
        total[0] = total[0] + x[start + i] * x[start + i]

    _vectors(spec.width, whole, single)
    for lane in range(LANES):
        total[0] = total[0] + squares[lane]
    total[0] = T.float32(1) / T.sqrt(total[0] / T.float32(spec.width) + T.float32(spec.eps))
    return total


def _copy(values: Memory, y: Memory, start: Expr, width: int) -> None:
    def same(i: Expr, at: Any) -> None:
        y[at(start + i)] = values[at(i)]

    _vectors(width, lambda i: same(i, lanes), lambda i: same(i, _one))


def _quantize(values: Memory, rows: QuantizedRows, m: Expr) -> None:
    """Round each group to int8 (scale = max |x| / 127) or int16 (max |x| / 32512, so that both bytes fit int8).

    A group that holds a NaN or an infinity gets such a scale, so that the outputs show it.
    """
    scale = registers(2, "float32")  # scale and its inverse
    total = registers(2, "int32")
    limit = 127 * 256 if rows.wide else 127
    with serial(rows.num_groups) as g:
        pair = [values[lanes(g * GROUP)], values[lanes(g * GROUP + LANES)]]
        largest = _largest_magnitude(pair)
        scale[0] = largest * T.float32(1 / limit)
        scale[1] = T.float32(limit) / largest
        for half, value in enumerate(pair):
            rounded = T.Cast("int32x16", T.nearbyint(value * splat(scale[1])))
            where = rows.first_chunk(g, m) + half * 4
            if rows.wide:
                high = T.shift_right(rounded + splat(T.int32(128)), splat(T.int32(8)))
                rows.codes[lanes(where, 4)] = _as_bytes(high)
                rows.codes[lanes(where + CHUNKS, 4)] = _as_bytes(rounded - T.shift_left(high, splat(T.int32(8))))
            else:
                rows.codes[lanes(where, 4)] = _as_bytes(rounded)
            total[half] = reduce_sum_i32(rounded)
            rows.sums[rows.pair(g, m) + half] = total[half]
        rows.scales[rows.pair(g, m)] = scale[0]
        rows.scales[rows.pair(g, m) + 1] = scale[0] * T.Cast("float32", total[0] + total[1])


def _largest_magnitude(vectors: list[Expr]) -> Expr:
    """At least 1e-30. Compared as integers, in whose order infinity and NaN come last."""
    magnitudes = [T.bitwise_and(T.reinterpret("int32x16", v), splat(T.int32(0x7FFFFFFF))) for v in vectors]
    bits = reduce_max_i32(T.max(*magnitudes))
    return T.reinterpret("float32", T.max(bits, T.reinterpret("int32", T.float32(1e-30))))


def _as_bytes(integers: Expr) -> Expr:
    """16 int32 that fit int8, as 4 int32 of 4 bytes."""
    return T.reinterpret("int32x4", T.Cast("int8x16", integers))


def gather_rows(width: int) -> Any:
    """A PrimFunc `(x, indices, y, num_rows) -> 0`: `y[r] = x[indices[r]]`, rows of `width` float32, multiple of 16."""
    with Kernel() as k:
        x, indices, y, num_rows = k.arguments(x="float32", indices="int32", y="float32", num_rows=SIZE)
        with serial(num_rows) as r, serial(width // LANES) as i:
            y[lanes(r * width + i * LANES)] = x[lanes(T.Cast("int64", indices[r]) * width + i * LANES)]
    return k.function
