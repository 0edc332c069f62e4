"""A KV pool as the kernels lay it out, and the same rows as plain arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVDType, KVLayout

DTYPES: dict[KVDType, type[np.generic]] = {"f16": np.float16, "f32": np.float32, "int8": np.int8}
Part = Literal[0, 1]
KEYS: Part = 0
VALUES: Part = 1
PARTS = (KEYS, VALUES)


def layout_of(dtype: KVDType, num_layers: int, num_kv_heads: int, head_dim: int) -> KVLayout:
    return KVLayout.uniform(dtype, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)


@dataclass
class Pool:
    """`[layers, pages, 2, kv_heads, items]`, every row NaN until it is written."""

    layout: KVLayout
    num_pages: int

    def __post_init__(self) -> None:
        layout, dtype = self.layout, DTYPES[self.layout.dtype]
        shape = (layout.num_layers, self.num_pages, 2, layout.num_kv_heads, layout.head_items)
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
        start, head_dim = self.layout.num_scale_items, self.layout.head_dim
        items = self.array[layer, page, part][:, start : start + PAGE_SIZE * head_dim]
        if part == KEYS:
            return items.reshape(-1, head_dim, PAGE_SIZE).swapaxes(1, 2)
        return items.reshape(-1, PAGE_SIZE, head_dim)

    def scales(self, part: Part, page: int, layer: int) -> np.ndarray:
        """A view, float32 `[kv_heads, PAGE_SIZE]`."""
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
