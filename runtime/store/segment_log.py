"""The segments of a directory: pages are appended to the newest, and whole segments are removed.

Knows files and how full they are; which pages in them are wanted, the index knows. Used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .files import Buffer, Files, write_all
from .index_rows import PageRow, SegmentRow
from .page_key import PageKey, StoreIdentity
from .record import BLOCK, KIND_PAGE, Place, RecordHeader, checksum, discarded, padded
from .segment import Segment

NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)  # of an OSError: the disk is full, and otherwise well


class SegmentLog:
    """`rows` says of each segment what the index is to know of it; `take_changed` which ones it does not know yet.

    >>> log = SegmentLog(Path("store"), OSFiles(), segment_bytes=1 << 28)  # doctest: +SKIP

    Args:
        segment_bytes: a new segment is begun when the newest has that many.
        clock: seconds since 1970; shown to people, and never compared.
    """

    def __init__(
        self, directory: Path, files: Files, *, segment_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.directory = directory
        self.segments: dict[int, Segment] = {}
        self.rows: dict[int, SegmentRow] = {}
        self._files = files
        self._segment_bytes = segment_bytes
        self._clock = clock
        self._active: tuple[Segment, int] | None = None  # with its descriptor
        self._changed: set[int] = set()
        self._next_number = 1  # never one that was used before: a reader may still have that file open
        self.num_bytes = 0

    @property
    def active(self) -> int | None:
        """The number of the segment that pages are appended to."""
        return None if self._active is None else self._active[0].number

    def adopt(self, segment: Segment, row: SegmentRow) -> None:
        """Take a segment that is there already."""
        self.segments[segment.number] = segment
        self.rows[segment.number] = row
        self._changed.add(segment.number)
        self._next_number = max(self._next_number, segment.number + 1)
        self.num_bytes += segment.offset(row.num_records)

    def reopen(self, number: int) -> None:
        """Go on appending to a segment, behind its last record; what the file has there is cut off."""
        segment = self.segments[number]
        fd = self._files.open(self.directory / segment.name)
        self._active = segment, fd
        self._files.truncate(fd, segment.offset(self.rows[number].num_records))

    def take_changed(self) -> list[SegmentRow]:
        """The rows that changed since the last call."""
        rows = [self.rows[number] for number in sorted(self._changed)]
        self._changed.clear()
        return rows

    def append(
        self, identity: StoreIdentity, heads: Sequence[PageKey], payload: NDArray[np.uint8], use: int
    ) -> list[PageRow]:
        """Write pages one behind the other; they outlive a loss of power when this returns.

        Args:
            payload: `[len(heads), page_bytes]`.
            use: the count of uses that the pages get, and the segments that are sealed.

        Raises:
            OSError: the rest is not there; pages before it may be, but nobody will find them.
        """
        rows: list[PageRow] = []
        while len(rows) < len(heads):
            segment, fd, room = self._room(identity, use)
            some = slice(len(rows), min(len(heads), len(rows) + room))
            first = self.rows[segment.number].num_records
            places = [Place(segment.number, first + i) for i in range(some.stop - some.start)]
            self._write(segment, fd, heads[some], payload[some], places)
            self._grow(segment, len(places))
            rows += [PageRow(head, place, use) for head, place in zip(heads[some], places, strict=True)]
        return rows

    def bytes_for(self, identity: StoreIdentity, num_pages: int) -> int:
        """How much the segments grow at most by so many pages."""
        segment = Segment(1, identity)
        num_segments = -(-num_pages // max(1, segment.num_records(self._segment_bytes)))
        return num_pages * segment.record_bytes + num_segments * segment.header_bytes

    def seal(self, use: int) -> None:
        """Append no more to the newest segment."""
        if self._active is not None:
            segment, fd = self._active
            self._active = None
            self._files.close(fd)
            self._change(replace(self.rows[segment.number], sealed_at=use))

    def records_of(self, number: int, namespace: bytes) -> list[int]:
        """Which records of a segment are pages of a namespace, whether anybody knows of them or not."""
        segment = self.segments[number]
        fd = self._files.open(self.directory / segment.name)
        try:
            headers = segment.scan(self._files, fd, 0, payloads=False)
            pages = (header for header in headers if header is not None and header.kind == KIND_PAGE)
            return [header.place.number for header in pages if header.head.namespace == namespace]
        finally:
            self._files.close(fd)

    def erase(self, number: int, records: Iterable[int]) -> None:
        """Put headers on records that say only that they were discarded, and zeros over keys and values."""
        segment = self.segments[number]
        nothing = bytes(segment.record_bytes - BLOCK)
        fd = self._files.open(self.directory / segment.name)
        try:
            for record in records:
                header = discarded(Place(number, record), segment.identity.page_bytes, segment.identity.digest)
                write_all(self._files, fd, [header.encode(), nothing], segment.offset(record))
            self._files.fdatasync(fd)
        finally:
            self._files.close(fd)

    def doom(self, number: int) -> None:
        """Say that a segment will be removed."""
        self._change(replace(self.rows[number], is_doomed=True))

    def remove(self, number: int) -> None:
        """Remove a segment's file; there may be none any more."""
        segment, row = self.segments.pop(number), self.rows.pop(number)
        self._changed.discard(number)
        self.num_bytes -= segment.offset(row.num_records)
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(self.directory / segment.name)

    def close(self) -> None:
        """End the descriptor; the newest segment stays one to append to."""
        if self._active is not None:
            fd = self._active[1]
            self._active = None
            self._files.close(fd)

    def _room(self, identity: StoreIdentity, use: int) -> tuple[Segment, int, int]:
        """A segment of the identity, its descriptor, and how many records it may get."""
        if self._active is not None:
            segment, fd = self._active
            num_bytes = segment.offset(self.rows[segment.number].num_records)
            room = (self._segment_bytes - num_bytes) // segment.record_bytes
            if segment.identity == identity and room > 0:
                return segment, fd, room
            self.seal(use)
        segment = Segment(self._next_number, identity)
        fd = segment.create(self._files, self.directory)
        self._active = segment, fd
        self.adopt(segment, SegmentRow(segment.number, 0, None, False, self._clock()))
        return segment, fd, max(1, (self._segment_bytes - segment.header_bytes) // segment.record_bytes)

    def _write(
        self,
        segment: Segment,
        fd: int,
        heads: Sequence[PageKey],
        payload: NDArray[np.uint8],
        places: Sequence[Place],
    ) -> None:
        page_bytes, digest = segment.identity.page_bytes, segment.identity.digest
        padding = bytes(padded(page_bytes) - page_bytes)
        buffers: list[Buffer] = []
        for head, row, place in zip(heads, payload, places, strict=True):
            header = RecordHeader(KIND_PAGE, place, page_bytes, digest, head, checksum(row.data))
            buffers += [header.encode(), row.data, padding]
        start, num_bytes = segment.offset(places[0].number), len(places) * segment.record_bytes
        try:
            write_all(self._files, fd, buffers, start)
            self._files.fdatasync(fd)
        except OSError:
            with contextlib.suppress(OSError):
                self._files.truncate(fd, start)
            raise
        self._files.drop_cache(fd, start, num_bytes)

    def _grow(self, segment: Segment, num_records: int) -> None:
        row = self.rows[segment.number]
        self._change(replace(row, num_records=row.num_records + num_records))
        self.num_bytes += num_records * segment.record_bytes

    def _change(self, row: SegmentRow) -> None:
        self.rows[row.number] = row
        self._changed.add(row.number)
