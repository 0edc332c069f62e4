"""Read pages and verify each: it must be the requested page, and undamaged.

Knows the index, places, headers and checksums. Reports the kind of damage; the caller decides what to do with the page.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .files import INDEX, Buffer, Files, read_all
from .index import Index
from .page_key import PageKey, StoreIdentity
from .record import BLOCK, BlockRange, MissKind, Record, RecordHeader, checksum, padded
from .segment import Segment, extents

_READ_BYTES: Final = 32 << 20  # at once: more than a disk needs for full speed, and few enough to verify quickly
_TOKENS_BYTES: Final = 64  # first bytes of a page's details, which are compared


@dataclass
class ReadResult:
    """Number of valid first pages, why the next one is not valid, and the bytes read."""

    num_read: int = 0
    miss: MissKind | None = None
    num_bytes: int = 0  # read from disk, whole records


@dataclass
class PageReader:
    """Reads pages of one identity, and keeps their files open. For one thread at a time."""

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

    def read(self, pages: Sequence[PageKey], places: Sequence[BlockRange], out: NDArray[np.uint8]) -> ReadResult:
        """Fill `out` with pages up to the first that is not valid; adjacent pages are one read.

        Args:
            places: the places of the first of `pages`, perhaps not of all.
            out: `[at least len(pages), page_bytes]`, rows contiguous; rows after the last valid one are undefined.

        Raises:
            OSError: the disk failed.
        """
        result = ReadResult()
        for some in extents(places, self._max_records):
            span = slice(some.start, some.stop)
            self._read_extent(pages[span], places[span], out[span], result)
            if result.miss is not None:
                return result
        if len(places) < len(pages):
            result.miss = "absent"
        return result

    def forget(self, segment: int) -> None:
        """Close the file of a segment that was removed."""
        fd = self._fds.pop(segment, None)
        if fd is not None:
            self.files.close(fd)

    def close(self) -> None:
        """Close all files."""
        for segment in list(self._fds):
            self.forget(segment)

    def _read_extent(
        self, pages: Sequence[PageKey], places: Sequence[BlockRange], out: NDArray[np.uint8], result: ReadResult
    ) -> None:
        """Read adjacent pages at once, and add the valid ones, the bytes and the first fault to `result`."""
        first = places[0]
        try:
            fd = self._descriptor_of(first.segment)
        except FileNotFoundError:
            result.miss = "gone"
            return
        buffers: list[Buffer] = []
        for header, row in zip(self._headers, out, strict=False):
            buffers += [header.data, row.data, self._padding]
        got = read_all(self.files, fd, buffers, first.offset)
        result.num_bytes += got
        self.files.drop_cache(fd, first.offset, len(pages) * self._record_bytes)
        for i, (page, place) in enumerate(zip(pages, places, strict=True)):
            if got < (i + 1) * self._record_bytes:
                result.miss = "short"
            else:
                result.miss = self._fault_of(self._headers[i].data, out[i].data, page, place)
            if result.miss is not None:
                return
            result.num_read += 1

    def _fault_of(self, block: Buffer, payload: Buffer, page: PageKey, place: BlockRange) -> MissKind | None:
        """Return what is wrong with the page that was read from a place; None if it is `page`, undamaged."""
        record = Record.decode(block)
        if record is None:
            return "header"
        unlike = record.unlike(self.identity.digest, RecordHeader.of_page(page), place, _TOKENS_BYTES)
        if unlike is not None:
            return unlike
        return None if checksum(payload) == record.payload_checksum else "payload"

    def _descriptor_of(self, segment: int) -> int:
        """Return the descriptor of a segment's file, which is opened when first needed."""
        fd = self._fds.get(segment)
        if fd is None:
            fd = self._fds[segment] = self.files.open(self.directory / Segment(segment, self.identity).name)
        return fd


@dataclass(frozen=True)
class ChainRead:
    """Number of valid first pages, and why the next one is not valid."""

    num_read: int
    num_bytes: int  # read from disk
    miss: MissKind | None
    bad_key: bytes | None  # the key of a page that is in the index and not valid


class ChainReader:
    """Finds the pages of a prompt in the index and reads them.

    Raises OSError and sqlite3.Error if the disk fails.
    """

    def __init__(self, directory: Path, files: Files, identity: StoreIdentity) -> None:
        self._index = Index.open_to_read(directory / INDEX)
        self._reader = PageReader(directory, files, identity)

    def read(self, pages: Sequence[PageKey], out: NDArray[np.uint8], bad: Set[bytes]) -> ChainRead:
        """Fill `out` with pages up to the first that cannot be read.

        Args:
            bad: keys that must not be found, though the index still has them.
        """
        num_read, num_bytes, places = 0, 0, self._find_places(pages, bad)
        while True:
            result = self._reader.read(pages[num_read:], places, out[num_read:])
            num_read, num_bytes = num_read + result.num_read, num_bytes + result.num_bytes
            if result.miss is None or result.miss == "absent":
                return ChainRead(num_read, num_bytes, result.miss, None)
            was = places[result.num_read]
            places = self._find_places(pages[num_read:], bad)
            if not places:  # evicted or discarded during the read
                return ChainRead(num_read, num_bytes, "gone", None)
            if places[0] == was:  # not moved: the page itself is damaged
                return ChainRead(num_read, num_bytes, result.miss, pages[num_read].key)

    def forget(self, segments: Sequence[int]) -> None:
        """Close the files of segments that were removed."""
        for segment in segments:
            self._reader.forget(segment)

    def close(self) -> None:
        """Close files and index."""
        self._reader.close()
        self._index.close()

    def _find_places(self, pages: Sequence[PageKey], bad: Set[bytes]) -> list[BlockRange]:
        """Return the places of the first of `pages`, up to one that does not exist."""
        found = self._index.find([page.key for page in pages])
        places = (None if page.key in bad else found.get(page.key) for page in pages)
        return [place for place in takewhile(lambda place: place is not None, places) if place is not None]
