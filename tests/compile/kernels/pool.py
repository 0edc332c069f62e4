"""A KV pool as the kernels lay it out, and the same rows as plain arrays."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVDType, KVLayer, KVLayout

# of an item
DTYPES: dict[KVDType, type[np.generic]] = {"f16": np.float16, "f32": np.float32, "k12v8": np.int8}
Part = Literal[0, 1]
KEYS: Part = 0
VALUES: Part = 1
PARTS = (KEYS, VALUES)


def layout_of(
    dtype: KVDType, num_layers: int, num_kv_heads: int, head_dim: int, value_dim: int | None = None
) -> KVLayout:
    """Layers that are alike; with a `value_dim`, values are so many numbers of the keys."""
    if value_dim is None:
        return KVLayout.uniform(dtype, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)
    layer = KVLayer(num_kv_heads=num_kv_heads, key_dim=head_dim, value_dim=value_dim, values_in_keys=True)
    return KVLayout(dtype=dtype, page_size=PAGE_SIZE, layers=(layer,) * num_layers)


@dataclass
class Pool:
    """`[layers, pages, items]`, every row NaN until it is written; of a page first all heads' keys, then values."""

    layout: KVLayout
    num_pages: int

    def __post_init__(self) -> None:
        layout, dtype = self.layout, DTYPES[self.layout.dtype]
        shape = (layout.num_layers, self.num_pages, layout.of_layer(0).page_items)
        self.array = np.full(shape, -1, np.int8) if layout.has_codes else np.full(shape, np.nan, dtype)

    def write(self, part: Part, page: int, layer: int, tokens: slice | int, rows: np.ndarray) -> None:
        """Store `rows` `[kv_heads, (tokens,) head_dim]`, rounded as the pool's dtype wants."""
        if self.layout.has_codes:
            codes, scales = rounded(rows, self.limit(part))
            self.scales(part, page, layer)[:, tokens] = scales
        else:
            codes = rows
        self.items(part, page, layer)[:, tokens] = codes

    def rows(self, part: Part, page: int, layer: int) -> np.ndarray:
        """What is stored, float64 `[kv_heads, PAGE_SIZE, head_dim]`."""
        items = self.items(part, page, layer).astype(np.float64)
        with np.errstate(invalid="ignore"):
            return items * self.scales(part, page, layer)[..., None] if self.layout.has_codes else items

    def items(self, part: Part, page: int, layer: int) -> Any:
        """A view `[kv_heads, PAGE_SIZE, head_dim]`, of codes if it has such."""
        start, layout = self.layout.num_scale_items, self.layout.of_layer(layer)
        if layout.values_in_keys and part == VALUES:
            return self.items(KEYS, page, layer)[..., : layout.value_dim]
        head_dim, heads = layout.key_dim, self._heads(part, page, layer)
        if layout.has_codes:
            return Interleaved(heads, part, head_dim, layout.value_columns)
        items = heads[:, start : start + PAGE_SIZE * head_dim]
        if part == KEYS:
            return items.reshape(-1, head_dim, PAGE_SIZE).swapaxes(1, 2)
        return items.reshape(-1, PAGE_SIZE, head_dim)

    def scales(self, part: Part, page: int, layer: int) -> np.ndarray:
        """A view, float32 `[kv_heads, PAGE_SIZE]`."""
        part = KEYS if self.layout.of_layer(layer).values_in_keys else part
        return self._heads(part, page, layer)[:, : self.layout.num_scale_items].view(np.float32)

    def limit(self, part: Part) -> int:
        """The largest code of keys or values, where there are any."""
        return 2047 if part == KEYS else 127

    def _heads(self, part: Part, page: int, layer: int) -> np.ndarray:
        """A view `[kv_heads, items]` of the keys or values of a page."""
        layout = self.layout.of_layer(layer)
        items = self.array[layer, page]
        if part == KEYS:
            return items[: layout.num_kv_heads * layout.key_items].reshape(layout.num_kv_heads, layout.key_items)
        return items[layout.num_kv_heads * layout.key_items :].reshape(layout.num_kv_heads, layout.value_items)

    def with_unwritten(self, number: float) -> np.ndarray:
        """A copy of the array that has `number` where nothing was written; of codes as the scale."""
        array = self.array.copy()
        numbers = array[..., : self.layout.num_scale_items].view(np.float32) if self.layout.has_codes else array
        numbers[np.isnan(numbers)] = number
        return array


class Interleaved:
    """Codes of k12v8 as if they lay `[kv_heads, PAGE_SIZE, head_dim]`: reads and writes what NumPy's index picks."""

    def __init__(self, heads: np.ndarray, part: Part, head_dim: int, num_columns: int) -> None:
        """`heads` `[kv_heads, items]`, a view of a page's keys or values, scales first."""
        self.memory = heads.view(np.int16) if part == KEYS else heads
        self.index = _interleaved(len(heads), part, head_dim, num_columns)

    def __getitem__(self, key: Any) -> np.ndarray:
        return self.memory[tuple(i[key] for i in self.index)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.memory[tuple(i[key] for i in self.index)] = value

    def astype(self, dtype: Any) -> np.ndarray:
        return self[:].astype(dtype)


@functools.cache
def _interleaved(num_heads: int, part: Part, head_dim: int, num_columns: int) -> tuple[np.ndarray, ...]:
    """Head and place of each code, `[kv_heads, PAGE_SIZE, head_dim]` each."""
    head, token, d = np.ogrid[:num_heads, :PAGE_SIZE, :head_dim]
    start = PAGE_SIZE * 4
    if part == KEYS:
        place = start // 2 + d // 2 * (2 * PAGE_SIZE) + token * 2 + d % 2
    else:
        place = start + (token // 4 * num_columns + d) * 4 + token % 4
    return tuple(np.broadcast_arrays(head, place))


def rounded(rows: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes of rows `[..., head_dim]`, and float32 scales `[...]`."""
    largest = np.maximum(np.abs(rows).max(axis=-1), 1e-30).astype(np.float32)
    codes = np.rint(rows.astype(np.float32) * (np.float32(limit) / largest)[..., None])
    return codes.astype(np.int16 if limit > 127 else np.int8), largest * np.float32(1 / limit)
