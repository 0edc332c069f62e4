"""A file of records that only grows: its header, and the records in it.

A segment has many small records, or a single large one, which can then be removed without moving others. Knows the
layout of one file; the index knows which of its records are still used.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from ..errors import StoreCorrupt
from .files import Files, read_all, write_all
from .page_key import StoreIdentity
from .record import (
    BLOCK,
    CHECKSUM_BYTES,
    FORMAT_VERSION,
    BlockRange,
    Kind,
    Record,
    checksum,
    is_sealed,
    mismatch,
    padded,
    sealed,
)

_MAGIC: Final = b"RLXSEGM\n"
_HEADER: Final = struct.Struct("<8sIIQII")  # magic, version, header bytes, number, identity bytes, single
_MAX_HEADER_BYTES: Final = 1 << 20
_NAME: Final = re.compile(r"segment-([0-9]{10})\.(?:pages|run)")


@dataclass(frozen=True)
class Segment:
    """The constant properties of a segment: its number, its model, and whether it holds a single record."""

    number: int
    identity: StoreIdentity
    is_single: bool = False

    @cached_property
    def num_header_blocks(self) -> int:
        """Number of blocks before the first record."""
        return padded(_HEADER.size + len(self.identity.to_json()) + CHECKSUM_BYTES) // BLOCK

    @property
    def name(self) -> str:
        """Name of the file."""
        return f"segment-{self.number:010d}.{'run' if self.is_single else 'pages'}"

    def create(self, files: Files, directory: Path) -> int:
        """Create the file. Its name and header survive a power loss when this returns.

        Returns:
            Its descriptor.
        """
        identity, num_bytes = self.identity.to_json(), self.num_header_blocks * BLOCK
        header = _HEADER.pack(_MAGIC, FORMAT_VERSION, num_bytes, self.number, len(identity), self.is_single) + identity
        fd = files.open(directory / self.name, create=True)
        try:
            write_all(files, fd, [sealed(header, num_bytes)], 0)
            files.fdatasync(fd)
            files.fsync_dir(directory)
        except BaseException:
            files.close(fd)
            with contextlib.suppress(OSError):
                files.unlink(directory / self.name)
            raise
        return fd

    def scan(self, files: Files, fd: int, first: int, *, payloads: bool) -> Iterator[Record | None]:
        """Yield the records from block `first` to the end of the file, and None for each gap of blocks without one.

        Args:
            payloads: read the payloads of pages, too, and verify their checksums. A single record does not need this,
                because its header is written last.
        """
        block, stop, was_record = first, files.size(fd) // BLOCK, True
        while block < stop:
            record = self._read_own_record(files, fd, block, stop)
            if record is not None:
                yield record if not payloads or self._has_payload(files, fd, record) else None
                block = record.place.stop
            else:
                if was_record:
                    yield None
                block += 1
            was_record = record is not None

    def _read_own_record(self, files: Files, fd: int, block: int, stop: int) -> Record | None:
        """Return the complete record that begins at a block and names it as its place; None if there is none."""
        record = read_record(files, fd, block)
        if record is None or record.place.stop > stop or record.identity_digest != self.identity.digest:
            return None
        if record.header.kind == Kind.PAGE and record.payload_bytes != self.identity.page_bytes:
            return None
        return record if (record.segment, record.block) == (self.number, block) else None

    def _has_payload(self, files: Files, fd: int, record: Record) -> bool:
        """Return whether the payload of a page is undamaged; True for other records, which are not read."""
        if record.header.kind != Kind.PAGE:
            return True
        payload = bytearray(record.payload_bytes)
        read_all(files, fd, [payload], record.block * BLOCK + record.header.num_bytes)
        return checksum(payload) == record.payload_checksum


def read_record(files: Files, fd: int, block: int) -> Record | None:
    """Decode the record that begins at a block; None if none begins there, or if its header is damaged."""
    start = bytearray(BLOCK)
    if read_all(files, fd, [start], block * BLOCK) < BLOCK:
        return None
    num_bytes = Record.num_header_bytes(start)
    if num_bytes is None:
        return None
    rest = bytearray(num_bytes - BLOCK)
    read_all(files, fd, [rest], (block + 1) * BLOCK)
    return Record.decode(start + rest)


def read_segment(files: Files, fd: int, path: Path) -> Segment:
    """Read the header of a segment.

    Raises:
        StoreCorrupt: it is not a segment, is damaged, or has the name of another.
        StoreMismatch: a radixlm with another format wrote it.
    """
    header = bytearray(BLOCK)
    if read_all(files, fd, [header], 0) == BLOCK:
        magic, version, header_bytes, number, identity_bytes, is_single = _HEADER.unpack_from(header)
        if magic == _MAGIC and header_bytes % BLOCK == 0 and BLOCK <= header_bytes <= _MAX_HEADER_BYTES:
            header = bytearray(header_bytes)
            if read_all(files, fd, [header], 0) == header_bytes and is_sealed(header):
                if version != FORMAT_VERSION:
                    raise mismatch(path, version)
                identity = StoreIdentity.from_json(bytes(header[_HEADER.size :][:identity_bytes]))
                segment = Segment(number, identity, bool(is_single))
                if segment.name == path.name and segment.num_header_blocks * BLOCK == header_bytes:
                    return segment
    raise StoreCorrupt(f"{path} has no header that says whose pages it holds; its pages are lost")


def read_segments(directory: Path, files: Files) -> dict[int, Segment | None]:
    """Return the segments of a directory by number, in order; None for those whose header is damaged.

    Raises:
        StoreMismatch: a radixlm with another format wrote one of them.
        OSError: the disk failed.
    """
    segments: dict[int, Segment | None] = {}
    for number, path in segment_paths(directory).items():
        try:
            fd = files.open(path)
        except FileNotFoundError:
            continue  # removed just now
        try:
            segments[number] = read_segment(files, fd, path)
        except StoreCorrupt:
            segments[number] = None
        finally:
            files.close(fd)
    return segments


def segment_paths(directory: Path) -> dict[int, Path]:
    """Return the segment files of a directory by number, in order."""
    found = {int(match[1]): path for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def extents(places: Sequence[BlockRange], max_records: int) -> Iterator[range]:
    """Yield ranges of `places` that are adjacent in a file, each of at most `max_records`.

    >>> list(extents([BlockRange(1, 4, 2), BlockRange(1, 6, 2), BlockRange(2, 8, 2)], 9))
    [range(0, 2), range(2, 3)]
    """
    first = 0
    for i in range(1, len(places) + 1):
        before = places[i - 1]
        follows = i < len(places) and (places[i].segment, places[i].block) == (before.segment, before.stop)
        if not follows or i - first == max_records:
            yield range(first, i)
            first = i
