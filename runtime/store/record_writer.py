"""Write records to disk, and evict others if there are too many.

Knows the log and its index, for one thread. Records are written, then synced, then entered in the index, so everything
in the index is on disk.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from ..errors import StoreError
from .evictor import FULL_S, NO_SPACE, DiskRoom, Evictor
from .files import Buffer, Files
from .index import Index
from .index_rows import RecordLocation, RecordRow
from .page_key import NO_PARENT, StoreIdentity
from .record import BLOCK, BlockRange, Kind, RecordHeader, SingleRecord, padded
from .recovery import recover
from .segment import Segment
from .segment_log import SegmentLog
from .single_records import RecordKinds
from .store_state import PutResult, RecoveryReport

_LOGGER = logging.getLogger(__name__)
_MAX_SEGMENT_BYTES: Final = 256 << 20
_MIN_SEGMENTS: Final = 8  # of a full store, so that evicting one removes only a small part


@dataclass
class RecordWriter:
    """Changes the log and index of one store; owned by the thread that puts.

    Raises OSError and sqlite3.Error if the disk fails; it must not be used after that.
    """

    identity: StoreIdentity
    index: Index
    log: SegmentLog
    files: Files
    max_bytes: int
    recovery: RecoveryReport  # the repairs when the directory was opened
    room: DiskRoom
    _lowered_until: float | None = None  # until then `max_bytes` is the size at which the disk was full
    _use: int = field(init=False)  # counts changes instead of time, because clocks can go backwards

    def __post_init__(self) -> None:
        self._use = self.index.last_use()
        self.index.uses.find_unspread()
        self._asked_bytes = self.max_bytes
        self._evictor = Evictor(self.index, self.log, self.files)
        self.log.reopen()
        self._evictor.remove_empty(self._single_segments())

    @classmethod
    def open(
        cls, directory: Path, identity: StoreIdentity, files: Files, *, max_bytes: int, clock: Callable[[], float]
    ) -> RecordWriter:
        """Return the writer of a directory after recovery; see `PageStore.open`."""
        smallest = (Segment(1, identity).num_header_blocks + 1) * BLOCK + padded(identity.page_bytes)
        if max_bytes < smallest:
            raise StoreError(
                f"a store of {max_bytes} bytes holds no page, one takes {smallest} with its segment; raise --store-gb"
            )
        max_bytes = min(max_bytes, files.disk_bytes(directory)[0])  # the engine's memory grows with the pages that fit
        room = DiskRoom.of(directory, files)
        room.make_room_to_open()
        segment_bytes = max(smallest, min(_MAX_SEGMENT_BYTES, max_bytes // _MIN_SEGMENTS))
        new_log = partial(SegmentLog, directory, files, segment_bytes=segment_bytes, clock=clock)
        index, log, report = recover(directory, files, new_log, clock)
        return cls(identity, index, log, files, max_bytes, report, room)

    @property
    def num_segments(self) -> int:
        """Number of segments of all models."""
        return len(self.log.segments)

    def segments(self) -> set[int]:
        """Return the numbers of this model's segments."""
        return {number for number in list(self.log.segments) if self._is_ours(number)}

    def num_pages(self) -> int:
        """Return the number of this model's pages."""
        return sum(count for number, count in self.index.num_pages().items() if self._is_ours(number))

    def keep_reserve(self) -> PutResult:
        """Remove the oldest segments until the index can be changed. Call it before any other change of the index."""
        if self._lowered_until is not None and time.monotonic() >= self._lowered_until:
            self.max_bytes, self._lowered_until = self._asked_bytes, None
        made, missing = PutResult(), self.room.missing_bytes
        while missing > 0 and (victim := self._evictor.next_victim()) is not None:
            missing -= self.log.rows[victim].num_blocks * BLOCK
            _LOGGER.warning("the disk of %s is full: segment %d makes room", self.log.directory, victim)
            is_ours = self._is_ours(victim)
            made = made.then(
                self._summarize_removed(self._evictor.drop(victim, self._use), is_ours=is_ours, segments=(victim,))
            )
        return replace(made, num_evicted=made.num_removed)

    def put(
        self,
        records: Sequence[tuple[RecordHeader, Buffer]],
        touched: set[bytes],
        bad: set[bytes],
        *,
        evicts: bool = True,
    ) -> PutResult:
        """Store small records that are new and whose parents are stored; leave out those that do not fit.

        Without `evicts`, no other record is evicted to make room.
        """
        headers = [header for header, _ in records]
        before = self.settle(touched | _keys_to_find(headers), bad)
        num_blocks = max((header.num_blocks(len(payload)) for header, payload in records), default=1)
        made, chosen = self._make_room(headers, num_blocks, evicts)
        there = self.index.find([header.key for header in headers])
        rows = self._append_if_room([records[i] for i in chosen])
        with self.index.transaction():
            self.index.put(rows)
            self.index.put_segments(self.log.take_changed())
        new = {row.header.key for row in rows}
        stored = tuple(header.key for header in headers if header.key in new or header.key in there)
        num_new = sum(row.header.kind == Kind.PAGE for row in rows)
        both = before.then(made)
        gone = tuple(key for key in both.evicted if key not in new)
        return replace(both, stored=stored, evicted=gone, num_new=num_new, num_evicted=made.num_removed)

    def put_single(
        self, record: SingleRecord, pages: Sequence[bytes], touched: set[bytes], bad: set[bytes]
    ) -> PutResult:
        """Store a large record in a segment of its own, if all `pages` are stored.

        It replaces the record with its key, and those that it `replaces`. All large records take at most half of the
        store, and only the space that others leave. For a new one, only least recently used large ones are evicted. But
        for a state the oldest segments are evicted, too, because pages are worth little without it.
        """
        is_state = record.header.kind == Kind.STATE
        before = self.settle(touched | set(pages if is_state else ()), bad)  # its own page is not evicted for it
        if not self._has(pages):
            return before
        num_bytes = record.num_bytes + Segment(1, self.identity).num_header_blocks * BLOCK
        if is_state and self.log.num_single_bytes + num_bytes <= self.max_bytes // 2:
            before = before.then(self._make_room_for(num_bytes))
        others = self.log.num_bytes - self.log.num_single_bytes
        room = min(self.max_bytes // 2, self.max_bytes - others) - num_bytes
        if room < 0 or not self._has(pages) or not self.room.has_room_for(num_bytes):
            return before
        while self.log.num_single_bytes > room and (victim := self._evictor.next_single()) is not None:
            before = before.then(self._evict(victim))
        old = self.index.find([record.header.key]) | self._replaced_places(record, pages)
        try:
            row = self.log.append_single(self.identity, record, self._use)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            return before
        with self.index.transaction():
            self.index.remove(old)
            self.index.put([row])
            self.index.put_segments(self.log.take_changed())
        emptied = self._evictor.remove_empty(place.segment for place in old.values())
        lost = tuple(key for key in before.lost_states if not (is_state and key in pages))
        segments = (*before.segments_removed, *emptied)
        return replace(before, stored=tuple(pages), lost_states=lost, segments_removed=segments)

    def finish(self, touched: set[bytes], bad: set[bytes]) -> PutResult:
        """Settle the uses and bad records, and save all uses for the next process. Nothing is written after it."""
        result = self.settle(touched, bad)
        with self.index.transaction():
            self.index.uses.spread()
        return result

    def settle(self, touched: Collection[bytes], bad: Collection[bytes]) -> PutResult:
        """Record which records were used, and remove bad ones from the index."""
        self._use += 1
        with self.index.transaction():
            self.index.uses.touch(touched, self._use)
            removed = self.index.remove(bad)
        return self._summarize_removed(removed)

    def drop(self, keys: set[bytes], touched: set[bytes], bad: set[bytes]) -> PutResult:
        """Remove records and all below them, and overwrite them: nothing of them stays on disk."""
        leaving = self.index.below(keys | bad)  # before the index drops the bad ones
        places: dict[int, list[BlockRange]] = {}
        for record in leaving:
            places.setdefault(record.place.segment, []).append(record.place)
        there = places.keys() & self.log.segments.keys()
        for number in sorted(there, key=lambda number: self.log.segments[number].is_single):  # copies after their pages
            self.log.erase(number, places[number])
        return self._remove_erased(keys, touched, bad)

    def discard(self, namespace: bytes, touched: set[bytes], bad: set[bytes]) -> PutResult:
        """Remove a namespace with LoRA adapters within it, and overwrite its records, also those that the index no
        longer has.
        """
        before = self.settle(touched, bad)
        num_indexed, rows = self.index.num_blocks(), self.index.rows_of(namespace)
        places_by_segment: dict[int, list[BlockRange]] = {}
        for row in rows.values():
            if row is not None:
                places_by_segment.setdefault(row.place.segment, []).append(row.place)
        for number, segment in sorted(self.log.segments.items(), key=lambda item: item[1].is_single):
            if num_indexed.get(number, 0) + segment.num_header_blocks == self.log.rows[number].num_blocks:
                places = places_by_segment.get(number, [])
            else:
                places = self.log.places_of(number, namespace)
            if places:
                self.log.erase(number, places)
        return before.then(self._remove_erased(rows, (), ()))

    def collect(self, kinds: RecordKinds, touched: set[bytes], bad: set[bytes]) -> PutResult:
        """Copy the remaining records of segments that lost some to new segments, and remove the old ones.

        Records of `kinds` that another version of radixlm wrote are removed, because they are never found.
        """
        outdated = {
            key
            for kind, about in kinds.items()
            for key, row in self.index.rows_of_kind(kind).items()
            if row is not None and about.is_outdated(row.header)
        }
        result = self.settle(touched, bad | outdated)
        num_indexed, num_pages, moved = self.index.num_blocks(), self.index.num_pages(), 0
        wasteful = [
            number
            for number, segment in self.log.segments.items()
            if num_indexed.get(number, 0) + segment.num_header_blocks < self.log.rows[number].num_blocks
        ]
        for number in sorted(wasteful, key=lambda n: (self.log.segments[n].identity.digest, n)):
            is_ours = self._is_ours(number)
            gone = self._evictor.compact(number, self._use)
            moved += max(0, num_pages.get(number, 0) - sum(record.kind == Kind.PAGE for record in gone))
            result = result.then(self._summarize_removed(gone, is_ours=is_ours, segments=(number,)))
        return replace(result, num_moved=moved)

    def close(self) -> None:
        """Close files and index."""
        self.log.close()
        self.index.close()

    def _remove_erased(self, keys: Collection[bytes], touched: Collection[bytes], bad: Collection[bytes]) -> PutResult:
        """Remove records that were overwritten on disk from the index; return the effects."""
        before = self.settle(touched, bad)
        with self.index.transaction():
            removed = self.index.remove(keys)
        self.index.forget()
        return before.then(self._summarize_removed(removed))

    def _storable(self, headers: Sequence[RecordHeader]) -> list[int]:
        """Return the indices of those `headers` that are not stored yet and have a stored or preceding parent."""
        known, chosen = {NO_PARENT, *self.index.find(list(_keys_to_find(headers)))}, []
        for i, header in enumerate(headers):
            if header.key not in known and header.parent_key in known:
                known.add(header.key)
                chosen.append(i)
        return chosen

    def _append_if_room(self, records: Sequence[tuple[RecordHeader, Buffer]]) -> list[RecordRow]:
        """Append records to the log, and return their rows.

        If the disk is full, [] is returned, and `max_bytes` is lowered for a while.
        """
        try:
            return self.log.append(self.identity, records, self._use)
        except OSError as error:
            if error.errno not in NO_SPACE or self.log.num_bytes == 0:
                raise
            _LOGGER.warning(
                "the disk of %s is full: the store stays below %d bytes instead of %d for a while",
                *(self.log.directory, self.log.num_bytes, self.max_bytes),
            )
            self.max_bytes, self._lowered_until = self.log.num_bytes, time.monotonic() + FULL_S
            return []

    def _make_room(self, headers: Sequence[RecordHeader], num_blocks: int, evicts: bool) -> tuple[PutResult, list[int]]:
        """Evict segments, if allowed, until all new `headers` fit; return the evictions, and the headers that fit.

        Headers are returned as indices. Records that were stored when this began can be evicted. They are then among
        those to be written again.
        """
        made, chosen = PutResult(), self._storable(headers)
        while evicts and not self._fits(len(chosen), num_blocks) and (victim := self._evictor.next_victim()):
            made = made.then(self._evict(victim))
            chosen = self._storable(headers)
        if evicts and chosen and not self.log.segments and not self._fits(1, num_blocks):
            raise OSError(errno.ENOSPC, f"No space left on device: {self.room.reserve_bytes} bytes are to stay free")
        while not self._fits(len(chosen), num_blocks):
            chosen.pop()
        return made, chosen

    def _make_room_for(self, num_bytes: int) -> PutResult:
        """Evict the oldest segments until `num_bytes` bytes fit; return the effects."""
        made = PutResult()
        while not self._has_room_for(num_bytes) and (victim := self._evictor.next_victim()) is not None:
            made = made.then(self._evict(victim))
        return made

    def _evict(self, victim: int) -> PutResult:
        """Evict a segment to free its space; return the effects."""
        is_ours = self._is_ours(victim)
        gone = self._evictor.evict(victim, self._use)
        return self._summarize_removed(gone, is_ours=is_ours, segments=(victim,))

    def _has(self, keys: Sequence[bytes]) -> bool:
        """Return whether all of these records are stored."""
        return len(self.index.find(keys)) == len(set(keys))

    def _fits(self, num_records: int, num_blocks: int) -> bool:
        """Return whether so many records fit into the store, with so many blocks each; none always fit."""
        num_bytes = self.log.bytes_for(self.identity, num_records, num_blocks)
        return num_records == 0 or self._has_room_for(num_bytes)

    def _has_room_for(self, num_bytes: int) -> bool:
        """Return whether `num_bytes` more bytes fit into the store, and the disk keeps its reserve."""
        return self.log.num_bytes + num_bytes <= self.max_bytes and self.room.has_room_for(num_bytes)

    def _summarize_removed(
        self, records: Sequence[RecordLocation], *, is_ours: bool | None = None, segments: Sequence[int] = ()
    ) -> PutResult:
        """Return the effects of removing records, and remove segments of single records that are now empty.

        Other models' records are not counted.

        Args:
            is_ours: whether the records are this model's; None: look it up by their segments, which must still exist.
            segments: segments that were removed with the records.
        """
        ours = [each for each in records if (self._is_ours(each.place.segment) if is_ours is None else is_ours)]
        pages = tuple(each.key for each in ours if each.kind == Kind.PAGE)
        states = tuple(each.parent_key for each in ours if each.kind == Kind.STATE)
        numbers = {each.place.segment for each in records} & self.log.segments.keys()
        singles = [number for number in numbers if self.log.segments[number].is_single]
        removed = (*segments, *self._evictor.remove_empty(singles))
        return PutResult(evicted=pages, lost_states=states, num_removed=len(pages), segments_removed=removed)

    def _replaced_places(self, record: SingleRecord, pages: Sequence[bytes]) -> dict[bytes, BlockRange]:
        """Return, by key, the places of those records of `pages` that a new record of their kind replaces."""
        if record.replaces is None:
            return {}
        rows = self.index.rows_below(pages, record.header.kind)
        return {row.header.key: row.place for row in rows if record.replaces(row.header)}

    def _single_segments(self) -> set[int]:
        """Return the numbers of the segments that hold a single record."""
        return {number for number, segment in self.log.segments.items() if segment.is_single}

    def _is_ours(self, number: int) -> bool:
        """Return whether a segment exists and holds records of this model."""
        segment = self.log.segments.get(number)
        return segment is not None and segment.identity == self.identity


def _keys_to_find(headers: Sequence[RecordHeader]) -> set[bytes]:
    """Return the keys and the parents' keys of headers."""
    return {key for header in headers for key in (header.key, header.parent_key)}
