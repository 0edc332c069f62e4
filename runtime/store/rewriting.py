"""Write pages that are stored in the order of importance, too: in the background, beside whoever uses the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .catalogue import StoredPages
from .ordered_run import OrderedRun
from .page_key import PageKey
from .page_store import PageStore
from .store_state import PutResult


def rewrite(
    store: PageStore,
    heads: Sequence[PageKey],
    scores: NDArray[Any],
    *,
    chunk_size: int = 16,
    probe_head: int = 0,
) -> PutResult:
    """Read a run of exact pages and store it ordered by `scores`, `[layers, kv_heads, 16 len(heads)]`.

    Nothing is stored if one of the pages is not there, or not right. By the thread that puts; reads go on meanwhile.

    Raises:
        StoreError: the scores are not of those pages.
        OSError, sqlite3.Error: the disk failed.
    """
    pages = np.empty((len(heads), store.identity.page_bytes), np.uint8)
    if StoredPages(store.directory, store.identity, store.files).read(heads, pages) < len(heads):
        return PutResult((), ())
    run = OrderedRun.of_pages(store.kv, pages, scores, probe_head=probe_head)
    return store.put_ordered(heads, run, chunk_size=chunk_size)
