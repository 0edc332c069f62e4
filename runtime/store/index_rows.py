"""Rows of the index: a record and its place, a segment and its size; and the last use of records.

A row of a record has a checksum, because SQLite has none. Knows columns and counts of uses; not eviction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from xxhash import xxh3_64_digest

from .page_key import PAGE_DETAILS_BYTES
from .record import BLOCK, BlockRange, Kind, RecordHeader


@dataclass(frozen=True)
class RecordRow:
    """A record, its place, and the count of uses when it was last used."""

    header: RecordHeader
    place: BlockRange
    last_used: int

    def values(self) -> tuple[bytes | int, ...]:
        """Return the columns of the row; the last one is a checksum, because SQLite has none."""
        header, place = self.header, self.place
        what = (header.key, int(header.kind), header.parent_key, header.namespace, header.details)
        where = (place.segment, place.block, place.num_blocks)
        return *what, *where, self.last_used, _row_check((*what, *where))

    @classmethod
    def of(cls, values: Sequence[Any]) -> RecordRow | None:
        """Return the row of these column values; None if they are damaged."""
        try:
            if values[9] != _row_check(values[:8]) or not isinstance(values[8], int):
                return None
            header = RecordHeader(Kind(values[1]), values[0], *values[2:5])
        except (AttributeError, OverflowError, TypeError, ValueError):
            return None
        if header.kind == Kind.PAGE and len(header.details) != PAGE_DETAILS_BYTES:
            return None
        return cls(header, BlockRange(*values[5:8]), values[8])


@dataclass(frozen=True)
class SegmentRow:
    """A segment, and how many of its blocks are in the index."""

    number: int
    num_blocks: int
    sealed_at: int | None
    is_doomed: bool
    begun_at: float

    @property
    def num_bytes(self) -> int:
        """Size of the file in bytes."""
        return self.num_blocks * BLOCK

    @property
    def is_sealed(self) -> bool:
        """Return whether nothing is appended any more."""
        return self.sealed_at is not None


class RecordLocation(NamedTuple):
    """The key, kind, parent and place of a record in the index."""

    key: bytes
    kind: int
    parent_key: bytes
    place: BlockRange


def _row_check(columns: Sequence[Any]) -> bytes:
    """Return a checksum of 8 bytes over the columns: blobs with their lengths, and numbers."""
    blobs = (column if isinstance(column, bytes) else column.to_bytes(8, "little", signed=True) for column in columns)
    return xxh3_64_digest(b"".join(len(blob).to_bytes(4, "little") + blob for blob in blobs))


_MAX_UNSPREAD: Final = 1 << 16  # keys in memory, some 10 MB


class IndexUses:
    """The column `last_used` of the records that one connection changes."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._sql = connection
        self._unspread: dict[bytes, int] = {}  # uses by key that are not yet recorded for the pages before that key

    @property
    def unspread(self) -> Mapping[bytes, int]:
        """The uses that `spread` has not recorded yet, for `take_back`."""
        return self._unspread

    def take_back(self, unspread: Mapping[bytes, int]) -> None:
        """Undo each `spread` since `unspread` was read, because its transaction was rolled back."""
        self._unspread = {**unspread, **self._unspread}

    def touch(self, keys: Collection[bytes], use: int) -> None:
        """Record a use of records, and of the aliases and calls of these pages.

        `spread` records it for the pages before them.
        """
        name_keys(self._sql, keys)
        self._set_named(use)
        self._unspread.update(dict.fromkeys(keys, use))
        if len(self._unspread) > _MAX_UNSPREAD:
            self.spread()

    def find_unspread(self) -> None:
        """Find uses that a crashed process recorded for a page but not for the pages before it, for `spread`."""
        self._unspread |= self._sql.execute(
            "SELECT page.key, page.last_used FROM records AS page CROSS JOIN records AS parent "
            f"ON parent.key = page.parent WHERE page.kind = {Kind.PAGE:d} AND page.last_used > parent.last_used "
            "AND typeof(page.last_used) = 'integer'"
        ).fetchall()

    def are_unspread(self, keys: Iterable[bytes]) -> bool:
        """Return whether a use of one of these keys is not yet recorded for the pages before it."""
        return any(key in self._unspread for key in keys)

    def spread(self) -> None:
        """Record the uses of pages for all pages before them, with their aliases and calls.

        Each record changes once.
        """
        keys_by_use: dict[int, list[bytes]] = {}
        for key, use in self._unspread.items():
            keys_by_use.setdefault(use, []).append(key)
        for use in sorted(keys_by_use, reverse=True):  # the last use first: earlier ones stop at pages that it reached
            name_keys(self._sql, keys_by_use[use])
            self._sql.execute(
                "WITH RECURSIVE up(key) AS (SELECT key FROM named UNION SELECT page.parent FROM up "
                f"CROSS JOIN records AS page ON page.key = up.key AND page.kind = {Kind.PAGE:d} "
                "LEFT JOIN records AS parent ON parent.key = page.parent "
                "WHERE parent.key IS NULL OR parent.last_used < ?) "  # an alias within the first page has no parent
                "INSERT OR IGNORE INTO named SELECT key FROM up",
                (use,),
            )
            self._set_named(use)
        self._unspread = {}

    def _set_named(self, use: int) -> None:
        """Record a use of the records in the table `named`, and of the aliases and calls of pages among them."""
        for which in ("key", f"kind IN ({Kind.ALIAS:d}, {Kind.CALL:d}) AND parent"):
            self._sql.execute(
                f"UPDATE records SET last_used = ? WHERE last_used < ? AND {which} IN (SELECT key FROM named)",
                (use, use),
            )


def name_keys(connection: sqlite3.Connection, keys: Iterable[bytes]) -> None:
    """Fill the temporary table `named`, from which the next statements take their keys."""
    connection.execute("DELETE FROM named")
    connection.executemany("INSERT OR IGNORE INTO named VALUES (?)", ((key,) for key in keys))
