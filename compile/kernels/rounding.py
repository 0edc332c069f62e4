"""Groups of a row's floats become codes, scales and sums, where `quantized_rows.py` says. Knows no function."""

from __future__ import annotations

import tvm
from tvm.script.ir_builder import tirx as T

from .builder import Memory, bound, registers
from .lane_reductions import reduce_each
from .layout import GROUP
from .quantized_rows import CHUNKS, QuantizedRows
from .vector import LANES, Expr, lanes, splat

_LEAST = 1e-30  # the largest magnitude of a group counts as this at least


def round_groups(values: Memory, count: int, rows: QuantizedRows, first: Expr, m: Expr) -> None:
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
