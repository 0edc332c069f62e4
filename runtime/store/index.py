"""The index of a store in SQLite: finds records by key, changes in transactions, and can be read while a server writes.

Knows rows; reads and writes no records. The segments are authoritative: a lost or damaged index is rebuilt from their
headers. SQLite is in the standard library, keeps committed changes through any crash, and lets `radixlm store ls` read
while a server writes (WAL). In that mode `synchronous=NORMAL` can lose the last commits in a power loss. Then the
segments' tails are read again, as after any crash.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ..cache.cache_namespace import adapted_prefix
from ..errors import StoreCorrupt, StoreMismatch
from .index_rows import IndexUses, RecordLocation, RecordRow, SegmentRow, name_keys
from .page_key import NO_PARENT
from .record import FORMAT_VERSION, BlockRange, Kind, mismatch

_WAL_PAGES: Final = 256  # 1 MiB, which fits the reserve of a small disk
_NUM_KEYS: Final = 500  # in one query; SQLite accepts at least 999 values
_SCHEMA: Final = f"""
CREATE TABLE segments (
    number INTEGER PRIMARY KEY,
    num_blocks INTEGER NOT NULL,   -- written before the last commit; the file has a tail behind them
    sealed_at INTEGER,             -- the count of uses then; NULL: records are still appended
    is_doomed INTEGER NOT NULL DEFAULT 0,  -- its records are gone or elsewhere; the file goes after the commit
    begun_at REAL NOT NULL         -- seconds since 1970, for people
);
CREATE TABLE records (
    key BLOB PRIMARY KEY,
    kind INTEGER NOT NULL,
    parent BLOB NOT NULL,
    namespace BLOB NOT NULL,
    details BLOB NOT NULL,
    segment INTEGER NOT NULL,
    block INTEGER NOT NULL,
    num_blocks INTEGER NOT NULL,
    last_used INTEGER NOT NULL,
    row_check BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX records_by_parent ON records(parent, kind);
CREATE INDEX records_by_place ON records(segment, block, num_blocks);
PRAGMA user_version = {FORMAT_VERSION};
"""
_COLUMNS: Final = "key, kind, parent, namespace, details, segment, block, num_blocks, last_used, row_check"
_SEGMENT_COLUMNS: Final = "number, num_blocks, sealed_at, is_doomed, begun_at"
# Depth first, so that the pages of a prompt come one after the other. Without a LIMIT, SQLite ignores the order.
_REACHED: Final = (
    "WITH RECURSIVE reached(key, depth) AS (SELECT key, 0 FROM records WHERE parent = :root AND key <> :root UNION ALL "
    "SELECT records.key, reached.depth + 1 FROM reached CROSS JOIN records ON records.parent = reached.key "
    "WHERE records.key <> :root ORDER BY 2 DESC LIMIT -1)"
)


class Index:
    """One connection to the index of a store. Call methods that change rows inside a `transaction`, or alone.

    All methods raise sqlite3.Error if the file is damaged or the disk fails.

    Attributes:
        uses: when records were last used.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._sql = connection
        self.uses = IndexUses(connection)

    @classmethod
    def open(cls, path: Path) -> Index:
        """Open the index of a directory; create it if there is none.

        Raises:
            StoreCorrupt: it is damaged and must be rebuilt.
            StoreMismatch: a radixlm with another format wrote it.
        """
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite's other files inherit this mode
        sql = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            version = sql.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, FORMAT_VERSION):
                raise mismatch(path, version)
            sql.execute("PRAGMA journal_mode = WAL")
            sql.execute("PRAGMA synchronous = NORMAL")
            sql.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
            sql.execute("PRAGMA secure_delete = ON")  # the tokens of pages are conversations
            if version == 0:
                sql.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
            if sql.execute("PRAGMA integrity_check(1)").fetchone()[0] != "ok":
                raise StoreCorrupt(f"{path} is broken; remove it, and it is made again")
            sql.execute("CREATE TEMP TABLE named (key BLOB PRIMARY KEY) WITHOUT ROWID")  # see `name_keys`
            sql.execute(f"SELECT {_COLUMNS} FROM records LIMIT 0")
            sql.execute(f"SELECT {_SEGMENT_COLUMNS} FROM segments LIMIT 0")
        except (StoreCorrupt, StoreMismatch):
            sql.close()
            raise
        except sqlite3.Error as error:
            sql.close()
            # A missing table or column raises SQLite's most general error, and so does one that already exists.
            if is_broken(error) or "no such" in str(error) or "already exists" in str(error):
                raise StoreCorrupt(f"{path} is broken ({error}); remove it, and it is made again") from None
            raise
        return cls(sql)

    @classmethod
    def open_to_read(cls, path: Path) -> Index:
        """Open a read-only connection, which sees committed changes while another process writes."""
        uri = f"{path.absolute().as_uri()}?mode=ro"
        return cls(sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False))

    def close(self) -> None:
        """Close the connection."""
        self._sql.close()

    def forget(self) -> None:
        """Erase removed rows from disk, also for the case of a power loss."""
        self._sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all changes inside the `with` block at once, or none."""
        self._sql.execute("BEGIN IMMEDIATE")
        unspread = self.uses.unspread
        try:
            yield
            self._sql.execute("COMMIT")
        except BaseException:
            self.uses.take_back(unspread)
            if self._sql.in_transaction:
                self._sql.execute("ROLLBACK")
            raise

    # Methods for records.

    def find(self, keys: Sequence[bytes]) -> dict[bytes, BlockRange]:
        """Return the places of those of these records that exist."""
        return {found.key: found.place for found in self._locations("key", keys)}

    def find_below(self, parents: Sequence[bytes], kind: Kind) -> dict[bytes, BlockRange]:
        """Return the places of the records of a kind that have one of these parents."""
        return {found.key: found.place for found in self._locations(f"kind = {kind:d} AND parent", parents)}

    def rows_below(self, parents: Sequence[bytes], kind: Kind) -> list[RecordRow]:
        """Return the records of a kind that have one of these parents, except damaged rows."""
        return self._rows_with(f"kind = {kind:d} AND parent", parents)

    def rows_at(self, segments: Sequence[int]) -> list[RecordRow]:
        """Return the records in any of these segments, except damaged rows."""
        return self._rows_with("segment", segments)

    def put(self, rows: Iterable[RecordRow]) -> None:
        """Add records; each replaces the one with its key."""
        marks = ",".join("?" * 10)
        self._sql.executemany(
            f"INSERT OR REPLACE INTO records ({_COLUMNS}) VALUES ({marks})", (row.values() for row in rows)
        )

    def remove(self, keys: Collection[bytes]) -> list[RecordLocation]:
        """Remove records and all below them, which can no longer be found; return all that were removed."""
        removed = self.below(keys)
        if self.uses.are_unspread(each.key for each in removed if each.kind == Kind.PAGE):
            self.uses.spread()  # the pages before them keep this use
            removed = self.below(keys)
        self._sql.execute("DELETE FROM records WHERE key IN (SELECT key FROM named)")
        return removed

    def below(self, keys: Iterable[bytes]) -> list[RecordLocation]:
        """Return these records and all below them, if they exist."""
        name_keys(self._sql, keys)
        self._sql.execute(
            "WITH RECURSIVE below(key) AS (SELECT key FROM named UNION "
            "SELECT records.key FROM below CROSS JOIN records ON records.parent = below.key) "
            "INSERT OR IGNORE INTO named SELECT key FROM below"
        )
        return self._all_locations("key IN (SELECT key FROM named)")

    def remove_unreachable(self) -> int:
        """Remove records that lack a page before them; return how many were removed."""
        self._sql.execute("DELETE FROM named")
        self._sql.execute(f"INSERT INTO named {_REACHED} SELECT key FROM reached", {"root": NO_PARENT})
        return self._sql.execute("DELETE FROM records WHERE key NOT IN (SELECT key FROM named)").rowcount

    def reachable(self) -> Iterator[tuple[bytes, RecordRow | None]]:
        """Yield all keys and records, parents first and depth first; None for a damaged row and for rows below it."""
        broken: set[bytes] = set()
        columns = ", ".join(f"records.{name}" for name in _COLUMNS.split(", "))
        for values in self._sql.execute(
            f"{_REACHED} SELECT {columns} FROM reached CROSS JOIN records ON records.key = reached.key",
            {"root": NO_PARENT},
        ):
            row = RecordRow.of(values)
            if row is None or row.header.parent_key in broken:
                broken.add(values[0])
                yield values[0], None
            else:
                yield values[0], row

    def rows_in(self, segment: int) -> dict[bytes, RecordRow | None]:
        """Return the records of a segment by key, in the order of the file; None for damaged rows."""
        return self._rows("segment = ? ORDER BY block", segment)

    def rows_of(self, namespace: bytes) -> dict[bytes, RecordRow | None]:
        """Return the records of a namespace and of LoRA adapters within it by key; None for damaged rows."""
        prefix = adapted_prefix(namespace)
        return self._rows("namespace = ? OR substr(namespace, 1, ?) = ?", namespace, len(prefix), prefix)

    def rows_of_kind(self, kind: Kind) -> dict[bytes, RecordRow | None]:
        """Return the records of a kind by key, the least recently used first; None for damaged rows."""
        return self._rows("kind = ? ORDER BY last_used, segment, block", int(kind))

    def num_pages(self) -> dict[int, int]:
        """Return the number of pages of each segment that has any."""
        sql = f"SELECT segment, count(*) FROM records WHERE kind = {Kind.PAGE:d} GROUP BY segment"
        return dict(self._sql.execute(sql).fetchall())

    def num_blocks(self) -> dict[int, int]:
        """Return the number of blocks that the records of each segment take; segments without records are left out."""
        return dict(self._sql.execute("SELECT segment, sum(num_blocks) FROM records GROUP BY segment").fetchall())

    def are_empty(self, segments: Collection[int]) -> list[int]:
        """Return those of these segments that have no record."""
        sql = "SELECT 1 FROM records WHERE segment = ? LIMIT 1"
        return [number for number in segments if self._sql.execute(sql, (number,)).fetchone() is None]

    def last_use(self) -> int:
        """Return the largest count of uses."""
        sql = (
            "SELECT max(coalesce((SELECT max(last_used) FROM records), 0), "
            "coalesce((SELECT max(sealed_at) FROM segments), 0))"
        )
        return int(self._sql.execute(sql).fetchone()[0])

    # Methods for segments.

    def segments(self) -> dict[int, SegmentRow]:
        """Return all segments by number, in order."""
        rows = self._sql.execute(f"SELECT {_SEGMENT_COLUMNS} FROM segments ORDER BY number")
        return {row[0]: SegmentRow(row[0], row[1], row[2], bool(row[3]), row[4]) for row in rows}

    def put_segments(self, rows: Iterable[SegmentRow]) -> None:
        """Add segments, or update their rows."""
        self._sql.executemany(
            "INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?, ?)",
            ((row.number, row.num_blocks, row.sealed_at, row.is_doomed, row.begun_at) for row in rows),
        )

    def remove_segment(self, number: int) -> None:
        """Remove a segment's row, and the rows of the records in it."""
        self._sql.execute("DELETE FROM segments WHERE number = ?", (number,))
        self._sql.execute("DELETE FROM records WHERE segment = ?", (number,))

    def cut_segment(self, number: int, num_blocks: int) -> tuple[int, int]:
        """Remove the rows of records beyond a segment's end.

        Returns:
            The number of removed rows, and the block where the last remaining record ends.
        """
        sql = "DELETE FROM records WHERE segment = ? AND block + num_blocks > ?"
        num_cut = self._sql.execute(sql, (number, num_blocks)).rowcount
        sql = "SELECT coalesce(max(block + num_blocks), 0) FROM records WHERE segment = ?"
        return num_cut, int(self._sql.execute(sql, (number,)).fetchone()[0])

    def _rows_with(self, which: str, values: Sequence[bytes | int]) -> list[RecordRow]:
        """Return the records whose column `which` has one of these values, except damaged rows."""
        rows: list[RecordRow | None] = []
        for first in range(0, len(values), _NUM_KEYS):
            some = values[first : first + _NUM_KEYS]
            where = f"{which} IN ({','.join('?' * len(some))})"
            found = self._sql.execute(f"SELECT {_COLUMNS} FROM records WHERE {where}", some)
            rows += [RecordRow.of(columns) for columns in found]
        return [row for row in rows if row is not None]

    def _locations(self, which: str, keys: Sequence[bytes]) -> Iterator[RecordLocation]:
        """Yield the locations of the records whose column `which` has one of these keys."""
        for first in range(0, len(keys), _NUM_KEYS):
            some = keys[first : first + _NUM_KEYS]
            yield from self._all_locations(f"{which} IN ({','.join('?' * len(some))})", some)

    def _all_locations(self, where: str, values: Sequence[bytes] = ()) -> list[RecordLocation]:
        """Return the locations of the records that an SQL condition selects, except damaged rows."""
        columns = "key, kind, parent, segment, block, num_blocks"
        rows = self._sql.execute(f"SELECT {columns} FROM records WHERE {where}", values)
        return [
            RecordLocation(key, kind, parent, BlockRange(*at))
            for key, kind, parent, *at in rows
            if all(type(part) is int for part in at)
        ]

    def _rows(self, where: str, *values: bytes | int) -> dict[bytes, RecordRow | None]:
        """Return the records that an SQL condition selects by key; None for damaged rows."""
        rows = self._sql.execute(f"SELECT {_COLUMNS} FROM records WHERE {where}", values)
        return {row[0]: RecordRow.of(row) for row in rows}


def is_broken(error: Exception) -> bool:
    """Return whether an error means that the index itself is damaged and must be rebuilt.

    Errors of the disk and of the caller do not mean that.
    """
    if isinstance(error, sqlite3.IntegrityError | StoreCorrupt):
        return True
    code = getattr(error, "sqlite_errorcode", None)  # the low byte is the kind, the others are details
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
