"""Read pages back, and believe nothing: each must be the one that was asked for, and whole.

Knows places, headers and checksums. Counts what was wrong by kind; what becomes of a page that was, others decide.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .directory import INDEX
from .files import Buffer, Files, read_all
from .index import Index
from .page_key import PageKey, StoreIdentity
from .record import BLOCK, MissKind, Place, RecordHeader, checksum, padded
from .segment import Segment, extents

_READ_BYTES: Final = 32 << 20  # at once: far more than a disk needs to be fast, and soon enough checked


@dataclass
class ReadResult:
    """How many of the first pages are right, why the next one is not, and what it took."""

    num_read: int = 0
    miss: MissKind | None = None
    num_bytes: int = 0  # asked of the disk, whole records


@dataclass
class PageReader:
    """Reads records of one identity; keeps the files open that it reads from. For one thread at a time."""

    directory: Path
    files: Files
    identity: StoreIdentity
    _fds: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._num_padding = padded(self.identity.page_bytes) - self.identity.page_bytes
        self._record_bytes = BLOCK + self.identity.page_bytes + self._num_padding
        self._max_records = max(1, _READ_BYTES // self._record_bytes)
        self._headers = np.empty((self._max_records, BLOCK), np.uint8)
        self._padding = memoryview(bytearray(self._num_padding))

    def read(self, heads: Sequence[PageKey], places: Sequence[Place], out: NDArray[np.uint8]) -> ReadResult:
        """Fill `out` with pages up to the first that is not right.

        Args:
            places: of the first pages of `heads`, perhaps not of all.
            out: `[at least len(heads), page_bytes]`, rows contiguous; rows behind the last right one are rubbish.

        Raises:
            OSError: the disk failed.
        """
        result = ReadResult()
        for some in extents(places, self._max_records):
            self._read_extent(heads[some.start : some.stop], places[some.start], out[some.start : some.stop], result)
            if result.miss is not None:
                return result
        if len(places) < len(heads):
            result.miss = "absent"
        return result

    def forget(self, segment: int) -> None:
        """Close the file of a segment that is no more."""
        fd = self._fds.pop(segment, None)
        if fd is not None:
            self.files.close(fd)

    def close(self) -> None:
        """Close all files."""
        for segment in list(self._fds):
            self.forget(segment)

    def _read_extent(self, heads: Sequence[PageKey], first: Place, out: NDArray[np.uint8], result: ReadResult) -> None:
        segment = Segment(first.segment, self.identity)
        try:
            fd = self._fd(segment)
        except FileNotFoundError:
            result.miss = "gone"
            return
        buffers: list[Buffer] = []
        for header, row in zip(self._headers, out, strict=False):
            buffers += [header.data, row.data, self._padding]
        offset, wanted = segment.offset(first.number), len(heads) * self._record_bytes
        got = read_all(self.files, fd, buffers, offset)
        result.num_bytes += got
        self.files.drop_cache(fd, offset, wanted)
        for i, head in enumerate(heads):
            if got < (i + 1) * self._record_bytes:
                result.miss = "short"
            else:
                place = Place(first.segment, first.number + i)
                result.miss = self._wrong(self._headers[i].data, out[i].data, head, place)
            if result.miss is not None:
                return
            result.num_read += 1

    def _wrong(self, block: Buffer, payload: Buffer, head: PageKey, place: Place) -> MissKind | None:
        header = RecordHeader.decode(block)
        if header is None:
            return "header"
        unlike = header.unlike(self.identity.digest, head, place)
        if unlike is not None:
            return unlike
        return None if checksum(payload) == header.payload_checksum else "payload"

    def _fd(self, segment: Segment) -> int:
        fd = self._fds.get(segment.number)
        if fd is None:
            fd = self._fds[segment.number] = self.files.open(self.directory / segment.name)
        return fd


@dataclass(frozen=True)
class ChainRead:
    """How many of the first pages are right, and why the next one is not."""

    num_read: int
    num_bytes: int  # asked of the disk
    miss: MissKind | None
    bad_key: bytes | None  # of a page that is in the index, and wrong


class ChainReader:
    """Raises OSError and sqlite3.Error where the disk fails."""

    def __init__(self, directory: Path, files: Files, identity: StoreIdentity) -> None:
        self._index = Index.open_to_read(directory / INDEX)
        self._pages = PageReader(directory, files, identity)

    def read(self, heads: Sequence[PageKey], out: NDArray[np.uint8], bad: Set[bytes]) -> ChainRead:
        """Fill `out` with pages up to the first that cannot be had.

        Args:
            bad: keys that the index still has and must not have.
        """
        num_read, num_bytes, places = 0, 0, self._places(heads, bad)
        while True:
            result = self._pages.read(heads[num_read:], places, out[num_read:])
            num_read, num_bytes = num_read + result.num_read, num_bytes + result.num_bytes
            if result.miss is None or result.miss == "absent":
                return ChainRead(num_read, num_bytes, result.miss, None)
            was = places[result.num_read]
            places = self._places(heads[num_read:], bad)
            if not places:  # evicted or discarded while we read
                return ChainRead(num_read, num_bytes, "gone", None)
            if places[0] == was:  # not moved: the page itself is wrong
                return ChainRead(num_read, num_bytes, result.miss, heads[num_read].key)

    def forget(self, segments: Sequence[int]) -> None:
        """Close the files of segments that are no more."""
        for segment in segments:
            self._pages.forget(segment)

    def close(self) -> None:
        """Close files and index."""
        self._pages.close()
        self._index.close()

    def _places(self, heads: Sequence[PageKey], bad: Set[bytes]) -> list[Place]:
        """Where the first of `heads` lie, up to one that is not there."""
        found = self._index.find([head.key for head in heads])
        places = (None if head.key in bad else found.get(head.key) for head in heads)
        return [place for place in takewhile(lambda place: place is not None, places) if place is not None]
