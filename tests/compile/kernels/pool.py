"""A KV pool as the kernels lay it out, and the same rows as plain arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVDType, KVLayer, KVLayout

DTYPES: dict[KVDType, type[np.generic]] = {"f16": np.float16, "f32": np.float32, "int8": np.int8}
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
    """`[layers, pages, 2, kv_heads, items]`, every row NaN until it is written; 1 where keys hold the values."""

    layout: KVLayout
    num_pages: int

    def __post_init__(self) -> None:
        layout, dtype = self.layout, DTYPES[self.layout.dtype]
        of_layer = layout.of_layer(0)
        parts = 1 if of_layer.values_in_keys else 2
        shape = (layout.num_layers, self.num_pages, parts, of_layer.num_kv_heads, of_layer.key_items)
        self.array = np.full(shape, -1, np.int8) if layout.has_scales else np.full(shape, np.nan, dtype)

    def write(self, part: Part, page: int, layer: int, tokens: slice | int, rows: np.ndarray) -> None:
        """Store `rows` `[kv_heads, (tokens,) head_dim]`, rounded as the pool's dtype wants."""
        if self.layout.has_scales:
            codes, scales = rounded(rows)
            self.scales(part, page, layer)[:, tokens] = scales
        else:
            codes = rows
        self.items(part, page, layer)[:, tokens] = codes

    def rows(self, part: Part, page: int, layer: int) -> np.ndarray:
        """What is stored, float64 `[kv_heads, PAGE_SIZE, head_dim]`."""
        items = self.items(part, page, layer).astype(np.float64)
        with np.errstate(invalid="ignore"):
            return items * self.scales(part, page, layer)[..., None] if self.layout.has_scales else items

    def items(self, part: Part, page: int, layer: int) -> np.ndarray:
        """A view `[kv_heads, PAGE_SIZE, head_dim]`; of int8 the codes."""
        start, layout = self.layout.num_scale_items, self.layout.of_layer(layer)
        if layout.values_in_keys and part == VALUES:
            return self.items(KEYS, page, layer)[..., : layout.value_dim]
        head_dim = layout.key_dim
        items = self.array[layer, page, part][:, start : start + PAGE_SIZE * head_dim]
        if part == KEYS:
            return items.reshape(-1, head_dim, PAGE_SIZE).swapaxes(1, 2)
        return items.reshape(-1, PAGE_SIZE, head_dim)

    def scales(self, part: Part, page: int, layer: int) -> np.ndarray:
        """A view, float32 `[kv_heads, PAGE_SIZE]`."""
        part = KEYS if self.layout.of_layer(layer).values_in_keys else part
        return self.array[layer, page, part][:, : self.layout.num_scale_items].view(np.float32)

    def with_unwritten(self, number: float) -> np.ndarray:
        """A copy of the array that has `number` where nothing was written; of int8 as the scale."""
        array = self.array.copy()
        numbers = array[..., : self.layout.num_scale_items].view(np.float32) if self.layout.has_scales else array
        numbers[np.isnan(numbers)] = number
        return array


def rounded(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 codes of rows `[..., head_dim]`, and float32 scales `[...]`."""
    largest = np.maximum(np.abs(rows).max(axis=-1), 1e-30).astype(np.float32)
    codes = np.rint(rows.astype(np.float32) * (np.float32(127) / largest)[..., None])
    return codes.astype(np.int8), largest * np.float32(1 / 127)
