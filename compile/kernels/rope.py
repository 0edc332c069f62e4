"""Rotary position embedding (Su et al., 2021; halves rotated, as Hugging Face's Llama), and appending to the pool."""

from __future__ import annotations

from typing import Any

from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVLayout
from tvm.script.ir_builder import tirx as T

from ..codegen.builder import SIZE, Kernel, for_each_row, serial
from ..codegen.vector import Expr, lanes
from .kv_pool import KV_DTYPES, KVRow, PagedPool


def rope_angles(head_dim: int) -> Any:
    """A PrimFunc `(positions, inverse_frequencies, angles, num_rows) -> 0`.

    `angles` float32 `[num_rows, head_dim]`: cosines of `position * inverse_frequency` (float32, as Transformers rounds
    it), then sines.
    """
    half = head_dim // 2
    with Kernel() as k:
        positions, frequencies, angles, num_rows = k.arguments(
            positions="int32", frequencies="float32", angles="float32", num_rows=SIZE
        )

        def row(m: Expr) -> None:
            with serial(half) as i:
                angle = T.Cast("float32", positions[m]) * frequencies[i]
                angles[m * head_dim + i] = T.cos(angle)
                angles[m * head_dim + half + i] = T.sin(angle)

        for_each_row(num_rows, row)
    return k.function


def rope_append(layout: KVLayout, num_heads: int, q_column: int, k_column: int, v_column: int, stride: int) -> Any:
    """A PrimFunc `(qkv, angles, slots, q, pool, layer, num_pages, num_rows) -> 0`.

    Reads rows of `qkv` float32 `[num_rows, stride]`; writes rotated queries to `q` float32 `[num_rows, num_heads *
    head_dim]`, and rotated keys and the values to row `slots[m]` of the pool.
    """
    head_dim, half = layout.head_dim, layout.head_dim // 2
    n = next(n for n in (16, 8, 4, 2, 1) if half % n == 0)
    dtype = KV_DTYPES[layout.dtype]
    with Kernel() as k:
        qkv, angles, slots, q, pool, layer, num_pages, num_rows = k.arguments(
            qkv="float32",
            angles="float32",
            slots="int32",
            q="float32",
            pool=dtype,
            layer=SIZE,
            num_pages=SIZE,
            num_rows=SIZE,
        )
        paged = PagedPool(layout, pool, layer, num_pages)

        def rotated(m: Expr, column: Expr, i: int) -> tuple[Expr, Expr]:
            """Elements `i..i+n` of both halves of a head, turned."""
            first, second = qkv[lanes(m * stride + column + i, n)], qkv[lanes(m * stride + column + half + i, n)]
            cos, sin = angles[lanes(m * head_dim + i, n)], angles[lanes(m * head_dim + half + i, n)]
            return first * cos - second * sin, second * cos + first * sin

        def row(m: Expr) -> None:
            page = T.Cast("int64", slots[m]) // PAGE_SIZE
            token = T.Cast("int64", slots[m]) % PAGE_SIZE
            with serial(num_heads) as h:
                for i in range(0, half, n):
                    first, second = rotated(m, q_column + h * head_dim, i)
                    start = (m * num_heads + h) * head_dim + i
                    q[lanes(start, n)], q[lanes(start + half, n)] = first, second
            with serial(layout.num_kv_heads) as h:
                key = KVRow.of_key(paged, paged.keys(page, h), token)
                for i in range(0, half, n):
                    first, second = rotated(m, k_column + h * head_dim, i)
                    key.put(i, first, n)
                    key.put(i + half, second, n)
                key.finish()
                value = KVRow.of_value(paged, paged.values(page, h), token)
                for i in range(0, head_dim, n):
                    value.put(i, qkv[lanes(m * stride + v_column + h * head_dim + i, n)], n)
                value.finish()

        for_each_row(num_rows, row)
    return k.function
