"""Put pages that were read from disk into the tree, behind those that are there, as if they had been computed.

Knows prefixes and pages; not who waits for them, nor when they came.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..artifact.manifest import PAGE_SIZE
from ..cache.prefix_cache import PrefixCache
from ..errors import OutOfPages
from ..model.batch import PageIO, UInt8Array
from .disk_index import StoredPrefix


@dataclass(frozen=True)
class PageInserter:
    """Pages of a prefix into a cache's tree and pool: all that are given, or none."""

    cache: PrefixCache
    io: PageIO

    def num_there(self, prefix: StoredPrefix) -> int:
        """The first pages of a prefix that memory has."""
        num_tokens = len(prefix.heads) * PAGE_SIZE
        return len(self.cache.tree.find(prefix.namespace, prefix.token_ids[:num_tokens]).pages)

    def insert(self, prefix: StoredPrefix, start: int, pages: UInt8Array) -> bool:
        """Put pages `[start, start + len(pages))` of a prefix into the tree; False if those before are there no more,
        or there is no room.
        """
        stop = start + len(pages)
        num_tokens = stop * PAGE_SIZE
        token_ids = prefix.token_ids[: num_tokens + 1]
        match = self.cache.match(token_ids, num_match=num_tokens, namespace=prefix.namespace)
        sequence = self.cache.open(match, context_length=len(token_ids))
        try:
            first = sequence.num_computed // PAGE_SIZE
            if first < start or first == stop:  # or another request has computed them meanwhile
                return first == stop
            sequence.inherit_generated(prefix.generated[:num_tokens])
            with self.cache.begin() as step:
                reservation = step.reserve(sequence, num_tokens - sequence.num_computed)
                assert len(reservation.new_page_ids) == stop - first
                self.io.write_pages(reservation.new_page_ids, pages[first - start :])
                step.commit()
            return True
        except OutOfPages:
            return False
        finally:
            self.cache.close(sequence, keep=False)
