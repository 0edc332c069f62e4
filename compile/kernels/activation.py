"""Kernels between two matrix products: normalize or gate a row, then quantize it if the next matrix takes codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import tvm
from tvm.script.ir_builder import tirx as T

from ..codegen.builder import SIZE, Kernel, Memory, bound, for_each_row, registers, serial
from ..codegen.elementwise import (
    Binary,
    Unary,
    gelu,
    gelu_tanh,
    identity,
    relu2,
    sigmoid,
    silu,
    silu_mul,
    softplus,
    swiglu_clamped,
    tanh,
    times,
)
from ..codegen.lane_reductions import reduce_each
from ..codegen.targets import Target
from ..codegen.vector import LANES, Expr, const, lanes, nearest_integer, splat
from ..weights.layout import CHUNKS, GROUP, ROW_BLOCK, round_up
from .experts.entries import ExpertLimits, ExpertLists
from .quantized_rows import QuantizedRows
from .row_norms import inverse_rms, mean_and_inverse_deviation

Gated = Literal["silu_mul", "gelu_tanh_mul", "gelu_mul", "relu2_mul", "swiglu_clamped"]
Ungated = Literal["silu", "gelu_tanh", "gelu", "relu2", "tanh", "identity"]
Norm = Literal["rms_norm", "layer_norm"]
Function = Norm | Gated | Ungated
Gate = Literal["sigmoid", "softplus", "silu", "identity"]
_GATED: dict[Function, Binary] = {
    "silu_mul": silu_mul,
    "gelu_tanh_mul": times(gelu_tanh),
    "gelu_mul": times(gelu),
    "relu2_mul": times(relu2),
    "swiglu_clamped": swiglu_clamped,
}
_UNGATED: dict[Function, Unary] = {
    "silu": silu,
    "gelu_tanh": gelu_tanh,
    "gelu": gelu,
    "relu2": relu2,
    "tanh": tanh,
    "identity": identity,
}
_GATES: dict[Gate, Unary] = {"sigmoid": sigmoid, "softplus": softplus, "silu": silu, "identity": identity}
BATCH = 8  # groups that are computed together
_SUMS = 4
_LEAST = 1e-30  # minimum of a group's largest magnitude, so that its inverse is finite


@dataclass(frozen=True)
class ActivationSpec:
    """An activation kernel's function and row layout: `width` results of rows `[rows, x_stride]`.

    A gated function has its gate at column 0 and its factor at `up_column`.

    `has_gain`, `has_bias`: parameters of a norm; the bias follows the gain, at `round_up(width, 16)` (at 0 without
    gain).
    `gate`: the result is multiplied by this function of other rows, `[rows, gate_stride]`. Column `gate_column + i //
    gate_width` gates element `i`: a width of 1 is elementwise, a head's size is one gate a head, `width` one a row.
    `experts`: rows are entries of experts, in the order of their places.
    """

    function: Function
    width: int
    x_stride: int
    quantize: bool
    keep_float: bool
    y_stride: int = 0
    up_column: int = 0
    eps: float = 0.0
    wide: bool = False
    has_gain: bool = True
    has_bias: bool = False
    gate: Gate | None = None
    gate_stride: int = 0
    gate_column: int = 0
    gate_width: int = 1
    experts: ExpertLimits | None = None

    @property
    def is_gated(self) -> bool:
        """True if a row holds two numbers for each result."""
        return self.function in get_args(Gated)


def activation(spec: ActivationSpec, target: Target) -> Any:
    """Return the PrimFunc `(x, gain, gates[, lists], y, codes, scales, sums, num_rows) -> 0`.

    With `spec.experts`, `lists` is the output of `find_slabs`. Writes float32 `y` `[num_rows, y_stride]` if
    `spec.keep_float`, and codes if `spec.quantize`, in the layout of `quantized_rows.py`. Eight groups of a row are
    computed together in registers; one by one they would be chains of dependent instructions.
    """
    num_groups = round_up(spec.width, GROUP) // GROUP
    with Kernel() as k:
        x, gain, gates, *lists, y, codes, scales, sums, num_rows = k.arguments(
            x="float32",
            gain="float32",
            gates="float32",
            **({"lists": "int32"} if spec.experts else {}),
            y="float32",
            codes="int32",
            scales="float32",
            sums="int32",
            num_rows=SIZE,
        )
        rows = QuantizedRows(codes, scales, sums, num_groups, spec.wide)

        def row(m: Expr) -> None:
            if spec.experts:
                m = bound(ExpertLists(lists[0], spec.experts).place(m))
            function = _Function(spec, target, x, gain, gates, m)

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
    """An emitter of the function of row `m`, some elements at a time."""

    def __init__(self, spec: ActivationSpec, target: Target, x: Memory, gain: Memory, gates: Memory, m: Expr) -> None:
        self.spec, self.has_fma, self.x, self.gain, self.gates = spec, target.has_fma, x, gain, gates
        self.start, self.gate_start = m * spec.x_stride, m * spec.gate_stride + spec.gate_column
        if spec.function == "rms_norm":
            self.scale = inverse_rms(spec.width, spec.eps, x, self.start, self.has_fma)
        elif spec.function == "layer_norm":
            self.mean, self.scale = mean_and_inverse_deviation(spec.width, spec.eps, x, self.start, self.has_fma)

    def compute(self, values: Memory, first: Expr, width: int) -> None:
        """Write elements `first..first+width` to `values`, and zeros up to a whole group."""
        whole = width // LANES * LANES
        if self._is_short:
            for i in range(0, whole, LANES):
                values[lanes(i)] = self._some(first + i, LANES)
        else:
            with serial(whole // LANES) as v:
                values[lanes(v * LANES)] = self._some(first + v * LANES, LANES)
        for i in range(whole, round_up(width, GROUP), LANES):
            values[lanes(i)] = const(0) if i >= width else self._some(first + i, width - i)
            for j in range(width, i + LANES):
                values[j] = T.float32(0)  # padding must not be undefined

    @property
    def _is_short(self) -> bool:
        """True if all vectors of a batch are computed together; for longer functions LLVM would take half a minute."""
        return self.spec.gate is None and self.spec.function in ("rms_norm", "silu_mul", "identity")

    def _some(self, i: Expr, n: int) -> Expr:
        """Return a vector of the elements from `i` on; only its first `n` lanes are defined."""
        value = self._function(i, n)
        if self.spec.gate is None:
            return value
        return value * _GATES[self.spec.gate](self._gates_of(i, n), self.has_fma)

    def _gates_of(self, i: Expr, n: int) -> Expr:
        """Return the gates of the elements from `i` on."""
        width, start = self.spec.gate_width, self.gate_start
        if width == 1:
            return _vector(self.gates, start + i, n)
        if width % LANES == 0 or width >= self.spec.width:
            return splat(self.gates[start + i // width])
        vector = registers(LANES, "float32")
        vector[lanes(0)] = const(0)
        for j in range(n):
            vector[j] = self.gates[start + (i + j) // width]
        return vector[lanes(0)]

    def _function(self, i: Expr, n: int) -> Expr:
        """Return the function of the elements from `i` on, before gates."""
        spec, x = self.spec, _vector(self.x, self.start + i, n)
        if spec.function == "rms_norm" or spec.function == "layer_norm":
            return self._normalized(x, i, n)
        if spec.function in _UNGATED:
            return _UNGATED[spec.function](x, self.has_fma)
        return _GATED[spec.function](x, _vector(self.x, self.start + spec.up_column + i, n), self.has_fma)

    def _normalized(self, x: Expr, i: Expr, n: int) -> Expr:
        """Return elements normalized, with gain and bias."""
        if self.spec.function == "layer_norm":
            x = x - splat(self.mean)
        x = x * splat(self.scale)
        if self.spec.has_gain:
            x = x * _vector(self.gain, i, n)
        if self.spec.has_bias:
            bias_at = round_up(self.spec.width, ROW_BLOCK) if self.spec.has_gain else 0
            x = x + _vector(self.gain, bias_at + i, n)
        return x


def _vector(memory: Memory, start: Expr, n: int) -> Expr:
    """Return 16 neighbours, or `n` of them and zeros."""
    if n == LANES:
        return memory[lanes(start)]
    vector = registers(LANES, "float32")
    vector[lanes(0)] = const(0)
    for i in range(n):
        vector[i] = memory[start + i]
    return vector[lanes(0)]


def _copy(values: Memory, y: Memory, start: Expr, width: int) -> None:
    """Store the floats of `width` elements."""
    for i in range(0, width // LANES * LANES, LANES):
        y[lanes(start + i)] = values[lanes(i)]
    for i in range(width // LANES * LANES, width):
        y[start + i] = values[i]


def _round_groups(values: Memory, count: int, rows: QuantizedRows, first: Expr, m: Expr) -> None:
    """Quantize `count` (1 to 8) groups of row `m` from group `first` on; `values` holds their floats.

    Codes are int8 (scale = max |x| / 127) or int16 (max |x| / 32512, so that both bytes fit int8). The scale of a group
    with a NaN or an infinity is not finite, so that the outputs show it.
    """
    limit = 127 * 256 if rows.wide else 127
    halves = [bound(values[lanes(i)]) for i in range(0, count * GROUP, LANES)]
    magnitudes = [T.bitwise_and(T.reinterpret("int32x16", half), splat(T.int32(0x7FFFFFFF))) for half in halves]
    # compared as integers, in whose order infinity and NaN come last
    largest = reduce_each([T.max(*magnitudes[2 * g : 2 * g + 2]) for g in range(count)], T.max)
    n = largest.num_lanes
    bits = T.max(largest.vector, splat(T.reinterpret("int32", T.float32(_LEAST)), n))
    magnitude = bound(T.reinterpret(f"float32x{n}", bits))
    scales, inverses = bound(magnitude * splat(T.float32(1 / limit), n)), registers(n, "float32")
    inverses[lanes(0, n)] = splat(T.float32(limit), n) / magnitude
    codes = []
    for i, half in enumerate(halves):
        inverse = splat(inverses[largest.lane_of[i // 2]])
        codes.append(bound(nearest_integer(bound(half * inverse))))
        _store_codes(codes[i], rows, first + i // 2, m, i % 2)
    sums = reduce_each(codes, lambda a, b: a + b)
    for g in range(count):
        pair = list(sums.lane_of[2 * g : 2 * g + 2])
        rows.sums[lanes(rows.pair(first + g, m), 2)] = tvm.tirx.Shuffle([sums.vector], pair)
    # scales, interleaved with scales times sums
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
    """Store 16 codes of a group, in one byte or two."""
    where = rows.first_chunk(g, m) + half * 4
    if rows.wide:
        high = T.shift_right(rounded + splat(T.int32(128)), splat(T.int32(8)))
        rows.codes[lanes(where, 4)] = _as_bytes(high)
        where = where + CHUNKS  # the low byte of `rounded - 256 * high` is that of `rounded`
    rows.codes[lanes(where, 4)] = _as_bytes(rounded)


def _as_bytes(integers: Expr) -> Expr:
    """Return the low bytes of 16 int32, as 4 int32."""
    return T.reinterpret("int32x4", T.Cast("int8x16", integers))


def gather_rows(width: int) -> Any:
    """Return the PrimFunc `(x, indices, y, num_rows) -> 0`: `y[r] = x[indices[r]]`.

    Rows have `width` float32, a multiple of 16.
    """
    with Kernel() as k:
        x, indices, y, num_rows = k.arguments(x="float32", indices="int32", y="float32", num_rows=SIZE)
        with serial(num_rows) as r, serial(width // LANES) as i:
            y[lanes(r * width + i * LANES)] = x[lanes(T.Cast("int64", indices[r]) * width + i * LANES)]
    return k.function
