"""Rows of the index, a record and where it lies, a segment and how full it is; and when records were used last.

A row of a record has a checksum, because SQLite has none. Knows columns and counts of uses; not what is evicted.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

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


_MAX_UNSPREAD: Final = 1 << 16  # keys in memory, some 10 MB


class IndexUses:
    """The column `last_used` of the records that one connection changes."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._sql = connection
        self._unspread: dict[bytes, int] = {}  # uses that the pages before a key do not have yet

    @property
    def unspread(self) -> Mapping[bytes, int]:
        """The uses that `spread` is still to note, for `take_back`."""
        return self._unspread

    def take_back(self, unspread: Mapping[bytes, int]) -> None:
        """Undo each `spread` since `unspread` was read: the transaction that it was in is rolled back."""
        self._unspread = {**unspread, **self._unspread}

    def touch(self, keys: Collection[bytes], use: int) -> None:
        """Note that records were used, and with a page its aliases and calls; `spread` does the pages before it."""
        name_keys(self._sql, keys)
        self._set_named(use)
        self._unspread.update(dict.fromkeys(keys, use))
        if len(self._unspread) > _MAX_UNSPREAD:
            self.spread()

    def find_unspread(self) -> None:
        """Find the pages that were used later than those before them: a process that ended in a crash left them."""
        self._unspread |= self._sql.execute(
            "SELECT page.key, page.last_used FROM records AS page CROSS JOIN records AS parent "
            f"ON parent.key = page.parent WHERE page.kind = {Kind.PAGE:d} AND page.last_used > parent.last_used "
            "AND typeof(page.last_used) = 'integer'"
        ).fetchall()

    def are_unspread(self, keys: Iterable[bytes]) -> bool:
        """Whether the pages before one of these do not have its last use yet."""
        return any(key in self._unspread for key in keys)

    def spread(self) -> None:
        """Note that the pages before a used one were used, too, with their aliases and calls. Each changes once."""
        keys_by_use: dict[int, list[bytes]] = {}
        for key, use in self._unspread.items():
            keys_by_use.setdefault(use, []).append(key)
        for use in sorted(keys_by_use, reverse=True):  # the last use first: the others end at the pages that it reached
            name_keys(self._sql, keys_by_use[use])
            self._sql.execute(
                "WITH RECURSIVE up(key) AS (SELECT key FROM named UNION SELECT page.parent FROM up "
                f"CROSS JOIN records AS page ON page.key = up.key AND page.kind = {Kind.PAGE:d} "
                "LEFT JOIN records AS parent ON parent.key = page.parent "
                "WHERE parent.key IS NULL OR parent.last_used < ?) "  # aliases of less than a page have no record above
                "INSERT OR IGNORE INTO named SELECT key FROM up",
                (use,),
            )
            self._set_named(use)
        self._unspread = {}

    def _set_named(self, use: int) -> None:
        """Note a use of the records that are named, and of the aliases and calls of pages among them."""
        for which in ("key", f"kind IN ({Kind.ALIAS:d}, {Kind.CALL:d}) AND parent"):
            self._sql.execute(
                f"UPDATE records SET last_used = ? WHERE last_used < ? AND {which} IN (SELECT key FROM named)",
                (use, use),
            )


def name_keys(connection: sqlite3.Connection, keys: Iterable[bytes]) -> None:
    """Fill the table `named`, which the next statements take their keys from."""
    connection.execute("DELETE FROM named")
    connection.executemany("INSERT OR IGNORE INTO named VALUES (?)", ((key,) for key in keys))
