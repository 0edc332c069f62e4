"""Cases of moving KV: the rows of a partial page into another one, whole pages out of the pool and into it.

Pages of the pool come from memory, different ones for each call; the other buffer stays in caches, like data that was
just read from a file, or will be written to one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from radixlm.compile.kernels.kv_pool import copy_rows, move_pages
from radixlm.runtime.artifact.manifest import KVLayout

from ..native import aligned
from .case import Case, Work
from .linear import COLD_BYTES
from .rows import KV_DTYPES, layout_of

NUM_MOVED = (1, 8)


def page_cases(cold_bytes: int = COLD_BYTES) -> Iterator[Case]:
    """Yield copies, reads and writes of so many pages for each KV dtype; `cold_bytes` is the size of the pool."""
    pool = aligned(np.zeros(cold_bytes, np.uint8))
    for dtype in KV_DTYPES:
        layout = layout_of(dtype)
        yield from _copies(layout, pool)
        for into_pool in (False, True):
            yield from _moves(layout, pool, into_pool)


def _copies(layout: KVLayout, pool: np.ndarray) -> Iterator[Case]:
    """Yield copies of all rows of each page but the last."""
    num_pages, tokens = pool.nbytes // layout.page_bytes, layout.page_size - 1
    sources, destinations = _pages(num_pages)[: num_pages // 2], _pages(num_pages)[::-1]
    for count in NUM_MOVED:
        yield Case(
            f"copy_rows {layout.dtype}",
            lambda: copy_rows(layout),
            f"{count} pages",
            (
                pool[: num_pages * layout.page_bytes],
                sources,
                aligned(destinations),
                aligned(np.full(count, tokens, np.int32)),
                num_pages,
                count,
            ),
            Work(2.0 * count * layout.page_bytes * tokens / layout.page_size),
            (0, count, count, 0, 0, 0),
            num_pages // 2 // count,
        )


def _moves(layout: KVLayout, pool: np.ndarray, into_pool: bool) -> Iterator[Case]:
    num_pages = pool.nbytes // layout.page_bytes
    for count in NUM_MOVED:
        yield Case(
            f"{'write' if into_pool else 'read'}_pages {layout.dtype}",
            lambda: move_pages(layout, into_pool=into_pool),
            f"{count} pages",
            (
                pool[: num_pages * layout.page_bytes],
                _pages(num_pages),
                aligned(np.zeros(count * layout.page_bytes, np.uint8)),
                num_pages,
                count,
            ),
            Work(2.0 * count * layout.page_bytes),
            (0, count, 0, 0, 0),
            num_pages // count,
        )


def _pages(num_pages: int) -> np.ndarray:
    """Return all pages, scattered."""
    return aligned(np.random.default_rng(0).permutation(num_pages).astype(np.int32))
