"""Hidden states in the KV pool, which an MTP head reads for the token before its own.

A hidden state is stored as the keys of some heads, in the layer after `first_item` items of a page. Knows neither how
it is computed nor what reads it.
"""

from __future__ import annotations

from typing import Any

from radixlm.runtime.artifact.manifest import PAGE_SIZE, LayerLayout
from tvm.script.ir_builder import tirx as T

from ..codegen.builder import SIZE, Kernel, bound, either, for_each_row, serial
from ..codegen.vector import LANES, Expr, lanes, to_f32
from .kv_pool import KV_DTYPES, KVRow, PagedPool


def keep_hidden(layout: LayerLayout, stride: int) -> Any:
    """Return the PrimFunc `(x, slots, pool, first_item, num_pages, num_rows) -> 0`, which stores hidden states.

    `x` is float32 `[num_rows, stride]`.
    """
    size = layout.key_dim
    n = next(n for n in (LANES, 8, 4, 2) if size % n == 0)
    with Kernel() as k:
        x, slots, pool, first_item, num_pages, num_rows = k.arguments(
            x="float32", slots="int32", pool=KV_DTYPES[layout.dtype], first_item=SIZE, num_pages=SIZE, num_rows=SIZE
        )
        paged = PagedPool(layout, pool, first_item, num_pages)

        def row(m: Expr) -> None:
            slot = T.Cast("int64", slots[m])
            with serial(layout.num_kv_heads) as h:
                kept = KVRow.of_key(paged, bound(paged.keys(slot // PAGE_SIZE, h)), slot % PAGE_SIZE)
                for i in range(0, size, n):
                    kept.put(i, x[lanes(m * stride + h * size + i, n)], n)
                kept.finish()

        for_each_row(num_rows, row)
    return k.function


def concat_previous(layout: LayerLayout, width: int, x_stride: int, y_stride: int) -> Any:
    """Return the PrimFunc that concatenates each token's row with the stored row of the token before; it returns 0.

    `(x, page_table, row_of_token, kv_lengths, pool, first_item, num_pages, table_stride, y, num_rows)`

    Rows of `y`, float32 `[num_rows, y_stride]`, are those of `x` `[num_rows, x_stride]`, followed by the previous
    token's stored row, or by zeros for a first token. Both have `width` numbers; columns after them are zero.
    """
    size = layout.key_dim
    with Kernel() as k:
        x, page_table, row_of_token, kv_lengths, pool, first_item, num_pages, table_stride, y, num_rows = k.arguments(
            x="float32",
            page_table="int32",
            row_of_token="int32",
            kv_lengths="int32",
            pool=KV_DTYPES[layout.dtype],
            first_item=SIZE,
            num_pages=SIZE,
            table_stride=SIZE,
            y="float32",
            num_rows=SIZE,
        )
        paged = PagedPool(layout, pool, first_item, num_pages)

        def row(m: Expr) -> None:
            start = bound(m * y_stride)
            with serial(width) as i:
                y[start + i] = x[m * x_stride + i]
            with serial(y_stride - 2 * width) as i:
                y[start + 2 * width + i] = T.float32(0)
            before = bound(T.Cast("int64", kv_lengths[m]) - 2)
            with either(before >= 0) as (then, otherwise):
                with then:
                    entry = T.Cast("int64", row_of_token[m]) * table_stride + before // PAGE_SIZE
                    page = bound(T.Cast("int64", page_table[entry]))
                    with serial(layout.num_kv_heads) as h:
                        keys = bound(paged.keys(page, h))
                        with serial(size) as i:
                            y[start + width + h * size + i] = _kept(paged, keys, before % PAGE_SIZE, i)
                with otherwise, serial(width) as i:
                    y[start + width + i] = T.float32(0)

        for_each_row(num_rows, row)
    return k.function


def _kept(paged: PagedPool, keys: Expr, token: Expr, i: Expr) -> Expr:
    """Return element `i` of a token's row, whose keys begin at index `keys`."""
    pool, layout = paged.pool, paged.layout
    if not layout.has_codes:
        return to_f32(pool[keys + i * PAGE_SIZE + token], KV_DTYPES[layout.dtype], 1)
    code = T.reinterpret("int16", pool[lanes(keys + (i // 2 * PAGE_SIZE + token) * 4 + i % 2 * 2, 2)])
    scale = T.reinterpret("float32", pool[lanes(paged.scale(keys, token), 4)])
    return T.Cast("float32", code) * scale
