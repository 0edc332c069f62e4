"""Which pages are on disk and where, in SQLite: found by key, changed in transactions, readable beside a server.

Knows rows; reads and writes no pages. The segments are the truth and this is a list of them: when it is lost or broken
it is made again from their headers. SQLite, because it is in the standard library, keeps what was committed through any
crash, and lets `radixlm store ls` read while a server writes (WAL). In that mode `synchronous=NORMAL` may lose the last
commits with the power; then the segments' tails are read again, as after any crash. Each row has a checksum, for SQLite
has none.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ..errors import StoreCorrupt
from .index_rows import PageRow, SegmentRow
from .page_key import NO_PARENT
from .record import Place

FORMAT_VERSION: Final = 1
_NUM_KEYS: Final = 500  # in one query; SQLite takes 999 values at least
_SCHEMA: Final = f"""
CREATE TABLE segments (
    number INTEGER PRIMARY KEY,
    num_records INTEGER NOT NULL,  -- written before the last commit; what the file has behind them is a tail
    sealed_at INTEGER,             -- the count of uses then; NULL: pages are still appended
    is_doomed INTEGER NOT NULL DEFAULT 0,  -- its pages are gone or elsewhere; the file goes after the commit
    begun_at REAL NOT NULL         -- seconds since 1970, for people
);
CREATE TABLE pages (
    key BLOB PRIMARY KEY,
    parent BLOB NOT NULL,
    namespace BLOB NOT NULL,
    token_ids BLOB NOT NULL,
    generated BLOB NOT NULL,
    segment INTEGER NOT NULL,
    number INTEGER NOT NULL,
    last_used INTEGER NOT NULL,
    row_check BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX pages_by_parent ON pages(parent);
CREATE INDEX pages_by_place ON pages(segment, number);
PRAGMA user_version = {FORMAT_VERSION};
"""
_COLUMNS: Final = "key, parent, namespace, token_ids, generated, segment, number, last_used, row_check"


class Index:
    """One connection. Methods that change something do so inside of `transaction`, or alone.

    All raise sqlite3.Error where the file is broken or the disk fails.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._sql = connection

    @classmethod
    def open(cls, path: Path) -> Index:
        """The index of a directory; a new one where there is none.

        Raises:
            StoreCorrupt: it is broken, or of another version; make it again.
        """
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite's other files take on its mode
        sql = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            sql.execute("PRAGMA journal_mode = WAL")
            sql.execute("PRAGMA synchronous = NORMAL")
            sql.execute("PRAGMA secure_delete = ON")  # the tokens of pages are what people said
            version = sql.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                sql.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
            elif version != FORMAT_VERSION:
                raise StoreCorrupt(f"{path} has version {version}, this radixlm reads {FORMAT_VERSION}; remove it")
            if sql.execute("PRAGMA integrity_check(1)").fetchone()[0] != "ok":
                raise StoreCorrupt(f"{path} is broken; remove it, and it is made again")
            sql.execute("CREATE TEMP TABLE named (key BLOB PRIMARY KEY) WITHOUT ROWID")
            _check_tables(sql)
        except StoreCorrupt:
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
        """The same beside whoever writes it; it sees what was committed, and changes nothing."""
        sql = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
        )
        return cls(sql)

    def close(self) -> None:
        """End the connection."""
        self._sql.close()

    def forget(self) -> None:
        """Leave nothing on disk of the rows that were removed, and lose none of that with the power."""
        self._sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All changes inside of it at once, or none."""
        self._sql.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._sql.in_transaction:
                self._sql.execute("ROLLBACK")
            raise
        self._sql.execute("COMMIT")

    # Pages.

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Place]:
        """Where those pages lie that are there."""
        found: dict[bytes, Place] = {}
        for first in range(0, len(keys), _NUM_KEYS):
            some = keys[first : first + _NUM_KEYS]
            marks = ",".join("?" * len(some))
            rows = self._sql.execute(f"SELECT key, segment, number FROM pages WHERE key IN ({marks})", some)
            found.update((key, Place(segment, number)) for key, segment, number in rows)
        return found

    def put(self, rows: Iterable[PageRow]) -> None:
        """Add pages, each instead of the one that had its key."""
        marks = ",".join("?" * 9)
        self._sql.executemany(
            f"INSERT OR REPLACE INTO pages ({_COLUMNS}) VALUES ({marks})", (row.values() for row in rows)
        )

    def remove(self, keys: Iterable[bytes]) -> dict[bytes, Place]:
        """Take out pages and all that come after them, for nobody could find those; all that were there, and where."""
        removed = self.below(keys)
        self._sql.execute("DELETE FROM pages WHERE key IN (SELECT key FROM named)")
        return removed

    def below(self, keys: Iterable[bytes]) -> dict[bytes, Place]:
        """These pages and all that come after them, as far as they are there, and where they lie."""
        self._name(keys)
        self._sql.execute(
            "WITH RECURSIVE below(key) AS (SELECT key FROM named UNION "
            "SELECT pages.key FROM below CROSS JOIN pages ON pages.parent = below.key) "
            "INSERT OR IGNORE INTO named SELECT key FROM below"
        )
        rows = self._sql.execute("SELECT key, segment, number FROM pages WHERE key IN (SELECT key FROM named)")
        return {key: Place(segment, number) for key, segment, number in rows}

    def remove_unreachable(self) -> int:
        """Take out pages without all the pages before them; how many there were."""
        self._sql.execute("DELETE FROM named")
        self._sql.execute(f"INSERT INTO named {_REACHED} SELECT key FROM reached", (NO_PARENT,))
        return self._sql.execute("DELETE FROM pages WHERE key NOT IN (SELECT key FROM named)").rowcount

    def pages(self) -> Iterator[tuple[bytes, PageRow | None]]:
        """All pages that can be reached and their keys, each after the one before it in its prompt; None for a row that
        broke, and for those that come after it."""
        broken: set[bytes] = set()
        columns = ", ".join(f"pages.{name}" for name in _COLUMNS.split(", "))
        for values in self._sql.execute(
            f"{_REACHED} SELECT {columns} FROM reached CROSS JOIN pages ON pages.key = reached.key", (NO_PARENT,)
        ):
            row = PageRow.of(values)
            if row is None or row.head.parent_key in broken:
                broken.add(values[0])
                yield values[0], None
            else:
                yield values[0], row

    def pages_in(self, segment: int) -> dict[bytes, PageRow | None]:
        """The pages in a segment by their keys, in the order of their records; None for rows that broke."""
        rows = self._sql.execute(f"SELECT {_COLUMNS} FROM pages WHERE segment = ? ORDER BY number", (segment,))
        return {values[0]: PageRow.of(values) for values in rows}

    def pages_of(self, namespace: bytes) -> dict[bytes, PageRow | None]:
        """The pages of a namespace by their keys; None for rows that broke."""
        rows = self._sql.execute(f"SELECT {_COLUMNS} FROM pages WHERE namespace = ?", (namespace,))
        return {values[0]: PageRow.of(values) for values in rows}

    def touch(self, keys: Iterable[bytes], use: int) -> None:
        """Note that pages were used, and so were all those before them in their prompts."""
        self._name(keys)
        self._sql.execute(
            "WITH RECURSIVE up(key) AS (SELECT key FROM named UNION "
            "SELECT pages.parent FROM up CROSS JOIN pages ON pages.key = up.key) "
            "UPDATE pages SET last_used = ? WHERE last_used < ? AND key IN (SELECT key FROM up)",
            (use, use),
        )

    def _name(self, keys: Iterable[bytes]) -> None:
        """Fill the table that the next statement takes its keys from."""
        self._sql.execute("DELETE FROM named")
        self._sql.executemany("INSERT OR IGNORE INTO named VALUES (?)", ((key,) for key in keys))

    def num_pages(self) -> dict[int, int]:
        """How many pages each segment has that has any."""
        return dict(self._sql.execute("SELECT segment, count(*) FROM pages GROUP BY segment").fetchall())

    def last_use(self) -> int:
        """The largest count of uses."""
        return int(
            self._sql.execute(
                "SELECT max(coalesce((SELECT max(last_used) FROM pages), 0), "
                "coalesce((SELECT max(sealed_at) FROM segments), 0))"
            ).fetchone()[0]
        )

    # Segments.

    def segments(self) -> dict[int, SegmentRow]:
        """All segments by their numbers, in order."""
        rows = self._sql.execute(
            "SELECT number, num_records, sealed_at, is_doomed, begun_at FROM segments ORDER BY number"
        )
        return {row[0]: SegmentRow(row[0], row[1], row[2], bool(row[3]), row[4]) for row in rows}

    def put_segments(self, rows: Iterable[SegmentRow]) -> None:
        """Add segments, or change what is known of them."""
        self._sql.executemany(
            "INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?, ?)",
            ((row.number, row.num_records, row.sealed_at, row.is_doomed, row.begun_at) for row in rows),
        )

    def remove_segment(self, number: int) -> None:
        """Forget a segment, and pages that are said to be in it."""
        self._sql.execute("DELETE FROM segments WHERE number = ?", (number,))
        self._sql.execute("DELETE FROM pages WHERE segment = ?", (number,))

    def cut_segment(self, number: int, num_records: int) -> None:
        """Forget pages that are said to be in a segment behind its end."""
        self._sql.execute("DELETE FROM pages WHERE segment = ? AND number >= ?", (number, num_records))


def is_broken(error: Exception) -> bool:
    """Whether an error says that the index itself is wrong, not the disk or a caller: then a new one must be made."""
    if isinstance(error, sqlite3.IntegrityError | StoreCorrupt):
        return True
    code = getattr(error, "sqlite_errorcode", None)  # the low byte is the kind, the others say more
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


_REACHED: Final = (
    "WITH RECURSIVE reached(key) AS (SELECT key FROM pages WHERE parent = ? UNION "
    "SELECT pages.key FROM reached CROSS JOIN pages ON pages.parent = reached.key)"
)


def _check_tables(sql: sqlite3.Connection) -> None:
    """Raise sqlite3.OperationalError if a table or column is missing."""
    sql.execute(f"SELECT {_COLUMNS} FROM pages LIMIT 0")
    sql.execute("SELECT number, num_records, sealed_at, is_doomed, begun_at FROM segments LIMIT 0")
