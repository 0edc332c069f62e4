"""Split whole pages of KV into rows of tokens, and build pages from rows in any order.

Keys are stored after RoPE, so attention does not depend on the order of a prefix's rows, nor on their completeness. A
row in pages can belong to any token, and to another one in each layer and KV head. Copies bits and computes nothing.
All layers have the same layout. Knows the layout of a page, not pools or files, nor why rows are selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..artifact.manifest import PAGE_SIZE, KVDType, KVLayout
from ..errors import EngineError
from .batch import Float32Array

Items = npt.NDArray[Any]
Order = npt.NDArray[np.integer[Any]]
UInt8Array = npt.NDArray[np.uint8]
ROW_DTYPES: dict[KVDType, Any] = {"f16": np.float16, "f32": np.float32, "k12v8": np.int16}
"""Types of rows outside of pages; k12v8's values, which are int8 in the pool, are as wide as its keys."""
_POOL_DTYPES = {**ROW_DTYPES, "k12v8": np.int8}


@dataclass(frozen=True)
class KVRows:
    """Keys (`[0]`) and values (`[1]`) of tokens, as the pool stores them.

    >>> rows = KVRows.of_pages(layout, pages, num_tokens=20)  # 2 pages
    >>> few = rows.take(order[:, :, :5]).to_pages()  # 1 page: in each layer and head the 5 tokens that come first
    >>> (rows.take(order).take(inverse_order(order)).to_pages() == rows.to_pages()).all()
    True
    """

    layout: KVLayout
    items: Items  # [2, layers, kv_heads, tokens, head_dim], of a type in `ROW_DTYPES`
    scales: Float32Array | None  # [2, layers, kv_heads, tokens], if rows are codes

    @classmethod
    def of_pages(cls, layout: KVLayout, pages: UInt8Array, num_tokens: int | None = None) -> KVRows:
        """Return the first `num_tokens` rows (by default all) of `pages`, uint8 `[N, page_bytes]`; copies.

        Raises:
            EngineError: the pages have another layout, or are too few.
        """
        count = len(pages) * PAGE_SIZE if num_tokens is None else num_tokens
        if pages.dtype != np.uint8 or pages.ndim != 2 or pages.shape[1] != layout.page_bytes:
            raise EngineError(f"the pages are {pages.dtype} {pages.shape}; uint8 [N, {layout.page_bytes}] is needed")
        if not 0 <= count <= len(pages) * PAGE_SIZE:
            raise EngineError(f"{count} rows are wanted of {len(pages)} pages of {PAGE_SIZE}")
        heads = _heads_of(layout, pages)
        in_page = (PAGE_SIZE, layout.head_dim)
        rows = [_rows_in(layout, part, i).reshape(*part.shape[:3], *in_page) for i, part in enumerate(heads)]
        # [pages, layers, kv_heads, PAGE_SIZE, ...] to [layers, kv_heads, tokens, ...]
        items = [np.moveaxis(part, 0, 2).reshape(*part.shape[1:3], -1, layout.head_dim) for part in rows]
        scales = None
        if layout.has_codes:
            stored = np.stack([np.ascontiguousarray(part[..., : layout.num_scale_items]) for part in heads])
            scales = np.moveaxis(stored.view(np.float32), 1, 3).reshape(2, *stored.shape[2:4], -1)
            scales = scales[..., :count].copy()
        return cls(layout, np.stack(items)[..., :count, :].copy(), scales)

    @classmethod
    def joined(cls, parts: Sequence[KVRows]) -> KVRows:
        """Return the rows of all `parts`, concatenated.

        There must be at least one part, and all have the same layout.
        """
        if len(parts) == 1:
            return parts[0]
        items = np.concatenate([part.items for part in parts], axis=3)
        scales = [part.scales for part in parts if part.scales is not None]
        return cls(parts[0].layout, items, np.concatenate(scales, axis=3) if scales else None)

    @property
    def num_tokens(self) -> int:
        """Number of rows in each layer and head."""
        return int(self.items.shape[3])

    def take(self, order: Order) -> KVRows:
        """Return the rows `order[layer, head]` of each layer and KV head, in that order.

        `order` is `[layers, kv_heads, n]`.

        Raises:
            EngineError: `order` has another shape, or contains a row that does not exist.
        """
        layers, heads = self.items.shape[1:3]
        if order.ndim != 3 or order.shape[:2] != (layers, heads):
            raise EngineError(f"the order is {order.shape}; {(layers, heads)} and a number of rows is needed")
        if order.size and (order.min() < 0 or order.max() >= self.num_tokens):
            raise EngineError(f"the order names rows {order.min()}..{order.max()} of {self.num_tokens}")
        where = (slice(None), np.arange(layers)[:, None, None], np.arange(heads)[None, :, None], order)
        return replace(self, items=self.items[where], scales=None if self.scales is None else self.scales[where])

    @staticmethod
    def pages_of(parts: Sequence[KVRows], order: Order) -> UInt8Array:
        """Return `KVRows.joined(parts).take(order).to_pages()`, computed one layer at a time.

        Memory that is new to the process costs more than the work on it, 60 ms for 600 rows of SmolLM2. This takes a
        third.
        """
        layout = parts[0].layout
        one = KVLayout(dtype=layout.dtype, page_size=PAGE_SIZE, layers=layout.layers[:1])
        pages = np.empty((-(-order.shape[2] // PAGE_SIZE), layout.num_layers, one.page_bytes), np.uint8)
        for layer in range(layout.num_layers):
            mine = slice(layer, layer + 1)
            scales = [None if part.scales is None else part.scales[:, mine] for part in parts]
            rows = [KVRows(one, part.items[:, mine], some) for part, some in zip(parts, scales, strict=True)]
            pages[:, layer] = KVRows.joined(rows).take(order[mine]).to_pages()
        return pages.reshape(len(pages), layout.page_bytes)

    def to_pages(self) -> UInt8Array:
        """Return the fewest pages that hold the rows, uint8 `[N, page_bytes]`; the rest of the last one is zeros."""
        layout, count = self.layout, self.num_tokens
        num_pages = -(-count // PAGE_SIZE)
        pages = np.zeros((num_pages, layout.page_bytes), np.uint8)
        heads = _heads_of(layout, pages)
        shape = (*self.items.shape[1:3], num_pages, PAGE_SIZE)
        for part in range(2):
            padded = self.items[part]
            if count % PAGE_SIZE:
                padded = np.zeros((*shape[:2], num_pages * PAGE_SIZE, layout.head_dim), self.items.dtype)
                padded[:, :, :count] = self.items[part]
            in_page = np.moveaxis(padded.reshape(*shape, layout.head_dim), 2, 0)  # [pages, layers, kv_heads, ...]
            rows = _rows_in(layout, heads[part], part)
            rows[...] = in_page.reshape(rows.shape)
            if self.scales is not None:
                scales = np.zeros(shape, np.float32)
                scales.reshape(*shape[:2], -1)[:, :, :count] = self.scales[part]
                stored = np.ascontiguousarray(np.moveaxis(scales, 2, 0)).view(np.int8)
                heads[part][..., : layout.num_scale_items] = stored
        return pages

    def keys_of(self, head: int) -> Float32Array:
        """Return the keys of one KV head as numbers, `[layers, tokens, head_dim]`."""
        keys = self.items[0, :, head].astype(np.float32)
        return keys if self.scales is None else keys * self.scales[0, :, head, :, None]


def value_dtype(layout: KVLayout) -> Any:
    """Return the type of values in pages."""
    return _POOL_DTYPES[layout.dtype]


def inverse_order(order: Order) -> Order:
    """Return the order that undoes `order`, which is a permutation of all rows in each layer and head."""
    inverse: Order = np.argsort(order, axis=-1)
    return inverse


def _heads_of(layout: KVLayout, pages: UInt8Array) -> tuple[Items, Items]:
    """Return views of the keys and the values of pages, each `[N, layers, kv_heads, items]`."""
    each, num_heads = layout.of_layer(0), layout.num_kv_heads
    shape = (len(pages), layout.num_layers, each.page_items)
    items = np.ascontiguousarray(pages).view(_POOL_DTYPES[layout.dtype]).reshape(shape)
    num_keys = num_heads * each.key_items
    parts = (items[..., :num_keys], each.key_items), (items[..., num_keys:], each.value_items)
    keys, values = (part.reshape(*part.shape[:2], num_heads, size) for part, size in parts)
    return keys, values


def _rows_in(layout: KVLayout, heads: Items, part: int) -> Items:
    """Return a view of the rows of keys (`part` 0) or values, `[N, layers, kv_heads, PAGE_SIZE, ...]`.

    The remaining axes hold one row of `head_dim` numbers.
    """
    dim, behind = layout.head_dim, heads[..., layout.num_scale_items :]
    before = behind.shape[:-1]
    if not layout.of_layer(0).has_codes:
        numbers = behind[..., : PAGE_SIZE * dim]
        if part == 0:
            return numbers.reshape(*before, dim, PAGE_SIZE).swapaxes(-1, -2)
        return numbers.reshape(*before, PAGE_SIZE, dim)
    if part == 0:
        return np.moveaxis(behind.view(np.int16).reshape(*before, dim // 2, PAGE_SIZE, 2), -2, -3)
    fours = behind.reshape(*before, PAGE_SIZE // 4, layout.of_layer(0).value_columns, 4)
    return fours[..., :dim, :].swapaxes(-1, -2)
