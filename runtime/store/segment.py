"""A file of records that only grows: what its first blocks say, and where each record lies.

Knows one file's layout; which records of it are still wanted, the index knows.
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

from ..errors import StoreCorrupt, StoreMismatch
from .files import Files, read_all, write_all
from .page_key import StoreIdentity
from .record import BLOCK, KIND_PAGE, Place, RecordHeader, checksum, is_sealed, padded, sealed

FORMAT_VERSION: Final = 1
_MAGIC: Final = b"RLXSEGM\n"
_HEADER: Final = struct.Struct("<8sIIQI")  # magic, version, bytes of the header, number, bytes of the identity
_MAX_HEADER_BYTES: Final = 1 << 20
_NAME: Final = re.compile(r"segment-([0-9]{10})\.pages")


@dataclass(frozen=True)
class Segment:
    """What never changes of a segment: its number, and the model whose pages it holds."""

    number: int
    identity: StoreIdentity

    @cached_property
    def header_bytes(self) -> int:
        """Bytes before the first record."""
        return padded(_HEADER.size + len(self.identity.to_json()) + 16)

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of each record."""
        return BLOCK + padded(self.identity.page_bytes)

    @property
    def name(self) -> str:
        """Of the file."""
        return f"segment-{self.number:010d}.pages"

    def offset(self, number: int) -> int:
        """Where record `number` begins."""
        return self.header_bytes + number * self.record_bytes

    def num_records(self, num_bytes: int) -> int:
        """How many whole records a file of `num_bytes` can hold."""
        return max(0, num_bytes - self.header_bytes) // self.record_bytes

    def create(self, files: Files, directory: Path) -> int:
        """Make the file, whose name and header outlive a loss of power when this returns; its descriptor."""
        identity = self.identity.to_json()
        header = _HEADER.pack(_MAGIC, FORMAT_VERSION, self.header_bytes, self.number, len(identity)) + identity
        fd = files.open(directory / self.name, create=True)
        try:
            write_all(files, fd, [sealed(header, self.header_bytes)], 0)
            files.fdatasync(fd)
            files.fsync_dir(directory)
        except BaseException:
            files.close(fd)
            with contextlib.suppress(OSError):
                files.unlink(directory / self.name)
            raise
        return fd

    def scan(self, files: Files, fd: int, first: int, *, payloads: bool) -> Iterator[RecordHeader | None]:
        """The records from number `first` to the end of the file, None for each that is not whole.

        Args:
            payloads: read keys and values too, and compare their checksums; otherwise only the headers.
        """
        block, payload = bytearray(BLOCK), memoryview(bytearray(self.identity.page_bytes if payloads else 0))
        for number in range(first, self.num_records(files.size(fd))):
            read_all(files, fd, [block, payload], self.offset(number))
            header = RecordHeader.decode(block)
            if header is not None and payloads and header.kind == KIND_PAGE:
                header = header if checksum(payload) == header.payload_checksum else None
            yield header if header is not None and self.owns(header, number) else None

    def owns(self, header: RecordHeader, number: int) -> bool:
        """Whether a record says of itself that it is number `number` of this segment."""
        return (
            header.place == Place(self.number, number)
            and header.identity_digest == self.identity.digest
            and header.payload_bytes == self.identity.page_bytes
        )


def read_segment(files: Files, fd: int, path: Path) -> Segment:
    """What the file's header says.

    Raises:
        StoreCorrupt: it is not a segment's, broke, or belongs to a file of another name.
        StoreMismatch: another version of radixlm wrote it.
    """
    header = bytearray(BLOCK)
    if read_all(files, fd, [header], 0) == BLOCK:
        magic, version, header_bytes, number, identity_bytes = _HEADER.unpack_from(header)
        if magic == _MAGIC and header_bytes % BLOCK == 0 and BLOCK <= header_bytes <= _MAX_HEADER_BYTES:
            header = bytearray(header_bytes)
            if read_all(files, fd, [header], 0) == header_bytes and is_sealed(header):
                if version != FORMAT_VERSION:
                    raise StoreMismatch(
                        f"{path} has version {version}, this radixlm reads {FORMAT_VERSION}; give another directory"
                    )
                segment = Segment(number, StoreIdentity.from_json(bytes(header[_HEADER.size :][:identity_bytes])))
                if segment.name == path.name and segment.header_bytes == header_bytes:
                    return segment
    raise StoreCorrupt(f"{path} has no header that says whose pages it holds; its pages are lost")


def segment_paths(directory: Path) -> dict[int, Path]:
    """The segment files of a directory by their numbers, in order."""
    found = {int(match[1]): path for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def extents(places: Sequence[Place], max_records: int) -> Iterator[range]:
    """Ranges of `places` that lie one behind the other in a file, each of at most `max_records`.

    >>> list(extents([Place(1, 4), Place(1, 5), Place(2, 6)], 9))
    [range(0, 2), range(2, 3)]
    """
    first = 0
    for i in range(1, len(places) + 1):
        follows = i < len(places) and places[i] == Place(places[i - 1].segment, places[i - 1].number + 1)
        if not follows or i - first == max_records:
            yield range(first, i)
            first = i
