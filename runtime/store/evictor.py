"""Make room: what of a disk a store leaves free, and whole segments that go, single records by their last use first.

Knows directories, the log and the index, for one thread. Records that were used since their segment was sealed are
copied to the newest one; the others go, and all below them. The index needs some of the disk to change anything.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from .files import Files
from .index import Index
from .index_rows import Located, RecordRow
from .page_reader import PageReader
from .record import Kind, RecordHeader
from .segment import Segment, segment_paths
from .segment_log import SegmentLog

_LOGGER = logging.getLogger(__name__)

NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)  # of an OSError: the disk is full, and otherwise well
# SQLite calls the second a "disk I/O error": the memory that it shares with its readers, a file, could not grow.
_INDEX_IS_FULL: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
FULL_S: Final = 60.0  # until something is tried again on a disk that was full
_LEAST, _MOST = 16 << 20, 1 << 30  # bytes of the reserve
_SHARE, _MOST_SHARE = 20, 4  # parts of the disk: one is the reserve; one is the most that it may be


def is_full(error: Exception) -> bool:
    """Return whether an error says that the disk is full, and nothing worse."""
    if isinstance(error, OSError):
        return error.errno in NO_SPACE
    return getattr(error, "sqlite_errorcode", None) in _INDEX_IS_FULL


@dataclass(frozen=True)
class DiskRoom:
    """The free bytes of a directory's disk, and how many of them the store does not take.

    Attributes:
        reserve_bytes: what records leave free. A quarter of it is for the index, which makes room by changing.
    """

    directory: Path
    files: Files
    reserve_bytes: int

    @classmethod
    def of(cls, directory: Path, files: Files) -> DiskRoom:
        """Return the room of a directory: a twentieth of its disk is the reserve, from 16 MiB to 1 GiB."""
        total, _ = files.disk_bytes(directory)
        return cls(directory, files, min(max(total // _SHARE, _LEAST), _MOST, total // _MOST_SHARE))

    @property
    def free_bytes(self) -> int:
        """What the disk has left for this user."""
        return self.files.disk_bytes(self.directory)[1]

    @property
    def missing_bytes(self) -> int:
        """What has to become free before the index can be changed; 0: nothing."""
        return max(0, self.reserve_bytes // 4 - self.free_bytes)

    def has_room_for(self, num_bytes: int) -> bool:
        """Return whether so many more bytes leave the reserve free."""
        return self.free_bytes - num_bytes >= self.reserve_bytes

    def make_room_to_open(self) -> None:
        """Remove the oldest segments until the index can be opened; recovery takes their records out of it."""
        for path in segment_paths(self.directory).values():
            if not self.missing_bytes:
                return
            _LOGGER.warning("the disk of %s is full: %s makes room", self.directory, path.name)
            self.files.unlink(path)


_MAX_KEPT_SHARE: Final = 0.5  # of a segment's blocks that are copied when it is evicted: room is made in any case
_MOVE_BYTES: Final = 32 << 20  # at once
_SINGLE_KINDS: Final = (Kind.RUN, Kind.STATE, Kind.SCORES)  # of records with a segment of their own


@dataclass(frozen=True)
class Evictor:
    """Raises OSError and sqlite3.Error where the disk fails; then it must not be used again."""

    index: Index
    log: SegmentLog
    files: Files

    def next_victim(self) -> int | None:
        """The segment that goes first: the least recently used run, then the oldest; None: there is none.

        States go with their pages: without them these are worth little.
        """
        return self.log.oldest if (single := self.next_single((Kind.RUN,))) is None else single

    def next_single(self, kinds: Sequence[Kind] = (Kind.RUN, Kind.STATE)) -> int | None:
        """That of the least recently used record of these kinds; before it those whose record the index does not have.

        Scores are small, and stay as long as their pages.
        """
        singles = {number for number, segment in self.log.segments.items() if segment.is_single}
        if not singles:
            return None
        rows = [row for row in self.index.rows_at(sorted(singles)) if row.header.kind in _SINGLE_KINDS]
        going = [row for row in rows if row.header.kind in kinds]
        first = min(going, key=lambda row: (row.last_used, row.place.segment), default=None)
        known = {row.place.segment for row in rows}
        return min(singles - known, default=None if first is None else first.place.segment)

    def evict(self, number: int, use: int) -> list[Located]:
        """Remove a segment for the room that it takes; the records that are gone."""
        if number == self.log.active:
            self.log.seal(use - 1)
        with self.index.transaction():
            self.index.uses.spread()
        rows, segment = self.index.rows_in(number), self.log.rows[number]
        sealed_at = use - 1 if segment.sealed_at is None else segment.sealed_at
        whole = [row for row in rows.values() if row is not None]
        num_blocks = segment.num_blocks - self.log.segments[number].num_header_blocks
        kept = kept_rows(whole, sealed_at, int(num_blocks * _MAX_KEPT_SHARE))
        return self._retire(number, rows, list(kept), use)

    def drop(self, number: int, use: int) -> list[Located]:
        """Remove a segment whose file goes first, so that the index has room to change; the records that are gone."""
        if number == self.log.active:
            self.log.seal(use)
        with contextlib.suppress(FileNotFoundError):
            self.files.unlink(self.log.directory / self.log.segments[number].name)
        return self._retire(number, self.index.rows_in(number), [], use)

    def compact(self, number: int, use: int) -> list[Located]:
        """Remove a segment and keep all records of it that are right; the others are gone."""
        if number == self.log.active:
            self.log.seal(use)
        rows = self.index.rows_in(number)
        return self._retire(number, rows, [row for row in rows.values() if row is not None], use)

    def remove_empty(self, numbers: Iterable[int]) -> list[int]:
        """Remove those of these segments that have no record left, but for the one that is appended to; which."""
        there = set(numbers) & self.log.segments.keys() - {self.log.active}
        empty = self.index.are_empty(sorted(there))
        for number in empty:
            self._remove(number)
        return empty

    def _retire(self, number: int, keys: Iterable[bytes], kept: Sequence[RecordRow], use: int) -> list[Located]:
        """Remove a segment, with all records in it but those that are copied to the newest; a single one is not."""
        segment = self.log.segments[number]
        try:
            moved = [] if segment.is_single else list(self._move(segment, kept, use))
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            moved = []
        with self.index.transaction():
            self.index.put(moved)
            removed = self.index.remove(set(keys) - {row.header.key for row in moved})
            self.log.doom(number)
            self.index.put_segments(self.log.take_changed())
        self._remove(number)
        return removed

    def _remove(self, number: int) -> None:
        self.log.remove(number)
        self.index.remove_segment(number)

    def _move(self, segment: Segment, rows: Sequence[RecordRow], use: int) -> Iterator[RecordRow]:
        """Copy records to the newest segment, but for those that are not right; where they are now."""
        pages = [row for row in rows if row.header.kind == Kind.PAGE]
        others = [row for row in rows if row.header.kind != Kind.PAGE]  # without a payload
        reader = PageReader(self.log.directory, self.files, segment.identity)
        page_bytes = segment.identity.page_bytes
        payload = np.empty((max(1, min(len(pages), _MOVE_BYTES // page_bytes)), page_bytes), np.uint8)
        first = 0
        try:
            while first < len(pages):
                some = pages[first : first + len(payload)]
                read = reader.read([row.header.page for row in some], [row.place for row in some], payload)
                some = some[: read.num_read]
                records = [(row.header, out.data) for row, out in zip(some, payload, strict=False)]
                yield from self._append(segment, records, some, use)
                first += read.num_read + (read.miss is not None)
        finally:
            reader.close()
        yield from self._append(segment, [(row.header, memoryview(b"")) for row in others], others, use)

    def _append(
        self, segment: Segment, records: Sequence[tuple[RecordHeader, memoryview]], rows: Sequence[RecordRow], use: int
    ) -> Iterator[RecordRow]:
        moved = self.log.append(segment.identity, records, use)
        return (replace(new, last_used=old.last_used) for new, old in zip(moved, rows, strict=True))


def kept_rows(rows: Sequence[RecordRow], sealed_at: int, max_blocks: int) -> Iterator[RecordRow]:
    """The records of a segment to keep: used since it was sealed, the latest first if they are too many, and none
    without its parent. They come in the order in which they lie.

    Args:
        rows: in the order in which they lie, parents before children.
    """
    last_used = {row.header.key: row.last_used for row in rows}
    for row in reversed(rows):
        parent = row.header.parent_key
        if parent in last_used:
            last_used[parent] = max(last_used[parent], last_used[row.header.key])
    wanted = [row for row in rows if last_used[row.header.key] > sealed_at]
    wanted.sort(key=lambda row: -last_used[row.header.key])  # stable: of equals the parents first
    kept, num_blocks = set[bytes](), 0
    for row in wanted:
        num_blocks += row.place.num_blocks
        if num_blocks > max_blocks:
            break
        kept.add(row.header.key)
    return (row for row in rows if row.header.key in kept)
