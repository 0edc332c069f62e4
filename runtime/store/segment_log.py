"""The log of a store: appends records to the newest segment, and removes whole segments.

A large record gets a segment of its own. Knows files and their sizes; the index knows which records in them are used.
For one thread at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ..cache.cache_namespace import is_within
from .files import Buffer, Files, write_all
from .index_rows import RecordRow, SegmentRow
from .page_key import StoreIdentity
from .record import (
    BLOCK,
    CHECKSUM_BYTES,
    BlockRange,
    Kind,
    Record,
    RecordHeader,
    SingleRecord,
    checksum,
    discarded,
    padded,
)
from .segment import Segment

_MAX_ZEROS: Final = 1 << 24  # bytes written at once


class SegmentLog:
    """The segments of a directory.

    `rows` has the index row of each segment; `take_changed` returns those that the index does not have yet.

    >>> log = SegmentLog(Path("store"), OSFiles(), segment_bytes=1 << 28)  # doctest: +SKIP

    Args:
        segment_bytes: a new segment is begun when the newest has this size.
        clock: seconds since 1970; shown to people, and never compared.

    Attributes:
        num_bytes: size of all segments.
        num_single_bytes: size of the segments with a single record.
    """

    def __init__(
        self, directory: Path, files: Files, *, segment_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.directory = directory
        self.segments: dict[int, Segment] = {}
        self.rows: dict[int, SegmentRow] = {}
        self.num_bytes = self.num_single_bytes = 0
        self._files = files
        self._segment_blocks = segment_bytes // BLOCK
        self._clock = clock
        self._active: tuple[Segment, int] | None = None  # with its descriptor
        self._changed: set[int] = set()
        self._next_number = 1  # never reused: a reader can still have an old file open

    @property
    def active(self) -> int | None:
        """Number of the segment that is appended to; None if there is none."""
        return None if self._active is None else self._active[0].number

    @property
    def oldest(self) -> int | None:
        """Number of the oldest segment with many records; None if there is none."""
        return min((number for number, segment in self.segments.items() if not segment.is_single), default=None)

    def adopt(self, segment: Segment, row: SegmentRow) -> None:
        """Add an existing segment."""
        self.segments[segment.number] = segment
        self.rows[segment.number] = row
        self._changed.add(segment.number)
        self._next_number = max(self._next_number, segment.number + 1)
        self._count_blocks(segment, row.num_blocks)

    def reopen(self) -> None:
        """Continue to append to the segment that was not full; cut off anything after its last record."""
        for number, row in self.rows.items():
            if not row.is_sealed:
                segment = self.segments[number]
                fd = self._files.open(self.directory / segment.name)
                self._active = segment, fd
                self._files.truncate(fd, row.num_blocks * BLOCK)

    def take_changed(self) -> list[SegmentRow]:
        """Return the rows that changed since the last call."""
        rows = [self.rows[number] for number in sorted(self._changed)]
        self._changed.clear()
        return rows

    def append(
        self, identity: StoreIdentity, records: Sequence[tuple[RecordHeader, Buffer]], use: int
    ) -> list[RecordRow]:
        """Write records and their payloads one after the other. They survive a power loss when this returns.

        Args:
            use: the count of uses for the records, and for segments that are sealed.

        Raises:
            OSError: the rest was not written. The records before it can exist, but the index does not know them.
        """
        rows: list[RecordRow] = []
        while len(rows) < len(records):
            sizes = [header.num_blocks(len(payload)) for header, payload in records[len(rows) :]]
            segment, fd = self._segment_for(identity, sizes[0], use)
            block, places = self.rows[segment.number].num_blocks, list[BlockRange]()
            for size in sizes:
                if places and block + size > self._segment_blocks:
                    break
                places.append(BlockRange(segment.number, block, size))
                block += size
            some = records[len(rows) : len(rows) + len(places)]
            self._write_records(segment, fd, some, places)
            self._set_row(replace(self.rows[segment.number], num_blocks=block))
            self._count_blocks(segment, block - places[0].block)
            rows += [RecordRow(header, place, use) for (header, _), place in zip(some, places, strict=True)]
        return rows

    def append_single(self, identity: StoreIdentity, new: SingleRecord, use: int) -> RecordRow:
        """Write a large record to a segment of its own. It survives a power loss when this returns.

        Its header is written last: a record with a valid header is complete.

        Raises:
            OSError: nothing of it exists.
        """
        segment = Segment(self._next_number, identity, is_single=True)
        self._next_number += 1
        fd = segment.create(self._files, self.directory)
        first, no_checksum = segment.num_header_blocks, bytes(CHECKSUM_BYTES)
        record = Record(new.header, segment.number, first, identity.digest, new.payload_bytes, no_checksum)
        try:
            offset = first * BLOCK + new.header.num_bytes
            for part in new.body_of(segment.number):
                offset += write_all(self._files, fd, part, offset)
            self._files.fdatasync(fd)
            write_all(self._files, fd, [record.encode()], first * BLOCK)
            self._files.fdatasync(fd)
            self._files.drop_cache(fd, 0, offset)
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.unlink(self.directory / segment.name)
            raise
        finally:
            self._files.close(fd)
        self.adopt(segment, SegmentRow(segment.number, record.place.stop, use, False, self._clock()))
        return RecordRow(new.header, record.place, use)

    def bytes_for(self, identity: StoreIdentity, num_records: int, num_blocks: int) -> int:
        """Return the most bytes that the log grows by when this many records of this many blocks are appended."""
        num_header_blocks = Segment(1, identity).num_header_blocks
        num_segments = -(-num_records // max(1, (self._segment_blocks - num_header_blocks) // num_blocks))
        return (num_records * num_blocks + num_segments * num_header_blocks) * BLOCK

    def seal(self, use: int) -> None:
        """Stop appending to the newest segment, if one is open; `use`, the count of uses, is its time of sealing."""
        if self._active is not None:
            segment = self._active[0]
            self.close()
            self._set_row(replace(self.rows[segment.number], sealed_at=use))

    def places_of(self, number: int, namespace: bytes) -> list[BlockRange]:
        """Return the places of the records of a namespace and of LoRA adapters within it in a segment, also of those
        that the index does not know.
        """
        segment = self.segments[number]
        fd = self._files.open(self.directory / segment.name)
        try:
            records = segment.scan(self._files, fd, segment.num_header_blocks, payloads=False)
            found = [record for record in records if record is not None and record.header.kind != Kind.DISCARDED]
            return [record.place for record in found if is_within(record.header.namespace, namespace)]
        finally:
            self._files.close(fd)

    def erase(self, number: int, places: Iterable[BlockRange]) -> None:
        """Overwrite records with empty discarded records and zeros."""
        segment = self.segments[number]
        try:
            fd = self._files.open(self.directory / segment.name)
        except FileNotFoundError:
            return
        try:
            for place in places:
                header, end = discarded(place, segment.identity.digest).encode(), place.stop * BLOCK
                for offset in range(place.offset, end, _MAX_ZEROS):
                    zeros = bytes(min(_MAX_ZEROS, end - offset) - len(header))
                    write_all(self._files, fd, [header, zeros], offset)
                    header = b""
            self._files.fdatasync(fd)
        finally:
            self._files.close(fd)

    def doom(self, number: int) -> None:
        """Record in the segment's row that it will be removed, so that recovery does so after a crash."""
        self._set_row(replace(self.rows[number], is_doomed=True))

    def remove(self, number: int) -> None:
        """Remove a segment's file, which can be gone already; readers that have it open can continue."""
        segment, row = self.segments.pop(number), self.rows.pop(number)
        self._changed.discard(number)
        self._count_blocks(segment, -row.num_blocks)
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(self.directory / segment.name)

    def close(self) -> None:
        """Close the descriptor; the newest segment stays open for appending later."""
        if self._active is not None:
            fd = self._active[1]
            self._active = None
            self._files.close(fd)

    def _segment_for(self, identity: StoreIdentity, num_blocks: int, use: int) -> tuple[Segment, int]:
        """Return the segment to append a record to, and its file descriptor.

        It is the active one if that has this identity and room for `num_blocks` blocks; else a new one, of any size.
        """
        if self._active is not None:
            segment, fd = self._active
            has_room = self.rows[segment.number].num_blocks + num_blocks <= self._segment_blocks
            if segment.identity == identity and has_room:
                return segment, fd
            self.seal(use)
        segment = Segment(self._next_number, identity)
        fd = segment.create(self._files, self.directory)
        self._active = segment, fd
        self.adopt(segment, SegmentRow(segment.number, segment.num_header_blocks, None, False, self._clock()))
        return segment, fd

    def _write_records(
        self, segment: Segment, fd: int, records: Sequence[tuple[RecordHeader, Buffer]], places: Sequence[BlockRange]
    ) -> None:
        """Write records to their places, and wait until they survive a power loss. Cuts them off again on an error."""
        buffers: list[Buffer] = []
        for (header, payload), place in zip(records, places, strict=True):
            num_bytes, digest = len(payload), segment.identity.digest
            record = Record(header, place.segment, place.block, digest, num_bytes, checksum(payload))
            buffers += [record.encode(), payload, bytes(padded(num_bytes) - num_bytes)]
        start = places[0].offset
        try:
            write_all(self._files, fd, buffers, start)
            self._files.fdatasync(fd)
        except OSError:
            with contextlib.suppress(OSError):
                self._files.truncate(fd, start)
            raise
        self._files.drop_cache(fd, start, places[-1].stop * BLOCK - start)

    def _set_row(self, row: SegmentRow) -> None:
        """Replace the row of a segment, and remember it for `take_changed`."""
        self.rows[row.number] = row
        self._changed.add(row.number)

    def _count_blocks(self, segment: Segment, num_blocks: int) -> None:
        """Add blocks of a segment to the sizes of the log; a negative number is subtracted."""
        self.num_bytes += num_blocks * BLOCK
        self.num_single_bytes += num_blocks * BLOCK * segment.is_single
