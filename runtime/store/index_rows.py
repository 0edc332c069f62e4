"""Rows of the index: a record and where it lies, a segment and how full it is.

Knows values, not SQL. A record's row has a checksum, for SQLite has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from xxhash import xxh3_64_digest

from .page_key import PAGE_DETAILS_BYTES
from .record import BLOCK, Kind, Place, RecordHeader


@dataclass(frozen=True)
class RecordRow:
    """A record, where it lies, and the count of uses when it was last used."""

    header: RecordHeader
    place: Place
    last_used: int

    def values(self) -> tuple[bytes | int, ...]:
        """The columns; the last one is a checksum, for SQLite has none."""
        header, place = self.header, self.place
        what = (header.key, int(header.kind), header.parent_key, header.namespace, header.details)
        where = (place.segment, place.block, place.num_blocks)
        return *what, *where, self.last_used, _row_check((*what, *where))

    @classmethod
    def of(cls, values: Sequence[Any]) -> RecordRow | None:
        """The row that `values` are; None if they broke."""
        try:
            if values[9] != _row_check(values[:8]) or not isinstance(values[8], int):
                return None
            header = RecordHeader(Kind(values[1]), values[0], *values[2:5])
        except (AttributeError, OverflowError, TypeError, ValueError):
            return None
        if header.kind == Kind.PAGE and len(header.details) != PAGE_DETAILS_BYTES:
            return None
        return cls(header, Place(*values[5:8]), values[8])


@dataclass(frozen=True)
class SegmentRow:
    """A segment, and how far its records are in the index."""

    number: int
    num_blocks: int
    sealed_at: int | None
    is_doomed: bool
    begun_at: float

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        return self.num_blocks * BLOCK

    @property
    def is_sealed(self) -> bool:
        """Whether nothing is appended any more."""
        return self.sealed_at is not None


class Located(NamedTuple):
    """A record of the index."""

    key: bytes
    kind: int
    parent_key: bytes
    place: Place


def _row_check(columns: Sequence[Any]) -> bytes:
    """8 bytes over blobs with their lengths, and numbers."""
    blobs = (column if isinstance(column, bytes) else column.to_bytes(8, "little", signed=True) for column in columns)
    return xxh3_64_digest(b"".join(len(blob).to_bytes(4, "little") + blob for blob in blobs))
