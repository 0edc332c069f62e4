"""Put pages on disk, and take the least used away when there are too many.

Knows the segments and their index, for one thread. Pages are written, then synced, then in the index: what the index
has is on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from .evictor import Evictor
from .files import Files
from .index import Index
from .index_rows import PageRow
from .page_key import NO_PARENT, PageKey, StoreIdentity
from .record import Place
from .segment_log import NO_SPACE, SegmentLog
from .store_state import GCReport, PutResult

_LOGGER = logging.getLogger(__name__)


@dataclass
class PageWriter:
    """Raises OSError and sqlite3.Error where the disk fails; then it must not be used again."""

    identity: StoreIdentity
    index: Index
    log: SegmentLog
    files: Files
    max_bytes: int
    bytes_beside: Callable[[], int] = lambda: 0  # what else takes of them: copies of pages
    shrink_beside: Callable[[int], None] = lambda max_bytes: None  # have that take no more than so many
    _use: int = field(init=False)  # counts what happens; clocks may go backwards

    def __post_init__(self) -> None:
        self._use = self.index.last_use()
        self._evictor = Evictor(self.index, self.log, self.files)
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
        self,
        heads: Sequence[PageKey],
        payload: NDArray[np.uint8],
        touched: set[bytes],
        bad: set[bytes],
        *,
        evicts: bool = True,
    ) -> PutResult:
        """Store pages that are not there yet and whose parents are; those that do not fit are left out, without
        `evicts` as soon as others would have to go for them."""
        needed = {key for head in heads for key in (head.key, head.parent_key)}
        before = self.settle(touched | needed, bad)
        made, chosen = self._make_room(heads, evicts)
        there = self.index.find([head.key for head in heads])
        if chosen:  # mostly the end of a prompt whose beginning is there: then no bytes are copied
            first, end = chosen[0], chosen[-1] + 1
            payload = payload[first:end] if len(chosen) == end - first else payload[chosen]
        rows = self._append([heads[i] for i in chosen], payload)
        with self.index.transaction():
            self.index.put(rows)
            self.index.put_segments(self.log.take_changed())
        new = {row.head.key for row in rows}
        stored = tuple(head.key for head in heads if head.key in new or head.key in there)
        there_now = set(stored)
        removed = before.evicted + made.evicted
        return replace(
            made,
            stored=stored,
            evicted=tuple(key for key in removed if key not in there_now),
            num_new=len(new),
            num_removed=len(removed),
        )

    def are_there(self, keys: Sequence[bytes]) -> bool:
        """Whether all these pages are."""
        return len(self.index.find(keys)) == len(set(keys))

    def settle(self, touched: Iterable[bytes], bad: Iterable[bytes]) -> PutResult:
        """Note which pages were used, and take out those that are not right."""
        self._use += 1
        with self.index.transaction():
            self.index.touch(touched, self._use)
            removed = self.index.remove(bad)
        return _removed(self._ours(removed))

    def drop(self, keys: set[bytes], touched: set[bytes], bad: set[bytes]) -> PutResult:
        """Take out pages and what comes after them, and overwrite them: nothing of them is left on disk."""
        records: dict[int, list[int]] = {}
        for place in self.index.below(keys | bad).values():  # before the index forgets what is bad
            records.setdefault(place.segment, []).append(place.number)
        for number in records.keys() & self.log.segments.keys():
            self.log.erase(number, records[number])
        before = self.settle(touched, bad)
        with self.index.transaction():
            removed = self.index.remove(keys)
        self.index.forget()
        return _removed(before.evicted + self._ours(removed))

    def discard(self, namespace: bytes, touched: set[bytes], bad: set[bytes]) -> PutResult:
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
                self.log.erase(number, records)
        with self.index.transaction():
            removed = self.index.remove(pages)
        self.index.forget()
        return _removed(before.evicted + self._ours(removed))

    def collect(self, touched: set[bytes], bad: set[bytes]) -> tuple[PutResult, GCReport]:
        """Copy what is left of segments that lost pages to new ones, and remove them."""
        before, bytes_before = self.settle(touched, bad), self.log.num_bytes
        num_indexed, moved, segments = self.index.num_pages(), 0, list[int]()
        wasteful = [n for n, row in self.log.rows.items() if num_indexed.get(n, 0) < row.num_records]
        removed = before.evicted
        for number in sorted(wasteful, key=lambda n: (self.log.segments[n].identity.digest, n)):
            is_ours, num_pages = self._is_ours(number), num_indexed.get(number, 0)
            gone = self._evictor.compact(number, self._use)
            removed += gone if is_ours else ()
            moved += max(0, num_pages - len(gone))
            segments.append(number)
        report = GCReport(len(segments), moved, bytes_before, self.log.num_bytes)
        return _removed(removed, segments), report

    def close(self) -> None:
        """Close files and index."""
        self.log.close()
        self.index.close()

    def _choose(self, heads: Sequence[PageKey]) -> list[int]:
        """Which of `heads` are new, and can be found once they are there."""
        needed = {key for head in heads for key in (head.key, head.parent_key)}
        known, chosen = {NO_PARENT, *self.index.find(list(needed))}, []
        for i, head in enumerate(heads):
            if head.key not in known and head.parent_key in known:
                known.add(head.key)
                chosen.append(i)
        return chosen

    def _append(self, heads: Sequence[PageKey], payload: NDArray[np.uint8]) -> list[PageRow]:
        try:
            return self.log.append(self.identity, heads, payload, self._use)
        except OSError as error:
            if error.errno not in NO_SPACE or self.log.num_bytes == 0:
                raise
            _LOGGER.warning(
                "the disk of %s is full: the store stays below %d bytes instead of %d from here on",
                *(self.log.directory, self.log.num_bytes + self.bytes_beside(), self.max_bytes),
            )
            self.max_bytes = self.log.num_bytes + self.bytes_beside()
            return []

    def _make_room(self, heads: Sequence[PageKey], evicts: bool) -> tuple[PutResult, list[int]]:
        """Evict segments, if it may, until those of `heads` fit that are not there, or all that can; and which those
        are then.

        Copies of pages go before any page does. Pages that were there when it began may have had to go, and are among
        those that are to be written again.
        """
        removed, segments, chosen = list[bytes](), list[int](), self._choose(heads)
        if evicts and not self._fits(len(chosen)):
            self.shrink_beside(self.max_bytes - self.num_bytes - self.log.bytes_for(self.identity, len(chosen)))
        while evicts and self.log.segments and not self._fits(len(chosen)):
            removed += self._evict_oldest(segments)
            chosen = self._choose(heads)
        while not self._fits(len(chosen)):
            chosen.pop()
        return replace(_removed(removed, segments), num_evicted=len(removed)), chosen

    def _evict_oldest(self, segments: list[int]) -> Sequence[bytes]:
        """Evict a segment and note it; this model's pages that went."""
        segments.append(min(self.log.segments))
        is_ours = self._is_ours(segments[-1])
        evicted = self._evictor.evict(segments[-1], self._use)
        return evicted if is_ours else ()

    def _fits(self, num_pages: int) -> bool:
        num_bytes = self.log.bytes_for(self.identity, num_pages) + self.bytes_beside()
        return self.log.num_bytes + num_bytes <= self.max_bytes or num_pages == 0

    def _ours(self, pages: Mapping[bytes, Place]) -> tuple[bytes, ...]:
        """The keys of this model's pages."""
        return tuple(key for key, place in pages.items() if self._is_ours(place.segment))

    def _is_ours(self, number: int) -> bool:
        segment = self.log.segments.get(number)
        return segment is not None and segment.identity == self.identity


def _removed(keys: Sequence[bytes], segments: Sequence[int] = ()) -> PutResult:
    return PutResult(evicted=tuple(keys), num_removed=len(keys), segments_removed=tuple(segments))
