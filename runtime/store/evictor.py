"""Keep a store below its size: the reserve of free disk space, and eviction of segments and single records.

Knows directories, the log and the index, for one thread. Records that were used since their segment was sealed are
copied to the newest segment. The others are removed with all records below them. The index itself needs free disk space
to change.
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
from .index_rows import RecordLocation, RecordRow
from .page_reader import PageReader
from .record import Kind, RecordHeader
from .segment import Segment, segment_paths
from .segment_log import SegmentLog

_LOGGER = logging.getLogger(__name__)

NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)  # errno of an OSError: the disk is full, but works
# SQLite calls the second a "disk I/O error": the shared-memory file for its readers could not grow.
_INDEX_IS_FULL: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
FULL_S: Final = 60.0  # seconds until a disk that was full is tried again
_LEAST, _MOST = 16 << 20, 1 << 30  # bytes of the reserve
_SHARE, _MOST_SHARE = 20, 4  # the reserve is 1/20 of the disk, and never more than 1/4


def is_full(error: Exception) -> bool:
    """Return whether an error only means that the disk is full."""
    if isinstance(error, OSError):
        return error.errno in NO_SPACE
    return getattr(error, "sqlite_errorcode", None) in _INDEX_IS_FULL


@dataclass(frozen=True)
class DiskRoom:
    """The free space of a directory's disk, and the reserve that the store leaves free.

    Attributes:
        reserve_bytes: left free by records. The index needs a quarter of it, because evicting changes the index.
    """

    directory: Path
    files: Files
    reserve_bytes: int

    @classmethod
    def of(cls, directory: Path, files: Files) -> DiskRoom:
        """Return the room of a directory. The reserve is 1/20 of its disk, from 16 MiB to 1 GiB."""
        total, _ = files.disk_bytes(directory)
        return cls(directory, files, min(max(total // _SHARE, _LEAST), _MOST, total // _MOST_SHARE))

    @property
    def free_bytes(self) -> int:
        """Free bytes of the disk for this user."""
        return self.files.disk_bytes(self.directory)[1]

    @property
    def missing_bytes(self) -> int:
        """Bytes that must be freed before the index can be changed; 0 if none."""
        return max(0, self.reserve_bytes // 4 - self.free_bytes)

    def has_room_for(self, num_bytes: int) -> bool:
        """Return whether `num_bytes` more bytes leave the reserve free."""
        return self.free_bytes - num_bytes >= self.reserve_bytes

    def make_room_to_open(self) -> None:
        """Remove the oldest segments until the index can be opened; recovery then removes their records from it."""
        for path in segment_paths(self.directory).values():
            if not self.missing_bytes:
                return
            _LOGGER.warning("the disk of %s is full: %s makes room", self.directory, path.name)
            self.files.unlink(path)


_MAX_KEPT_SHARE: Final = 0.5  # the most of an evicted segment's blocks that is copied, so that eviction frees space
_MOVE_BYTES: Final = 32 << 20  # copied at once
_SINGLE_KINDS: Final = (Kind.RUN, Kind.STATE, Kind.SCORES)  # records with a segment of their own


@dataclass(frozen=True)
class Evictor:
    """Removes segments of one store to free disk space.

    Raises OSError and sqlite3.Error if the disk fails; it must not be used after that.
    """

    index: Index
    log: SegmentLog
    files: Files

    def next_victim(self) -> int | None:
        """Return the segment to evict next; None if there is none.

        It is the segment of the least recently used run, else the oldest. States go with their pages, which are worth
        little without them.
        """
        return self.log.oldest if (single := self.next_single((Kind.RUN,))) is None else single

    def next_single(self, kinds: Sequence[Kind] = (Kind.RUN, Kind.STATE)) -> int | None:
        """Return the segment of the least recently used record of these kinds.

        Segments whose record is not in the index come first. Scores are small, and stay as long as their pages.
        """
        singles = {number for number, segment in self.log.segments.items() if segment.is_single}
        if not singles:
            return None
        rows = [row for row in self.index.rows_at(sorted(singles)) if row.header.kind in _SINGLE_KINDS]
        going = [row for row in rows if row.header.kind in kinds]
        first = min(going, key=lambda row: (row.last_used, row.place.segment), default=None)
        known = {row.place.segment for row in rows}
        return min(singles - known, default=None if first is None else first.place.segment)

    def evict(self, number: int, use: int) -> list[RecordLocation]:
        """Remove a segment, but keep records used since it was sealed; return the places of the others.

        `use` is the current count of uses.
        """
        if number == self.log.active:
            self.log.seal(use - 1)
        with self.index.transaction():
            self.index.uses.spread()
        rows, segment = self.index.rows_in(number), self.log.rows[number]
        sealed_at = use - 1 if segment.sealed_at is None else segment.sealed_at
        whole = [row for row in rows.values() if row is not None]
        num_blocks = segment.num_blocks - self.log.segments[number].num_header_blocks
        kept = kept_rows(whole, sealed_at, int(num_blocks * _MAX_KEPT_SHARE))
        return self._remove_records(number, rows, list(kept), use)

    def drop(self, number: int, use: int) -> list[RecordLocation]:
        """Remove a segment, its file first, so that the index has space to change; return the places of its records.

        `use` is the current count of uses.
        """
        if number == self.log.active:
            self.log.seal(use)
        with contextlib.suppress(FileNotFoundError):
            self.files.unlink(self.log.directory / self.log.segments[number].name)
        return self._remove_records(number, self.index.rows_in(number), [], use)

    def compact(self, number: int, use: int) -> list[RecordLocation]:
        """Remove a segment, but keep all its valid records; return the places of the others.

        `use` is the current count of uses.
        """
        if number == self.log.active:
            self.log.seal(use)
        rows = self.index.rows_in(number)
        return self._remove_records(number, rows, [row for row in rows.values() if row is not None], use)

    def remove_empty(self, numbers: Iterable[int]) -> list[int]:
        """Remove those of these segments that have no record left, except the active one; return their numbers."""
        there = set(numbers) & self.log.segments.keys() - {self.log.active}
        empty = self.index.are_empty(sorted(there))
        for number in empty:
            self._remove_segment(number)
        return empty

    def _remove_records(
        self, number: int, keys: Iterable[bytes], kept: Sequence[RecordRow], use: int
    ) -> list[RecordLocation]:
        """Remove a segment with the records `keys`, except the `kept` ones, which are copied to the newest segment.

        Returns the lost records: also kept ones that are damaged, or that a full disk has no room for. A single record
        is never copied.
        """
        segment = self.log.segments[number]
        try:
            moved = [] if segment.is_single else list(self._copy_valid(segment, kept, use))
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            moved = []
        with self.index.transaction():
            self.index.put(moved)
            removed = self.index.remove(set(keys) - {row.header.key for row in moved})
            self.log.doom(number)
            self.index.put_segments(self.log.take_changed())
        self._remove_segment(number)
        return removed

    def _remove_segment(self, number: int) -> None:
        """Remove a segment's file and its row in the index."""
        self.log.remove(number)
        self.index.remove_segment(number)

    def _copy_valid(self, segment: Segment, rows: Sequence[RecordRow], use: int) -> Iterator[RecordRow]:
        """Copy records that are valid to the newest segment; yield their new rows."""
        pages = [row for row in rows if row.header.kind == Kind.PAGE]
        others = [row for row in rows if row.header.kind != Kind.PAGE]  # these have no payload
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
                yield from self._append_moved(segment, records, some, use)
                first += read.num_read + (read.miss is not None)
        finally:
            reader.close()
        yield from self._append_moved(segment, [(row.header, memoryview(b"")) for row in others], others, use)

    def _append_moved(
        self, segment: Segment, records: Sequence[tuple[RecordHeader, memoryview]], rows: Sequence[RecordRow], use: int
    ) -> Iterator[RecordRow]:
        """Append records that were read from `segment` to the newest segment; return their new rows.

        `rows` are their old rows, whose time of last use they keep. `use` is the current count of uses.
        """
        moved = self.log.append(segment.identity, records, use)
        return (replace(new, last_used=old.last_used) for new, old in zip(moved, rows, strict=True))


def kept_rows(rows: Sequence[RecordRow], sealed_at: int, max_blocks: int) -> Iterator[RecordRow]:
    """Yield the records of a segment to keep: those used since it was sealed, and their parents.

    If they have more than `max_blocks` blocks, the most recently used are kept. They come in the order of `rows`.

    Args:
        rows: in the order of the file, parents before children.
    """
    last_used = {row.header.key: row.last_used for row in rows}
    for row in reversed(rows):
        parent = row.header.parent_key
        if parent in last_used:
            last_used[parent] = max(last_used[parent], last_used[row.header.key])
    wanted = [row for row in rows if last_used[row.header.key] > sealed_at]
    wanted.sort(key=lambda row: -last_used[row.header.key])  # stable: among equals the parents come first
    kept, num_blocks = set[bytes](), 0
    for row in wanted:
        num_blocks += row.place.num_blocks
        if num_blocks > max_blocks:
            break
        kept.add(row.header.key)
    return (row for row in rows if row.header.key in kept)
