"""Layout of the KV pool, rounding of rows that are stored, and copying of rows and pages.

Knows how numbers are stored, not where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

from radixlm.runtime.artifact.manifest import PAGE_SIZE, SCALE_BYTES, KVLayout, LayerLayout
from tvm.script.ir_builder import tirx as T

from ..codegen.builder import SIZE, Kernel, Memory, bound, parallel, registers, serial
from ..codegen.lane_reductions import max_of_lanes
from ..codegen.vector import LANES, ROUNDING, Expr, const, lanes, splat, to_f32, vector_type
from ..weights.layout import round_up

KV_DTYPES = {"f16": "float16", "f32": "float32", "k12v8": "int8"}
KEY_LIMIT = 2047  # codes of keys are in -KEY_LIMIT..KEY_LIMIT
_VALUE_LIMIT = 127  # likewise of values
TOKENS_AT_ONCE = 4  # tokens of coded values that one instruction multiplies
_LEAST = 1e-30  # minimum of a row's largest magnitude, so that its inverse is finite


@dataclass(frozen=True)
class PagedPool:
    """One layer of the pool in the format `layout`, after `first_item * num_pages` items of other layers."""

    layout: LayerLayout
    pool: Memory
    first_item: Expr
    num_pages: Expr

    def keys(self, page: Expr, head: Expr) -> Expr:
        """Return the index of the first key of a head: `[key_dim, PAGE_SIZE]`."""
        return self._page(page) + head * self.layout.key_items + self.layout.num_scale_items

    def values(self, page: Expr, head: Expr) -> Expr:
        """Return the index of the first value of a head: `[PAGE_SIZE, value_dim]`, or of its keys if these hold it."""
        if self.layout.values_in_keys:
            return self.keys(page, head)
        before = self.layout.num_kv_heads * self.layout.key_items
        return self._page(page) + before + head * self.layout.value_items + self.layout.num_scale_items

    def key(self, keys: Expr, d: Expr) -> Expr:
        """Return element `d` of 16 keys that begin at index `keys`, as float32. Not for codes."""
        return to_f32(self.pool[lanes(keys + d * PAGE_SIZE)], KV_DTYPES[self.layout.dtype])

    def value(self, values: Expr, t: Expr, column: Expr, n: int) -> Expr:
        """Return columns `[column, column + n)` of token `t`'s value, as float32; values begin at index `values`.

        Not for codes, nor for values that are a part of the keys, which are transposed.
        """
        assert not self.layout.values_in_keys, "such values are read as keys"
        where = values + t * self.layout.value_dim + column
        return to_f32(self.pool[lanes(where, n)], KV_DTYPES[self.layout.dtype], n)

    def scales(self, start: Expr) -> Expr:
        """Return the scales of the 16 rows whose codes begin at index `start`."""
        return T.reinterpret(vector_type("float32"), self.pool[lanes(self.scale(start, 0), LANES * SCALE_BYTES)])

    def scale(self, start: Expr, token: Expr) -> Expr:
        """Return the index of the first byte of a token's scale."""
        return start - self.layout.num_scale_items + token * SCALE_BYTES

    def value_code(self, values: Expr, token: Expr, column: Expr) -> Expr:
        """Return the index of a number of a token's value, whose codes begin at index `values`."""
        group = token // TOKENS_AT_ONCE * self.layout.value_columns
        return values + (group + column) * TOKENS_AT_ONCE + token % TOKENS_AT_ONCE

    def _page(self, page: Expr) -> Expr:
        """Return the index of the first item of a page."""
        return self.first_item * self.num_pages + page * self.layout.page_items


