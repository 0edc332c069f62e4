"""Take whole segments away, the oldest first, and keep of them what was used since they were sealed.

Knows the segments and their index, for one thread. Pages that stay are copied to the newest segment; the others go, and
with each all that come after it in its prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from .files import Files
from .index import Index
from .index_rows import PageRow
from .page_reader import PageReader
from .segment import Segment
from .segment_log import NO_SPACE, SegmentLog

_MOVE_BYTES: Final = 32 << 20  # at once


@dataclass(frozen=True)
class Evictor:
    """Raises OSError and sqlite3.Error where the disk fails; then it must not be used again."""

    index: Index
    log: SegmentLog
    files: Files
    max_kept_share: float = 0.5  # of a segment's records that are copied when it is evicted: room is made in any case

    def evict(self, number: int, use: int) -> tuple[bytes, ...]:
        """Remove a segment for the room that it takes; the keys of pages that are there no more."""
        if number == self.log.active:
            self.log.seal(use - 1)
        pages, row = self.index.pages_in(number), self.log.rows[number]
        sealed_at = use - 1 if row.sealed_at is None else row.sealed_at
        whole = [page for page in pages.values() if page is not None]
        kept = kept_pages(whole, sealed_at, int(row.num_records * self.max_kept_share))
        return self._retire(number, pages, list(kept), use)

    def compact(self, number: int, use: int) -> tuple[bytes, ...]:
        """Remove a segment and keep all pages of it that are right; the keys of the others."""
        if number == self.log.active:
            self.log.seal(use)
        pages = self.index.pages_in(number)
        return self._retire(number, pages, [page for page in pages.values() if page is not None], use)

    def _retire(self, number: int, pages: Iterable[bytes], kept: Sequence[PageRow], use: int) -> tuple[bytes, ...]:
        """Remove a segment, with all pages in it but those that are copied to the newest."""
        try:
            moved = list(self._move(self.log.segments[number], kept, use))
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            moved = []
        with self.index.transaction():
            self.index.put(moved)
            removed = self.index.remove(set(pages) - {page.head.key for page in moved})
            self.log.doom(number)
            self.index.put_segments(self.log.take_changed())
        self.log.remove(number)
        self.index.remove_segment(number)
        return tuple(removed)

    def _move(self, segment: Segment, pages: Sequence[PageRow], use: int) -> Iterator[PageRow]:
        """Copy pages to the newest segment, but for those that are not right; where they are now."""
        reader = PageReader(self.log.directory, self.files, segment.identity)
        num_pages = max(1, min(len(pages), _MOVE_BYTES // segment.record_bytes))
        payload = np.empty((num_pages, segment.identity.page_bytes), np.uint8)
        first = 0
        try:
            while first < len(pages):
                some = pages[first : first + num_pages]
                read = reader.read([page.head for page in some], [page.place for page in some], payload)
                some = some[: read.num_read]
                rows = self.log.append(segment.identity, [page.head for page in some], payload[: read.num_read], use)
                yield from (replace(row, last_used=page.last_used) for row, page in zip(rows, some, strict=True))
                first += read.num_read + (read.miss is not None)
        finally:
            reader.close()


def kept_pages(pages: Sequence[PageRow], sealed_at: int, max_pages: int) -> Iterator[PageRow]:
    """The pages of a segment to keep: used since it was sealed, the latest first if they are too many, and none
    without its parent. They come in the order in which they lie.

    Args:
        pages: in the order in which they lie, parents before children.
    """
    last_used = {page.head.key: page.last_used for page in pages}
    for page in reversed(pages):
        parent = page.head.parent_key
        if parent in last_used:
            last_used[parent] = max(last_used[parent], last_used[page.head.key])
    wanted = [page.head.key for page in pages if last_used[page.head.key] > sealed_at]
    wanted.sort(key=lambda key: -last_used[key])  # stable: of equals the parents first
    kept = set(wanted[:max_pages])
    return (page for page in pages if page.head.key in kept)
