"""A KV pool as the kernels lay it out, and the same rows as plain arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from radixlm.runtime.manifest import PAGE_SIZE, KVDType, KVLayout

DTYPES: dict[KVDType, type[np.floating]] = {"f16": np.float16, "f32": np.float32}


def layout_of(dtype: KVDType, num_layers: int, num_kv_heads: int, head_dim: int) -> KVLayout:
    return KVLayout(
        dtype=dtype, page_size=PAGE_SIZE, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim
    )


@dataclass
class Pool:
    """`[layers, pages, 2, kv_heads, PAGE_SIZE * head_dim]`, every row NaN until it is written."""

    layout: KVLayout
    num_pages: int

    def __post_init__(self) -> None:
        shape = self.layout
        self.array = np.full(
            (shape.num_layers, self.num_pages, 2, shape.num_kv_heads, PAGE_SIZE * shape.head_dim),
            np.nan,
            DTYPES[shape.dtype],
        )

    def keys(self, page: int, layer: int = 0) -> np.ndarray:
        """A view `[kv_heads, PAGE_SIZE, head_dim]`."""
        return self.array[layer, page, 0].reshape(-1, self.layout.head_dim, PAGE_SIZE).swapaxes(1, 2)

    def values(self, page: int, layer: int = 0) -> np.ndarray:
        """A view `[kv_heads, PAGE_SIZE, head_dim]`."""
        return self.array[layer, page, 1].reshape(-1, PAGE_SIZE, self.layout.head_dim)
