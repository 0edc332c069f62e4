"""Put pages on disk, and take the least used away when there are too many.

Knows the segments and their index, for one thread. Pages are written, then synced, then in the index: what the index
has is on disk. Room is made by whole segments, the oldest first: pages in it that were used since it was sealed are
copied to the newest, the others go, and with each all that come after it in its prompt.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .files import Files
from .index import Index, PageRow
from .page_head import NO_PARENT, PageHead, StoreIdentity
from .page_reader import PageReader
from .segment import Segment
from .segment_log import SegmentLog
from .store_stats import GCReport

_LOGGER = logging.getLogger(__name__)
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
_MOVE_BYTES: Final = 32 << 20  # at once


@dataclass(frozen=True)
class Written:
    """What became of the index; keys are of this writer's model."""

    stored: tuple[bytes, ...] = ()  # of what was to be written: what is there now
    removed: tuple[bytes, ...] = ()  # was taken out before that
    num_new: int = 0
    num_evicted: int = 0  # of the removed, for want of room
    segments_removed: tuple[int, ...] = ()


@dataclass
class PageWriter:
    """Raises OSError and sqlite3.Error where the disk fails; then it must not be used again."""

    identity: StoreIdentity
    index: Index
    log: SegmentLog
    files: Files
    max_bytes: int
    max_kept_share: float = 0.5  # of a segment's records that are copied when it is evicted: room is made in any case
    _use: int = field(init=False)  # counts what happens; clocks may go backwards

    def __post_init__(self) -> None:
        self._use = self.index.last_use()
        newest = max(self.log.segments, default=None)
        if newest is not None and self.log.rows[newest].sealed_at is None:
            self.log.reopen(newest)

    @property
    def num_bytes(self) -> int:
        """Of all segments."""
        return self.log.num_bytes

    @property
    def num_segments(self) -> int:
        """Of all models."""
        return len(self.log.segments)

    def segments(self) -> set[int]:
        """The numbers of this model's segments."""
        return {number for number in list(self.log.segments) if self._is_ours(number)}

    def num_pages(self) -> int:
        """Of this model."""
        return sum(count for number, count in self.index.num_pages().items() if self._is_ours(number))

    def put(
        self, heads: Sequence[PageHead], payload: NDArray[np.uint8], touched: set[bytes], bad: set[bytes]
    ) -> Written:
        """Store pages that are not there yet and whose parents are; those that do not fit are left out."""
        needed = {key for head in heads for key in (head.key, head.parent_key)}
        before = self.settle(touched | needed, bad)
        num_new = min(len(self._choose(heads)), Segment(1, self.identity).num_records(self.max_bytes))
        made = self._make_room(num_new)
        chosen = self._choose(heads)[:num_new]
        there = self.index.find([head.key for head in heads])
        rows = self._append([heads[i] for i in chosen], payload[chosen] if len(chosen) < len(heads) else payload)
        with self.index.transaction():
            self.index.put(rows)
            self._note_segments()
        new = {row.head.key for row in rows}
        stored = tuple(head.key for head in heads if head.key in new or head.key in there)
        return Written(stored, before.removed + made.removed, len(new), len(made.removed), made.segments_removed)

    def settle(self, touched: Iterable[bytes], bad: Iterable[bytes]) -> Written:
        """Note which pages were used, and take out those that are not right."""
        self._use += 1
        with self.index.transaction():
            self.index.touch(touched, self._use)
            removed = self.index.remove(bad)
        return Written(removed=tuple(removed))

    def drop(self, keys: set[bytes], touched: set[bytes], bad: set[bytes]) -> Written:
        """Take out pages and what comes after them, so that they are not even found in their segments."""
        before = self.settle(touched, bad)
        records: dict[int, list[int]] = {}
        for place in self.index.below(keys).values():
            records.setdefault(place.segment, []).append(place.number)
        for number in records.keys() & self.log.segments.keys():
            self.log.erase(number, records[number], payloads=False)
        with self.index.transaction():
            removed = tuple(self.index.remove(keys))
        return Written(removed=before.removed + removed)

    def discard(self, namespace: bytes, touched: set[bytes], bad: set[bytes]) -> Written:
        """Take out a namespace and overwrite its pages, those among them that the index forgot before."""
        before = self.settle(touched, bad)
        num_indexed = self.index.num_pages()
        pages = self.index.pages_of(namespace)
        for number, row in self.log.rows.items():
            if num_indexed.get(number, 0) == row.num_records:
                whole = (page for page in pages.values() if page is not None)
                records = [page.place.number for page in whole if page.place.segment == number]
            else:
                records = self.log.records_of(number, namespace)
            if records:
                self.log.erase(number, records, payloads=True)
        ours = [key for key, page in pages.items() if page is None or self._is_ours(page.place.segment)]
        with self.index.transaction():
            removed = set(self.index.remove(pages))
        self.index.forget()
        return Written(removed=before.removed + tuple(key for key in ours if key in removed))

    def collect(self, touched: set[bytes], bad: set[bytes]) -> tuple[Written, GCReport]:
        """Copy what is left of segments that lost pages to new ones, and remove them."""
        before, bytes_before = self.settle(touched, bad), self.log.num_bytes
        num_indexed, moved, segments = self.index.num_pages(), 0, list[int]()
        wasteful = [n for n, row in self.log.rows.items() if num_indexed.get(n, 0) < row.num_records]
        removed = before.removed
        for number in sorted(wasteful, key=lambda n: (self.log.segments[n].identity.digest, n)):
            if number == self.log.active:
                self.log.seal(self._use)
            pages = self.index.pages_in(number)
            retired = self._retire(number, pages, [page for page in pages.values() if page is not None])
            removed += retired.removed
            moved += len(self.index.find(list(pages)))
            segments.append(number)
        report = GCReport(len(segments), moved, bytes_before, self.log.num_bytes)
        return Written(removed=removed, segments_removed=tuple(segments)), report

    def close(self) -> None:
        """Close files and index."""
        self.log.close()
        self.index.close()

    def _choose(self, heads: Sequence[PageHead]) -> list[int]:
        """Which of `heads` are new, and can be found once they are there."""
        needed = {key for head in heads for key in (head.key, head.parent_key)}
        known, chosen = {NO_PARENT, *self.index.find(list(needed))}, []
        for i, head in enumerate(heads):
            if head.key not in known and head.parent_key in known:
                known.add(head.key)
                chosen.append(i)
        return chosen

    def _append(self, heads: Sequence[PageHead], payload: NDArray[np.uint8]) -> list[PageRow]:
        try:
            return self.log.append(self.identity, heads, payload, self._use)
        except OSError as error:
            if error.errno not in _NO_SPACE or self.log.num_bytes == 0:
                raise
            _LOGGER.warning(
                "the disk of %s is full: the store stays below %d bytes instead of %d from here on",
                *(self.log.directory, self.log.num_bytes, self.max_bytes),
            )
            self.max_bytes = self.log.num_bytes
            return []

    # Eviction.

    def _make_room(self, num_pages: int) -> Written:
        """Evict segments until so many pages fit."""
        made = Written()
        while self.log.segments and self.log.num_bytes + self.log.bytes_for(self.identity, num_pages) > self.max_bytes:
            evicted = self._evict(min(self.log.segments))
            made = replace(
                made,
                removed=made.removed + evicted.removed,
                segments_removed=made.segments_removed + evicted.segments_removed,
            )
        return made

    def _evict(self, number: int) -> Written:
        if number == self.log.active:
            self.log.seal(self._use - 1)
        pages, row = self.index.pages_in(number), self.log.rows[number]
        sealed_at = self._use - 1 if row.sealed_at is None else row.sealed_at
        whole = [page for page in pages.values() if page is not None]
        return self._retire(
            number, pages, list(kept_pages(whole, sealed_at, int(row.num_records * self.max_kept_share)))
        )

    def _retire(self, number: int, pages: Iterable[bytes], kept: Sequence[PageRow]) -> Written:
        """Remove a segment, with all pages in it but those that are copied to the newest."""
        is_ours = self._is_ours(number)
        try:
            moved = list(self._move(self.log.segments[number], kept))
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            moved = []
        with self.index.transaction():
            self.index.put(moved)
            removed = self.index.remove(set(pages) - {page.head.key for page in moved})
            self.log.doom(number)
            self._note_segments()
        self.log.remove(number)
        self.index.remove_segment(number)
        return Written(removed=tuple(removed) if is_ours else (), segments_removed=(number,))

    def _move(self, segment: Segment, pages: Sequence[PageRow]) -> Iterator[PageRow]:
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
                rows = self.log.append(
                    segment.identity, [page.head for page in some], payload[: read.num_read], self._use
                )
                yield from (replace(row, last_used=page.last_used) for row, page in zip(rows, some, strict=True))
                first += read.num_read + (read.miss is not None)
        finally:
            reader.close()

    def _note_segments(self) -> None:
        for row in self.log.take_changed():
            self.index.put_segment(row)

    def _is_ours(self, number: int) -> bool:
        segment = self.log.segments.get(number)
        return segment is not None and segment.identity == self.identity


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
