"""Load a prefix into memory, whole, if parts of it are requested often: then it is exact, and need not be read again.

Only while the disk is idle, and onto pages that are free, or that no request has used since parts of the prefix were
first requested; a quarter of the pool stays free or unused. Knows prefixes, pages and the reader; not requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from cachetools import LRUCache

from ...prefix.disk_index import StoredPrefix
from ...prefix.disk_reader import DiskReader, Read
from ...prefix.transfer import PageInserter

PROMOTE_AT: Final = 4  # requests that were served a part of it since it was last in memory
FREE_SHARE: Final = 0.25  # of all pages: stays free or evictable
PIECE_BYTES: Final = 4 << 20
MAX_COUNTED: Final = 1024  # prefixes


class _Wanted(NamedTuple):
    """A prefix to load whole, and when a part of it was first requested."""

    prefix: StoredPrefix
    since: float


@dataclass
class _Count:
    """The number of requests that were served a part of a prefix, and when the first was."""

    since: float
    num_uses: int = 0


@dataclass
class Promoter:
    """Loads prefixes whose parts are requested often: call `used` for each request, and `advance` on an idle disk.

    Args:
        idle: called when the disk may be idle.
        clock: the cache's.

    Attributes:
        num_promoted: prefixes that were loaded whole.
    """

    inserter: PageInserter
    reader: DiskReader
    idle: Callable[[], None]
    clock: Callable[[], float]
    num_promoted: int = 0
    _counts: LRUCache[bytes, _Count] = field(default_factory=lambda: LRUCache(MAX_COUNTED))  # by the last page's key
    _wanted: dict[bytes, _Wanted] = field(default_factory=dict)
    _is_reading: bool = False

    def used(self, prefix: StoredPrefix) -> None:
        """Count a request that was served a part of a prefix; after `PROMOTE_AT` of them the prefix is loaded."""
        key = prefix.page_keys[-1].key
        count = self._counts.setdefault(key, _Count(self.clock()))
        count.num_uses += 1
        if count.num_uses >= PROMOTE_AT:
            self._wanted.setdefault(key, _Wanted(prefix, count.since))

    def advance(self) -> None:
        """Start to read the next `PIECE_BYTES` of a wanted prefix from disk, if nothing is being read.

        Prefixes are given up if the rest of them does not fit into free or unused pages.
        """
        while self._wanted and not self._is_reading:
            key, (prefix, since) = next(iter(self._wanted.items()))
            start = self.inserter.num_there(prefix)
            left = len(prefix.page_keys) - start
            if left and self._has_room(left, since):
                piece = prefix.page_keys[start : start + max(1, PIECE_BYTES // self.reader.page_bytes)]
                self._is_reading = True
                self.reader.read_pages(piece, partial(self._insert_piece, key, prefix, start))
            else:
                self.num_promoted += not left
                self._stop_loading(key)

    def forget(self, namespace: bytes | None = None) -> None:
        """Stop loading prefixes of a namespace, or of all."""
        for key, (prefix, _) in list(self._wanted.items()):
            if namespace is None or prefix.namespace == namespace:
                self._stop_loading(key)

    def _has_room(self, num_pages: int, since: float) -> bool:
        """Return whether so many pages are free, or unused since the time `since`, besides `FREE_SHARE` of all."""
        pool, tree = self.inserter.cache.pool, self.inserter.cache.tree
        least = num_pages + FREE_SHARE * pool.num_pages
        return pool.num_free >= least or pool.num_free + tree.eviction.num_unused(since) >= least

    def _insert_piece(self, key: bytes, prefix: StoredPrefix, start: int, read: Read) -> None:
        """Insert pages that were read into the prefix cache; give the prefix up if they are invalid or do not fit."""
        self._is_reading = False
        wanted = self._wanted.get(key)
        if wanted is not None and wanted.prefix is prefix:
            is_in = read.pages is not None and read.num_right > 0
            is_in = is_in and self.inserter.insert(prefix, start, read.pages[: read.num_right])  # type: ignore[index]
            if not is_in or not read.is_right:
                self._stop_loading(key)
        self.idle()

    def _stop_loading(self, key: bytes) -> None:
        """Give a prefix up, or end its loading, and count its requests from 0 again."""
        self._wanted.pop(key, None)
        self._counts.pop(key, None)
