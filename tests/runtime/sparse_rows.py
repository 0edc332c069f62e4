"""Rows of a sparse span as if a disk had given them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.cache.sparse_span import SparseSpan
from radixlm.runtime.model.batch import PageIO, UInt8Array
from radixlm.runtime.prefix.loaded_prefix import LoadedRows


class NoPages:
    """A pool whose pages have no content."""

    def read_pages(self, page_ids: Sequence[int], out: UInt8Array) -> None:
        raise AssertionError("nothing is to be read")

    def write_pages(self, page_ids: Sequence[int], pages: UInt8Array) -> None:
        assert len(page_ids) == len(pages)


def loaded_rows(
    prompt_ids: Sequence[int], span: SparseSpan, io: PageIO | None = None, page: bytes = b"\0"
) -> LoadedRows:
    """The rows of a span of a prompt of which neither memory nor disk has anything; all in pages that hold `page`."""
    pages = np.tile(np.frombuffer(page, np.uint8), (-(-span.num_rows // PAGE_SIZE), 1))
    return LoadedRows(PrefixCache(PagePool(1)).match(prompt_ids), span, pages, io or NoPages(), 0.1)
