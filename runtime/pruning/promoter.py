"""Bring a prefix that is often asked for in part into memory, whole: then it is exact, and need not be read again.

Only while the disk has nothing else to read, and onto free pages alone, of which a quarter stays free. Knows prefixes,
pages and the reader; not requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from cachetools import LRUCache

from ..prefix.disk_index import StoredPrefix
from ..prefix.disk_reader import DiskReader, Read
from ..prefix.transfer import PageInserter

PROMOTE_AT: Final = 4  # requests that were served a part of it since it was last in memory
FREE_SHARE: Final = 0.25  # of all pages
PIECE_BYTES: Final = 4 << 20
MAX_COUNTED: Final = 1024  # prefixes


@dataclass
class Promoter:
    """Call `used` for each request that is served in part, and `advance` while the disk is idle.

    Args:
        idle: called when the disk may have nothing to read.

    Attributes:
        num_promoted: prefixes that came to memory whole.
    """

    inserter: PageInserter
    reader: DiskReader
    idle: Callable[[], None]
    num_promoted: int = 0
    _counts: LRUCache[bytes, int] = field(default_factory=lambda: LRUCache(MAX_COUNTED))  # by the last page's key
    _wanted: dict[bytes, StoredPrefix] = field(default_factory=dict)
    _is_reading: bool = False

    def used(self, prefix: StoredPrefix) -> None:
        """A request was served a part of a prefix."""
        key = prefix.heads[-1].key
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._counts[key] >= PROMOTE_AT:
            self._wanted.setdefault(key, prefix)

    def advance(self) -> None:
        """Read the next piece of a prefix, if there is room for all of it."""
        while self._wanted and not self._is_reading:
            key, prefix = next(iter(self._wanted.items()))
            start, pool = self.inserter.num_there(prefix), self.inserter.cache.pool
            left = len(prefix.heads) - start
            if left and pool.num_free - left >= FREE_SHARE * pool.num_pages:
                piece = prefix.heads[start : start + max(1, PIECE_BYTES // self.reader.page_bytes)]
                self._is_reading = True
                self.reader.read_pages(piece, partial(self._arrived, key, prefix, start))
            else:
                self.num_promoted += not left
                self._drop(key)

    def forget(self, namespace: bytes | None = None) -> None:
        """Bring nothing of a namespace, or nothing at all."""
        for key, prefix in list(self._wanted.items()):
            if namespace is None or prefix.namespace == namespace:
                self._drop(key)

    def _arrived(self, key: bytes, prefix: StoredPrefix, start: int, read: Read) -> None:
        self._is_reading = False
        if self._wanted.get(key) is prefix:
            is_in = read.pages is not None and read.num_right > 0
            is_in = is_in and self.inserter.insert(prefix, start, read.pages[: read.num_right])  # type: ignore[index]
            if not is_in or not read.is_right:
                self._drop(key)
        self.idle()

    def _drop(self, key: bytes) -> None:
        """Count anew."""
        self._wanted.pop(key, None)
        self._counts.pop(key, None)
