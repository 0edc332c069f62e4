"""Prepare a token's queries and its latent vector for latent attention (DeepSeek-V2, 2024).

The KV row of a token is its normalized latent vector, followed by the rotated key. Knows neither the matrices of heads
nor attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from radixlm.runtime.artifact.manifest import PAGE_SIZE, LayerLayout
from tvm.script.ir_builder import tirx as T

from ..codegen.builder import SIZE, Kernel, Memory, bound, for_each_row, registers, serial
from ..codegen.lane_reductions import sum_of_lanes
from ..codegen.vector import LANES, Expr, const, lanes, splat
from .kv_pool import KV_DTYPES, KVRow, PagedPool


@dataclass(frozen=True)
class LatentShape:
    """Sizes of a layer's heads and rows.

    A head's query is `plain_dim` numbers and `rotary_dim` rotated ones, in rows of `queries_stride`. The KV row's
    `latent_dim` and `rotary_dim` numbers begin at `column`, in rows of `latent_stride`.
    """

    num_heads: int
    plain_dim: int
    latent_dim: int
    rotary_dim: int
    queries_stride: int
    latent_stride: int
    column: int
    eps: float
    has_temperatures: bool = False

    @property
    def row_dim(self) -> int:
        """Number of elements of a KV row, and of its query."""
        return self.latent_dim + self.rotary_dim


def every_head(num_heads: int) -> Any:
    """Return the PrimFunc `(heads, num_rows) -> 0`: int32 `[num_rows, num_heads]`, in each row all heads in order."""
    with Kernel() as k:
        heads, num_rows = k.arguments(heads="int32", num_rows=SIZE)
        with serial(num_rows) as m, serial(num_heads) as h:
            heads[m * num_heads + h] = T.Cast("int32", h)
    return k.function


def latent_append(layout: LayerLayout, shape: LatentShape) -> Any:
    """Return the PrimFunc that stores each token's KV row and completes its queries; it returns 0.

    `(queries, latent, angles, gain[, temperatures], slots, q, pool, first_item, num_pages, num_rows)`

    Reads `queries` and `latent`, float32 `[num_rows, stride]`. Writes the KV row of token m to row `slots[m]` of the
    pool, in the layer after `first_item` items of a page. `q`, float32 `[num_rows, num_heads, row_dim]`, already has
    the first `latent_dim` numbers of each head. The rotated numbers of its query are written after them, and all are
    multiplied by the token's temperature if there are any.
    """
    with Kernel() as k:
        queries, latent, angles, gain, *temperatures, slots, q, pool, first_item, num_pages, num_rows = k.arguments(
            queries="float32",
            latent="float32",
            angles="float32",
            gain="float32",
            **({"temperatures": "float32"} if shape.has_temperatures else {}),
            slots="int32",
            q="float32",
            pool=KV_DTYPES[layout.dtype],
            first_item=SIZE,
            num_pages=SIZE,
            num_rows=SIZE,
        )
        size = shape.plain_dim + shape.rotary_dim
        paged = PagedPool(layout, pool, first_item, num_pages)

        def row(m: Expr) -> None:
            with serial(shape.num_heads) as h:
                to = bound((m * shape.num_heads + h) * shape.row_dim)
                first = bound(m * shape.queries_stride + h * size + shape.plain_dim)
                for i, n, value in _rotated(queries, first, angles, m, shape.rotary_dim):
                    warm = value * splat(temperatures[0][m], n) if temperatures else value
                    q[lanes(to + shape.latent_dim + i, n)] = warm
                if temperatures:
                    with serial(shape.latent_dim // LANES) as i:
                        where = lanes(to + i * LANES)
                        q[where] = q[where] * splat(temperatures[0][m])
            slot = T.Cast("int64", slots[m])
            kept = KVRow.of_key(paged, bound(paged.keys(slot // PAGE_SIZE, 0)), slot % PAGE_SIZE)
            start = bound(m * shape.latent_stride + shape.column)
            inverse = _inverse_root(latent, start, shape.latent_dim, shape.eps)
            for i in range(0, shape.latent_dim, LANES):
                kept.put(i, latent[lanes(start + i)] * splat(inverse) * gain[lanes(i)], LANES)
            for i, n, value in _rotated(latent, start + shape.latent_dim, angles, m, shape.rotary_dim):
                kept.put(shape.latent_dim + i, value, n)
            kept.finish()

        for_each_row(num_rows, row)
    return k.function


def _rotated(x: Memory, start: Expr, angles: Memory, m: Expr, dim: int) -> Iterator[tuple[int, int, Expr]]:
    """Yield `dim` numbers from `start` on, rotated by row m of `angles`: elements `[i, i + n)` as `i`, `n`, vector."""
    half = dim // 2
    n = next(n for n in (LANES, 8, 4, 2, 1) if half % n == 0)
    for i in range(0, half, n):
        first, second = x[lanes(start + i, n)], x[lanes(start + half + i, n)]
        cos, sin = angles[lanes(m * dim + i, n)], angles[lanes(m * dim + half + i, n)]
        yield i, n, first * cos - second * sin
        yield half + i, n, second * cos + first * sin


def _inverse_root(x: Memory, start: Expr, count: int, eps: float) -> Expr:
    """Return one over the root mean square of `count` numbers, a multiple of LANES (Zhang and Sennrich, 2019)."""
    sums = registers(LANES, "float32")
    sums[lanes(0)] = const(0)
    with serial(count // LANES) as i:
        value = bound(x[lanes(start + i * LANES)])
        sums[lanes(0)] = sums[lanes(0)] + value * value
    mean = sum_of_lanes(sums[lanes(0)]) / T.float32(count)
    return bound(T.float32(1) / T.sqrt(mean + T.float32(eps)))
