"""Find the longest run of tokens whose KV is in pages, for live and finished sequences alike.

Knows token ids, page ids, and when each run was used last. Not what a token means, nor who shares a page: the pool
counts that.
"""

from __future__ import annotations

from .page_pool import PagePool


class RadixTree:
    """Runs of tokens by prefix, one root a namespace."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool

    def evict(self, num_pages: int) -> None:
        """Free `num_pages` pages, the least recently used leaf's last page first."""
        raise NotImplementedError
