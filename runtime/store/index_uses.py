"""Note in the index when records were used last: a page at least as late as all pages that go on from it.

A prefix that grows is used with each of its pages, so writing that to all pages before them would take the square of
its length. Each use is written to the page itself, and to the pages before it when uses are compared: before an
eviction, and at the end. Knows keys and counts of uses; not what is evicted.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from .record import Kind

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