@dataclass(frozen=True)
class KVRow:
    """A token's key or value of one head; those of its page begin at index `start`.

    It is stored as float32, or rounded to float16, or to codes with a scale.
    """

    paged: PagedPool
    start: Expr
    token: Expr
    size: int
    transposed: bool
    floats: Memory | None

    @classmethod
    def of_key(cls, paged: PagedPool, start: Expr, token: Expr) -> Self:
        """Return a row of the keys that begin at index `start`."""
        size = paged.layout.key_dim
        return cls(paged, start, token, size, True, _scratch(paged, size))

    @classmethod
    def of_value(cls, paged: PagedPool, start: Expr, token: Expr) -> Self:
        """Return a row of the values that begin at index `start`."""
        size = paged.layout.value_dim
        return cls(paged, start, token, size, False, _scratch(paged, size))

    def put(self, i: int, value: Expr, n: int) -> None:
        """Set elements `[i, i + n)`, float32."""
        if self.floats is not None:
            self.floats[lanes(i, n)] = value
            return
        dtype = KV_DTYPES[self.paged.layout.dtype]
        stored = value if dtype == "float32" else T.Cast(vector_type(dtype, n), value)
        where, step = self._at(i), PAGE_SIZE if self.transposed else 1
        self.paged.pool[T.ramp(where, step, n) if n > 1 else where] = stored

    def finish(self) -> None:
        """Store the row, after all its elements are set.

        The scale is the largest magnitude over 2047, or for values over 127. With a NaN or an infinity the scale is not
        finite, so that every token that sees the row gets NaN.
        """
        if self.floats is None:
            return
        pool = self.paged.pool
        limit, dtype = (KEY_LIMIT, "int16") if self.transposed else (_VALUE_LIMIT, "int8")
        largest = bound(largest_magnitude(self.floats, self.size))
        inverse = bound(T.float32(limit) / largest)
        scale = T.reinterpret(vector_type("int8", SCALE_BYTES), largest * T.float32(1 / limit))
        pool[lanes(self.paged.scale(self.start, self.token), SCALE_BYTES)] = scale
        codes = registers(round_up(self.size, LANES), dtype)
        for i in range(0, self.size, LANES):
            whole = T.reinterpret("int32x16", self.floats[lanes(i)] * splat(inverse) + const(ROUNDING))
            codes[lanes(i)] = T.Cast(vector_type(dtype), whole)
        if self.transposed:
            with serial(self.size // 2) as j:
                where = lanes(self.start + (j * PAGE_SIZE + self.token) * 4, 4)
                pool[where] = T.reinterpret("int8x4", codes[lanes(j * 2, 2)])
        else:
            with serial(self.size) as j:
                pool[self.paged.value_code(self.start, self.token, j)] = codes[j]

    def _at(self, i: Expr) -> Expr:
        """Return the index of element `i` of the row."""
        if self.transposed:
            return self.start + i * PAGE_SIZE + self.token
        return self.start + self.token * self.size + i


def _scratch(paged: PagedPool, row_size: int) -> Memory | None:
    """Return memory for a row until its largest magnitude is known, padded with zeros."""
    if not paged.layout.has_codes:
        return None
    size = round_up(row_size, LANES)
    floats = registers(size, "float32")
    floats[lanes(size - LANES)] = const(0)
    return floats


def largest_magnitude(floats: Memory, size: int, start: Expr = 0) -> Expr:
    """Return the largest magnitude of `size` numbers from `floats[start]` on, in whole vectors.

    Magnitudes are compared as integers: in that order infinity and NaN come last.
    """
    largest = registers(LANES, "int32")
    largest[lanes(0)] = splat(T.reinterpret("int32", T.float32(_LEAST)))
    for i in range(0, size, LANES):
        magnitude = T.bitwise_and(T.reinterpret("int32x16", floats[lanes(start + i)]), splat(T.int32(0x7FFFFFFF)))
        largest[lanes(0)] = T.max(largest[lanes(0)], magnitude)
    return T.reinterpret("float32", max_of_lanes(largest[lanes(0)], "int32"))


def copy_rows(layout: KVLayout) -> Any:
    """Return the PrimFunc `(pool, source, destination, num_rows, num_pages, num_copies) -> 0`.

    It copies the first `num_rows[i]` tokens of page `source[i]` to page `destination[i]`, in all layers.
    """
    dtype = KV_DTYPES[layout.dtype]
    with Kernel() as k:
        pool, source, destination, num_rows, num_pages, num_copies = k.arguments(
            pool=dtype, source="int32", destination="int32", num_rows="int32", num_pages=SIZE, num_copies=SIZE
        )
        for run in _alike(layout):
            heads = run.layout.num_kv_heads
            per_copy = run.num_layers * heads
            with parallel(num_copies * per_copy) as item:
                i, layer, head = item // per_copy, item % per_copy // heads, item % heads
                paged = PagedPool(run.layout, pool, run.first_item + layer * run.layout.page_items, num_pages)
                old, new = T.Cast("int64", source[i]), T.Cast("int64", destination[i])
                _copy_head(paged, old, new, head, T.Cast("int64", num_rows[i]))
    return k.function


def _copy_head(paged: PagedPool, old: Expr, new: Expr, head: Expr, tokens: Expr) -> None:
    """Copy the KV of a head; rows of other tokens are rewritten unchanged.

    A loop over the tokens alone would be unrolled, and take LLVM up to a second.
    """
    pool, layout = paged.pool, paged.layout
    old_keys, new_keys = bound(paged.keys(old, head)), bound(paged.keys(new, head))
    old_values, new_values = bound(paged.values(old, head)), bound(paged.values(new, head))
    size = 4 if layout.has_codes else 1  # adjacent items of a token
    of_tokens = T.ramp(T.int32(0), 1, PAGE_SIZE) < T.broadcast(T.Cast("int32", tokens), PAGE_SIZE)

    def copy(source: Expr, destination: Expr) -> None:
        """Copy one number of each token, or four bytes."""
        there, here = (_words(pool, start, size) for start in (source, destination))
        pool[lanes(destination, PAGE_SIZE * size)] = _items(T.Select(of_tokens, there, here), size)

    with serial(layout.key_dim * 2 // size if layout.has_codes else layout.key_dim) as d:
        copy(old_keys + d * (PAGE_SIZE * size), new_keys + d * (PAGE_SIZE * size))
    if layout.has_codes:
        copy(paged.scale(old_keys, 0), paged.scale(new_keys, 0))
    if layout.values_in_keys:
        return
    if layout.has_codes:
        copy(paged.scale(old_values, 0), paged.scale(new_values, 0))
        with serial(tokens) as t, serial(layout.value_dim) as j:
            pool[paged.value_code(new_values, t, j)] = pool[paged.value_code(old_values, t, j)]
    else:
        with serial(tokens * layout.value_dim) as j:
            pool[new_values + j] = pool[old_values + j]


def _words(pool: Memory, start: Expr, size: int) -> Expr:
    """Return a vector of items, or of int32 with four bytes each."""
    items = pool[lanes(start, PAGE_SIZE * size)]
    return items if size == 1 else T.reinterpret(vector_type("int32", PAGE_SIZE), items)


def _items(words: Expr, size: int) -> Expr:
    """Return the items of a vector made by `_words`."""
    return words if size == 1 else T.reinterpret(vector_type("int8", PAGE_SIZE * size), words)


def move_pages(layout: KVLayout, *, into_pool: bool) -> Any:
    """Return the PrimFunc `(pool, pages, buffer, num_pages, num_moved) -> 0`.

    It copies pages of the pool to `buffer`, or back if `into_pool`. `buffer` holds whole pages, `[num_moved,
    page_items]`, layer by layer.
    """
    dtype = KV_DTYPES[layout.dtype]
    with Kernel() as k:
        pool, pages, buffer, num_pages, num_moved = k.arguments(
            pool=dtype, pages="int32", buffer=dtype, num_pages=SIZE, num_moved=SIZE
        )
        for run in _alike(layout):
            size = run.layout.page_items
            with parallel(num_moved * run.num_layers) as item:
                i, layer = item // run.num_layers, item % run.num_layers
                first_item = run.first_item + layer * size
                inside = first_item * num_pages + T.Cast("int64", pages[i]) * size
                outside = i * layout.page_items + first_item
                with serial(size) as j:
                    if into_pool:
                        pool[inside + j] = buffer[outside + j]
                    else:
                        buffer[outside + j] = pool[inside + j]
    return k.function


@dataclass(frozen=True)
class _AlikeLayers:
    """Neighbouring layers of one shape, after `first_item` items of a page."""

    layout: LayerLayout
    num_layers: int
    first_item: int


def _alike(layout: KVLayout) -> list[_AlikeLayers]:
    """Return all layers in the fewest runs of one shape: one run if they are uniform."""
    runs = list[_AlikeLayers]()
    for _, layers in groupby(range(layout.num_layers), lambda layer: layout.layers[layer]):
        first, *others = layers
        runs.append(_AlikeLayers(layout.of_layer(first), 1 + len(others), layout.items_before(first)))
    return runs
