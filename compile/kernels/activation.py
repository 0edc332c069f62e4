"""What stands between two linears: a row is normalized or gated, and then rounded if the next linear takes codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import tvm
from tvm.script.ir_builder import tirx as T

from ..codegen.builder import SIZE, Kernel, Memory, bound, for_each_row, registers, serial
from ..codegen.lane_reductions import reduce_each, sum_of_lanes
from ..codegen.targets import Target
from ..codegen.vector import LANES, Expr, const, exp, fma, lanes, splat
from ..weights.layout import CHUNKS, GROUP, round_up
from .quantized_rows import QuantizedRows

Function = Literal["rms_norm", "silu_mul", "identity"]
BATCH = 8  # groups that are computed side by side
_SUMS = 4
_LEAST = 1e-30  # the largest magnitude of a group counts as this at least


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
    `quantized_rows.py` lays them out. Eight groups of a row are computed side by side in registers: one by
    one they would be chains of instructions that wait for each other.
    """
    num_groups = round_up(spec.width, GROUP) // GROUP
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
        rows = QuantizedRows(codes, scales, sums, num_groups, spec.wide)

        def row(m: Expr) -> None:
            function = _Function(spec, target, x, gain, m)

            def batch(first: Expr, width: int) -> None:
                count = -(-width // GROUP)
                values = registers(count * GROUP, "float32")
                function.compute(values, first * GROUP, width)
                if spec.keep_float:
                    _copy(values, y, m * spec.y_stride + first * GROUP, width)
                if spec.quantize:
                    _round_groups(values, count, rows, first, m)

            whole = spec.width // (BATCH * GROUP)
            with serial(whole) as b:
                batch(b * BATCH, BATCH * GROUP)
            if spec.width % (BATCH * GROUP):
                batch(T.int64(whole * BATCH), spec.width % (BATCH * GROUP))

        for_each_row(num_rows, row)
    return k.function


class _Function:
    """Emits the function of row `m`, some elements at a time."""

    def __init__(self, spec: ActivationSpec, target: Target, x: Memory, gain: Memory, m: Expr) -> None:
        self.spec, self.has_fma, self.x, self.gain = spec, target.has_fma, x, gain
        self.start = m * spec.x_stride
        self.inverse_rms = _inverse_rms(spec, target, x, self.start) if spec.function == "rms_norm" else None

    def compute(self, values: Memory, first: Expr, width: int) -> None:
        """Elements `first..first+width` into `values`, and zeros behind them up to a whole group."""
        for i in range(0, round_up(width, GROUP), LANES):
            if i + LANES <= width:
                values[lanes(i)] = self._whole(first + i)
                continue
            values[lanes(i)] = const(0)  # what padding must not leave undefined
            for j in range(i, width):
                values[j] = self._single(first + j)

    def _whole(self, i: Expr) -> Expr:
        x = self.x[lanes(self.start + i)]
        if self.inverse_rms is not None:
            return x * splat(self.inverse_rms[0]) * self.gain[lanes(i)]
        if self.spec.function == "silu_mul":
            return self._gated(x, self.x[lanes(self.start + self.spec.up_column + i)])
        return x

    def _single(self, i: Expr) -> Expr:
        x = self.x[self.start + i]
        if self.inverse_rms is not None:
            return x * self.inverse_rms[0] * self.gain[i]
        if self.spec.function == "silu_mul":
            pair = registers(2 * LANES, "float32")
            pair[lanes(0)] = splat(x)
            pair[lanes(LANES)] = splat(self.x[self.start + self.spec.up_column + i])
            pair[lanes(0)] = self._gated(pair[lanes(0)], pair[lanes(LANES)])
            return pair[0]
        return x

    def _gated(self, gate: Expr, up: Expr) -> Expr:
        return up * gate / (const(1) + exp(const(0) - gate, self.has_fma))


def _inverse_rms(spec: ActivationSpec, target: Target, x: Memory, start: Expr) -> Memory:
    """One float32: 1 / sqrt(mean of squares + eps) (Zhang and Sennrich, 2019).

    Vectors are added in turn to four sums, for each addition waits for the one before it, and then lanes by halves.
    """
    squares = registers(_SUMS * LANES, "float32")
    total = registers(1, "float32")
    for i in range(_SUMS):
        squares[lanes(i * LANES)] = const(0)
    total[0] = T.float32(0)

    def add(i: Expr, into: int) -> None:
        value, where = x[lanes(start + i)], lanes(into * LANES)
        squares[where] = fma(value, value, squares[where], target.has_fma)

    step = _SUMS * LANES
    with serial(spec.width // step) as i:
        for into in range(_SUMS):
            add(i * step + into * LANES, into)
    for i in range(spec.width // step * step, spec.width // LANES * LANES, LANES):
        add(T.int64(i), i // LANES % _SUMS)
    for i in range(spec.width // LANES * LANES, spec.width):
        total[0] = total[0] + x[start + i] * x[start + i]
    a, b, c, d = (squares[lanes(i * LANES)] for i in range(_SUMS))
    total[0] = total[0] + sum_of_lanes((a + b) + (c + d))
    total[0] = T.float32(1) / T.sqrt(total[0] / T.float32(spec.width) + T.float32(spec.eps))
    return total


def _copy(values: Memory, y: Memory, start: Expr, width: int) -> None:
    for i in range(0, width // LANES * LANES, LANES):
        y[lanes(start + i)] = values[lanes(i)]
    for i in range(width // LANES * LANES, width):
        y[start + i] = values[i]


def _round_groups(values: Memory, count: int, rows: QuantizedRows, first: Expr, m: Expr) -> None:
    """Round `count` groups of row `m`, 1 to 8, from group `first` on; `values` holds their floats.

    Codes are int8 (scale = max |x| / 127) or int16 (max |x| / 32512, so that both bytes fit int8). A group that holds a
    NaN or an infinity gets such a scale, so that the outputs show it.
    """
    limit = 127 * 256 if rows.wide else 127
    halves = [bound(values[lanes(i)]) for i in range(0, count * GROUP, LANES)]
    magnitudes = [T.bitwise_and(T.reinterpret("int32x16", half), splat(T.int32(0x7FFFFFFF))) for half in halves]
    # as integers, in whose order infinity and NaN come last
    largest = reduce_each([T.max(*magnitudes[2 * g : 2 * g + 2]) for g in range(count)], T.max)
    n = largest.num_lanes
    bits = T.max(largest.vector, splat(T.reinterpret("int32", T.float32(_LEAST)), n))
    magnitude = bound(T.reinterpret(f"float32x{n}", bits))
    scales, inverses = bound(magnitude * splat(T.float32(1 / limit), n)), registers(n, "float32")
    inverses[lanes(0, n)] = splat(T.float32(limit), n) / magnitude
    codes = []
    for i, half in enumerate(halves):
        inverse = splat(inverses[largest.lane_of[i // 2]])
        codes.append(bound(T.Cast("int32x16", T.nearbyint(half * inverse))))
        _store_codes(codes[i], rows, first + i // 2, m, i % 2)
    sums = reduce_each(codes, lambda a, b: a + b)
    for g in range(count):
        pair = list(sums.lane_of[2 * g : 2 * g + 2])
        rows.sums[lanes(rows.pair(first + g, m), 2)] = tvm.tirx.Shuffle([sums.vector], pair)
    # scales beside scales times sums
    of_lane = {lane: g for g, lane in enumerate(largest.lane_of)}
    order = [of_lane.get(lane, 0) for lane in range(n)]
    total = T.Cast(
        f"float32x{n}",
        tvm.tirx.Shuffle([sums.vector], [sums.lane_of[2 * g] for g in order])
        + tvm.tirx.Shuffle([sums.vector], [sums.lane_of[2 * g + 1] for g in order]),
    )
    scaled = bound(scales * total)
    for g, lane in enumerate(largest.lane_of):
        rows.scales[lanes(rows.pair(first + g, m), 2)] = tvm.tirx.Shuffle([scales, scaled], [lane, n + lane])


def _store_codes(rounded: Expr, rows: QuantizedRows, g: Expr, m: Expr, half: int) -> None:
    where = rows.first_chunk(g, m) + half * 4
    if rows.wide:
        high = T.shift_right(rounded + splat(T.int32(128)), splat(T.int32(8)))
        rows.codes[lanes(where, 4)] = _as_bytes(high)
        where = where + CHUNKS  # of `rounded - 256 * high`, the low byte is that of `rounded`
    rows.codes[lanes(where, 4)] = _as_bytes(rounded)


def _as_bytes(integers: Expr) -> Expr:
    """The low bytes of 16 int32, as 4 int32."""
    return T.reinterpret("int32x4", T.Cast("int8x16", integers))


def gather_rows(width: int) -> Any:
    """A PrimFunc `(x, indices, y, num_rows) -> 0`: `y[r] = x[indices[r]]`, rows of `width` float32, multiple of 16."""
    with Kernel() as k:
        x, indices, y, num_rows = k.arguments(x="float32", indices="int32", y="float32", num_rows=SIZE)
        with serial(num_rows) as r, serial(width // LANES) as i:
            y[lanes(r * width + i * LANES)] = x[lanes(T.Cast("int64", indices[r]) * width + i * LANES)]
    return k.function
