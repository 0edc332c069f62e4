"""Where a page's keys and values lie in the pool, and moving rows and pages about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from radixlm.runtime.artifact.manifest import PAGE_SIZE, SCALE_BYTES, KVLayout
from tvm.script.ir_builder import tirx as T

from .builder import SIZE, Kernel, Memory, parallel, serial
from .vector import LANES, Expr, lanes, to_f32, vector_type

KV_DTYPES = {"f16": "float16", "f32": "float32", "int8": "int8"}


@dataclass(frozen=True)
class PagedPool:
    """One layer of the pool, which lies as `KVLayout` says."""

    layout: KVLayout
    pool: Memory
    layer: Expr
    num_pages: Expr

    def keys(self, page: Expr, head: Expr) -> Expr:
        """Index of the first key of a head: `[head_dim, PAGE_SIZE]`."""
        return self._start(page, 0, head)

    def values(self, page: Expr, head: Expr) -> Expr:
        """Index of the first value of a head: `[PAGE_SIZE, head_dim]`."""
        return self._start(page, 1, head)

    def key(self, keys: Expr, d: Expr) -> Expr:
        """Element `d` of 16 keys that begin at index `keys`, as float32; of int8 the codes."""
        return to_f32(self.pool[lanes(keys + d * PAGE_SIZE)], KV_DTYPES[self.layout.dtype])

    def value(self, values: Expr, t: Expr, column: Expr, n: int) -> Expr:
        """Columns `[column, column + n)` of token `t` of the values that begin at index `values`, as float32; of int8
        the codes."""
        where = values + t * self.layout.head_dim + column
        return to_f32(self.pool[lanes(where, n)], KV_DTYPES[self.layout.dtype], n)

    def scales(self, start: Expr) -> Expr:
        """The scales of the 16 rows of int8 whose codes begin at index `start`."""
        return T.reinterpret(vector_type("float32"), self.pool[lanes(self.scale(start, 0), LANES * SCALE_BYTES)])

    def scale(self, start: Expr, token: Expr) -> Expr:
        """Index of the first of the bytes of a token's scale."""
        return start - self.layout.num_scale_items + token * SCALE_BYTES

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.layout.itemsize

    def _start(self, page: Expr, which: int, head: Expr) -> Expr:
        heads = ((self.layer * self.num_pages + page) * 2 + which) * self.layout.num_kv_heads + head
        return heads * self.layout.head_items + self.layout.num_scale_items


def copy_rows(layout: KVLayout) -> Any:
    """A PrimFunc `(pool, source, destination, num_rows, num_pages, num_copies) -> 0`.

    Copies the first `num_rows[i]` tokens of page `source[i]` to page `destination[i]`, in all layers.
    """
    dtype = KV_DTYPES[layout.dtype]
    with Kernel() as k:
        pool, source, destination, num_rows, num_pages, num_copies = k.arguments(
            pool=dtype, source="int32", destination="int32", num_rows="int32", num_pages=SIZE, num_copies=SIZE
        )
        per_copy = layout.num_layers * layout.num_kv_heads
        with parallel(num_copies * per_copy) as item:
            i, layer, head = item // per_copy, item % per_copy // layout.num_kv_heads, item % layout.num_kv_heads
            paged = PagedPool(layout, pool, layer, num_pages)
            old, new = T.Cast("int64", source[i]), T.Cast("int64", destination[i])
            tokens = T.Cast("int64", num_rows[i])
            with serial(layout.head_dim) as d, serial(tokens) as t:
                where = d * PAGE_SIZE + t
                pool[paged.keys(new, head) + where] = pool[paged.keys(old, head) + where]
            with serial(tokens * layout.head_dim) as j:
                pool[paged.values(new, head) + j] = pool[paged.values(old, head) + j]
            if layout.has_scales:
                for start in (paged.keys, paged.values):
                    with serial(tokens * SCALE_BYTES) as j:
                        pool[paged.scale(start(new, head), 0) + j] = pool[paged.scale(start(old, head), 0) + j]
    return k.function


def move_pages(layout: KVLayout, *, into_pool: bool) -> Any:
    """A PrimFunc `(pool, pages, buffer, num_pages, num_moved) -> 0`.

    `buffer` holds whole pages, `[num_moved, layers, 2 * kv_heads * head_items]`: the door of a disk tier.
    """
    dtype = KV_DTYPES[layout.dtype]
    size = 2 * layout.num_kv_heads * layout.head_items
    with Kernel() as k:
        pool, pages, buffer, num_pages, num_moved = k.arguments(
            pool=dtype, pages="int32", buffer=dtype, num_pages=SIZE, num_moved=SIZE
        )
        with parallel(num_moved * layout.num_layers) as item:
            i, layer = item // layout.num_layers, item % layout.num_layers
            inside = (layer * num_pages + T.Cast("int64", pages[i])) * size
            with serial(size) as j:
                if into_pool:
                    pool[inside + j] = buffer[item * size + j]
                else:
                    buffer[item * size + j] = pool[inside + j]
    return k.function
