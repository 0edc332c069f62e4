"""Which records are on disk and where, in SQLite: found by key, changed in transactions, readable beside a server.

Knows rows; reads and writes no records. The segments are the truth and this is a list of them: a lost or broken index
is made again from their headers. SQLite, because it is in the standard library, keeps what was committed through any
crash, and lets `radixlm store ls` read while a server writes (WAL). In that mode `synchronous=NORMAL` may lose the last
commits with the power; then the segments' tails are read again, as after any crash.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ..errors import StoreCorrupt, StoreMismatch
from .index_rows import IndexUses, Located, RecordRow, SegmentRow, name_keys
from .page_key import NO_PARENT
from .record import FORMAT_VERSION, Kind, Place, mismatch

_WAL_PAGES: Final = 256  # 1 MiB, which the reserve of a small disk has room for
_NUM_KEYS: Final = 500  # in one query; SQLite takes 999 values at least
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
# Depth first, so that the pages of a prompt come one after the other. Without a LIMIT, SQLite leaves the order out.
_REACHED: Final = (
    "WITH RECURSIVE reached(key, depth) AS (SELECT key, 0 FROM records WHERE parent = :root AND key <> :root UNION ALL "
    "SELECT records.key, reached.depth + 1 FROM reached CROSS JOIN records ON records.parent = reached.key "
    "WHERE records.key <> :root ORDER BY 2 DESC LIMIT -1)"
)


class Index:
    """One connection. Methods that change something are called inside of `transaction`, or alone.

    All raise sqlite3.Error where the file is broken or the disk fails.

    Attributes:
        uses: when records were used last.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._sql = connection
        self.uses = IndexUses(connection)

    @classmethod
    def open(cls, path: Path) -> Index:
        """The index of a directory, made if there is none.

        Raises:
            StoreCorrupt: it is broken; make it again.
            StoreMismatch: a radixlm with another format wrote it.
        """
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite's other files take on its mode
        sql = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            version = sql.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, FORMAT_VERSION):
                raise mismatch(path, version)
            sql.execute("PRAGMA journal_mode = WAL")
            sql.execute("PRAGMA synchronous = NORMAL")
            sql.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
            sql.execute("PRAGMA secure_delete = ON")  # the tokens of pages are what people said
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
            # A table or a column that is missing is SQLite's most general error, and so is one that is there already.
            if is_broken(error) or "no such" in str(error) or "already exists" in str(error):
                raise StoreCorrupt(f"{path} is broken ({error}); remove it, and it is made again") from None
            raise
        return cls(sql)

    @classmethod
    def open_to_read(cls, path: Path) -> Index:
        """A connection beside the writer's: it sees what was committed, and changes nothing."""
        uri = f"{path.absolute().as_uri()}?mode=ro"
        return cls(sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False))

    def close(self) -> None:
        """End the connection."""
        self._sql.close()

    def forget(self) -> None:
        """Leave nothing on disk of the rows that were removed, also after a loss of power."""
        self._sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All changes inside of it at once, or none."""
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

    # Records.

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Place]:
        """Where records lie, of those that are there."""
        return {found.key: found.place for found in self._located("key", keys)}

    def find_below(self, parents: Sequence[bytes], kind: Kind) -> dict[bytes, Place]:
        """Where the records of a kind lie that have one of these parents."""
        return {found.key: found.place for found in self._located(f"kind = {kind:d} AND parent", parents)}

    def rows_below(self, parents: Sequence[bytes], kind: Kind) -> list[RecordRow]:
        """The records of a kind that have one of these parents, but for rows that broke."""
        return self._rows_with(f"kind = {kind:d} AND parent", parents)

    def rows_at(self, segments: Sequence[int]) -> list[RecordRow]:
        """The records in any of these segments, but for rows that broke."""
        return self._rows_with("segment", segments)

    def put(self, rows: Iterable[RecordRow]) -> None:
        """Add records, each in place of the one that had its key."""
        marks = ",".join("?" * 10)
        self._sql.executemany(
            f"INSERT OR REPLACE INTO records ({_COLUMNS}) VALUES ({marks})", (row.values() for row in rows)
        )

    def remove(self, keys: Collection[bytes]) -> list[Located]:
        """Take out records and all below them, which could not be found any more; all that were taken out."""
        removed = self.below(keys)
        if self.uses.are_unspread(each.key for each in removed if each.kind == Kind.PAGE):
            self.uses.spread()  # the pages before them stay used when they are gone
            removed = self.below(keys)
        self._sql.execute("DELETE FROM records WHERE key IN (SELECT key FROM named)")
        return removed

    def below(self, keys: Iterable[bytes]) -> list[Located]:
        """These records and all below them, as far as they are there."""
        name_keys(self._sql, keys)
        self._sql.execute(
            "WITH RECURSIVE below(key) AS (SELECT key FROM named UNION "
            "SELECT records.key FROM below CROSS JOIN records ON records.parent = below.key) "
            "INSERT OR IGNORE INTO named SELECT key FROM below"
        )
        return self._all_located("key IN (SELECT key FROM named)")

    def remove_unreachable(self) -> int:
        """Take out records without all the pages before them; how many there were."""
        self._sql.execute("DELETE FROM named")
        self._sql.execute(f"INSERT INTO named {_REACHED} SELECT key FROM reached", {"root": NO_PARENT})
        return self._sql.execute("DELETE FROM records WHERE key NOT IN (SELECT key FROM named)").rowcount

    def reachable(self) -> Iterator[tuple[bytes, RecordRow | None]]:
        """All records and their keys, parents first and depth first; None for a row that broke, and for those below."""
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
        """The records of a segment by their keys, in the order in which they lie; None for rows that broke."""
        return self._rows("segment = ? ORDER BY block", segment)

    def rows_of(self, namespace: bytes) -> dict[bytes, RecordRow | None]:
        """The records of a namespace by their keys; None for rows that broke."""
        return self._rows("namespace = ?", namespace)

    def rows_of_kind(self, kind: Kind) -> dict[bytes, RecordRow | None]:
        """The records of a kind by their keys, the one used longest ago first; None for rows that broke."""
        return self._rows("kind = ? ORDER BY last_used, segment, block", int(kind))

    def num_pages(self) -> dict[int, int]:
        """How many pages each segment has that has any."""
        sql = f"SELECT segment, count(*) FROM records WHERE kind = {Kind.PAGE:d} GROUP BY segment"
        return dict(self._sql.execute(sql).fetchall())

    def num_blocks(self) -> dict[int, int]:
        """How many blocks the records of each segment take that has any."""
        return dict(self._sql.execute("SELECT segment, sum(num_blocks) FROM records GROUP BY segment").fetchall())

    def are_empty(self, segments: Collection[int]) -> list[int]:
        """Those of these segments that have no record."""
        sql = "SELECT 1 FROM records WHERE segment = ? LIMIT 1"
        return [number for number in segments if self._sql.execute(sql, (number,)).fetchone() is None]

    def last_use(self) -> int:
        """The largest count of uses."""
        sql = (
            "SELECT max(coalesce((SELECT max(last_used) FROM records), 0), "
            "coalesce((SELECT max(sealed_at) FROM segments), 0))"
        )
        return int(self._sql.execute(sql).fetchone()[0])

    # Segments.

    def segments(self) -> dict[int, SegmentRow]:
        """All segments by their numbers, in order."""
        rows = self._sql.execute(f"SELECT {_SEGMENT_COLUMNS} FROM segments ORDER BY number")
        return {row[0]: SegmentRow(row[0], row[1], row[2], bool(row[3]), row[4]) for row in rows}

    def put_segments(self, rows: Iterable[SegmentRow]) -> None:
        """Add segments, or change what is known of them."""
        self._sql.executemany(
            "INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?, ?)",
            ((row.number, row.num_blocks, row.sealed_at, row.is_doomed, row.begun_at) for row in rows),
        )

    def remove_segment(self, number: int) -> None:
        """Forget a segment, and the records that are said to be in it."""
        self._sql.execute("DELETE FROM segments WHERE number = ?", (number,))
        self._sql.execute("DELETE FROM records WHERE segment = ?", (number,))

    def cut_segment(self, number: int, num_blocks: int) -> tuple[int, int]:
        """Forget records that end behind a segment's end: how many, and where the last of the others ends."""
        sql = "DELETE FROM records WHERE segment = ? AND block + num_blocks > ?"
        num_cut = self._sql.execute(sql, (number, num_blocks)).rowcount
        sql = "SELECT coalesce(max(block + num_blocks), 0) FROM records WHERE segment = ?"
        return num_cut, int(self._sql.execute(sql, (number,)).fetchone()[0])

    def _rows_with(self, which: str, values: Sequence[bytes | int]) -> list[RecordRow]:
        rows: list[RecordRow | None] = []
        for first in range(0, len(values), _NUM_KEYS):
            some = values[first : first + _NUM_KEYS]
            where = f"{which} IN ({','.join('?' * len(some))})"
            found = self._sql.execute(f"SELECT {_COLUMNS} FROM records WHERE {where}", some)
            rows += [RecordRow.of(columns) for columns in found]
        return [row for row in rows if row is not None]

    def _located(self, which: str, keys: Sequence[bytes]) -> Iterator[Located]:
        for first in range(0, len(keys), _NUM_KEYS):
            some = keys[first : first + _NUM_KEYS]
            yield from self._all_located(f"{which} IN ({','.join('?' * len(some))})", some)

    def _all_located(self, where: str, values: Sequence[bytes] = ()) -> list[Located]:
        columns = "key, kind, parent, segment, block, num_blocks"
        rows = self._sql.execute(f"SELECT {columns} FROM records WHERE {where}", values)
        return [
            Located(key, kind, parent, Place(*at))
            for key, kind, parent, *at in rows
            if all(type(part) is int for part in at)
        ]

    def _rows(self, where: str, value: bytes | int) -> dict[bytes, RecordRow | None]:
        rows = self._sql.execute(f"SELECT {_COLUMNS} FROM records WHERE {where}", (value,))
        return {values[0]: RecordRow.of(values) for values in rows}


def is_broken(error: Exception) -> bool:
    """Whether an error says that the index itself is wrong, not the disk or the caller: it has to be made again."""
    if isinstance(error, sqlite3.IntegrityError | StoreCorrupt):
        return True
    code = getattr(error, "sqlite_errorcode", None)  # the low byte is the kind, the others say more
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
