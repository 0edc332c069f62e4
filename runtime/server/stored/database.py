"""The SQLite database of responses, conversations, files and batches: in a file, or in memory.

Knows a connection and its thread, not what the rows mean. SQLite is in the standard library, and committed changes
survive a crash.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sqlite3
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Final, TypeVar

from ...cache.cache_namespace import CacheNamespaces, CacheScope, ModelIdentity
from ...errors import StoreOff

T = TypeVar("T")
_LOGGER = logging.getLogger(__name__)

FILE: Final = "responses.sqlite"
_LEAVES: Final = (
    "SELECT id, owner, used_at, created_at FROM turns "
    "WHERE NOT EXISTS (SELECT 1 FROM turns AS later WHERE later.parent = turns.id) "
    "AND NOT EXISTS (SELECT 1 FROM conversations WHERE head = turns.id)"
)
_ADDED: Final = (
    "INSERT INTO totals VALUES (x'', 1, {num_bytes}), (new.owner, 1, {num_bytes}) ON CONFLICT(owner) DO UPDATE "
    "SET num_rows = num_rows + 1, num_bytes = num_bytes + excluded.num_bytes;"
)
_REMOVED: Final = (
    "UPDATE totals SET num_rows = num_rows - 1, num_bytes = num_bytes - {num_bytes} WHERE owner IN (x'', old.owner); "
    "DELETE FROM totals WHERE owner = old.owner AND num_rows = 0;"
)
_MIGRATIONS: Final = (
    """
CREATE TABLE secret (value BLOB NOT NULL);
-- A response, or items that a client put into a conversation. Lengths and times come first: behind a large value they
-- would be on another page of the file.
CREATE TABLE turns (
    id TEXT PRIMARY KEY,
    parent TEXT,               -- what it goes on from
    owner BLOB NOT NULL,
    namespace BLOB NOT NULL,   -- of the prefix cache: forgotten with it
    created_at REAL NOT NULL,  -- seconds since 1970, as all times
    used_at REAL NOT NULL,
    num_bytes INTEGER NOT NULL,
    gone TEXT,                 -- why it is not found any more, though later turns go on from it
    setup BLOB,                -- what its prompt depends on besides the items; NULL: no ids are kept
    num_shared INTEGER NOT NULL,  -- first ids that are those of the parent
    token_ids BLOB,            -- the others, of prompt and reply; NULL: all are the parent's
    items BLOB NOT NULL,       -- that were sent, as a JSON array
    response BLOB              -- as JSON; NULL: there is none
);
CREATE INDEX turns_by_parent ON turns(parent);
CREATE INDEX turns_by_owner ON turns(owner, used_at, num_bytes);
CREATE INDEX turns_by_namespace ON turns(namespace);
CREATE TABLE conversations (
    id TEXT PRIMARY KEY,
    owner BLOB NOT NULL,
    namespace BLOB NOT NULL,
    created_at REAL NOT NULL,
    used_at REAL NOT NULL,
    head TEXT,                 -- its last turn; NULL: it is empty
    metadata BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX conversations_by_head ON conversations(head);
CREATE TABLE gone (id TEXT PRIMARY KEY, owner BLOB NOT NULL, why TEXT NOT NULL, at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE files (
    id TEXT PRIMARY KEY,
    owner BLOB NOT NULL,
    created_at REAL NOT NULL,
    num_bytes INTEGER NOT NULL,
    name TEXT NOT NULL,
    purpose TEXT NOT NULL,
    content BLOB NOT NULL
);
CREATE TABLE batches (
    id TEXT PRIMARY KEY,
    owner BLOB NOT NULL,
    created_at REAL NOT NULL,
    is_open INTEGER NOT NULL,  -- it has requests that are to be answered
    value BLOB NOT NULL        -- as JSON
) WITHOUT ROWID;
CREATE TABLE batch_answers (
    batch TEXT NOT NULL,
    number INTEGER NOT NULL,   -- of the request's line
    is_error INTEGER NOT NULL,
    line BLOB NOT NULL,
    PRIMARY KEY (batch, number)
) WITHOUT ROWID;
""",
    f"""
-- What makes room for a turn. Triggers write it, so that storing a turn reads no others.
CREATE TABLE totals (
    owner BLOB PRIMARY KEY,    -- empty: of all owners
    num_rows INTEGER NOT NULL, -- of turns and conversations
    num_bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX totals_by_rows ON totals(num_rows);
CREATE INDEX totals_by_bytes ON totals(num_bytes);
CREATE TABLE leaves (          -- turns that no turn and no conversation goes on from
    id TEXT PRIMARY KEY,
    owner BLOB NOT NULL,
    used_at REAL NOT NULL,
    created_at REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX leaves_by_owner ON leaves(owner, used_at, created_at);
CREATE INDEX conversations_by_owner ON conversations(owner, used_at);
INSERT INTO totals VALUES (x'', 0, 0);
INSERT INTO totals SELECT owner, count(*), sum(num_bytes) FROM (
    SELECT owner, num_bytes FROM turns UNION ALL SELECT owner, length(metadata) FROM conversations
) GROUP BY owner;
UPDATE totals SET (num_rows, num_bytes) = (SELECT sum(num_rows), sum(num_bytes) FROM totals) WHERE owner = x'';
INSERT INTO leaves {_LEAVES};
CREATE TRIGGER turn_added AFTER INSERT ON turns BEGIN
    {_ADDED.format(num_bytes="new.num_bytes")}
    INSERT INTO leaves VALUES (new.id, new.owner, new.used_at, new.created_at);
    DELETE FROM leaves WHERE id = new.parent;
END;
CREATE TRIGGER turn_used AFTER UPDATE OF used_at ON turns BEGIN
    UPDATE leaves SET used_at = new.used_at WHERE id = new.id;
END;
CREATE TRIGGER turn_resized AFTER UPDATE OF num_bytes ON turns BEGIN
    UPDATE totals SET num_bytes = num_bytes + new.num_bytes - old.num_bytes WHERE owner IN (x'', old.owner);
END;
CREATE TRIGGER turn_removed AFTER DELETE ON turns BEGIN
    {_REMOVED.format(num_bytes="old.num_bytes")}
    DELETE FROM leaves WHERE id = old.id;
    INSERT INTO leaves {_LEAVES} AND id = old.parent;
END;
CREATE TRIGGER conversation_added AFTER INSERT ON conversations BEGIN
    {_ADDED.format(num_bytes="length(new.metadata)")}
    DELETE FROM leaves WHERE id = new.head;
END;
CREATE TRIGGER conversation_moved AFTER UPDATE OF head ON conversations BEGIN
    INSERT OR IGNORE INTO leaves {_LEAVES} AND id = old.head;
    DELETE FROM leaves WHERE id = new.head;
END;
CREATE TRIGGER conversation_changed AFTER UPDATE OF metadata ON conversations BEGIN
    UPDATE totals SET num_bytes = num_bytes + length(new.metadata) - length(old.metadata)
        WHERE owner IN (x'', old.owner);
END;
CREATE TRIGGER conversation_removed AFTER DELETE ON conversations BEGIN
    {_REMOVED.format(num_bytes="length(old.metadata)")}
    INSERT OR IGNORE INTO leaves {_LEAVES} AND id = old.head;
END;
""",
)
"""Scripts that made each version of the schema from the one before it; the first from an empty file."""

Work = Callable[[sqlite3.Connection], T]


class Database:
    """One connection, opened on first use, and the thread in which all work runs in order.

    Args:
        directory: directory of the file; None for a database in memory, which is lost with this object.
        clock: returns seconds since 1970.
    """

    def __init__(self, directory: Path | None, *, clock: Callable[[], float] = time.time) -> None:
        self.path = None if directory is None else directory / FILE
        self.clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="radixlm-responses")
        self._connection: sqlite3.Connection | None = None
        self._owners: CacheNamespaces | None = None
        self._closing: weakref.finalize[..., Any] = weakref.finalize(self, self._thread.shutdown, wait=False)

    def submit(self, work: Work[T]) -> Future[T]:
        """Run `work` in the thread as one transaction. The future raises StoreOff if the disk fails."""
        return self._thread.submit(self._do, work)

    async def run(self, work: Work[T]) -> T:
        """Run `work` in the thread as one transaction, and return its result. Raises StoreOff if the disk fails."""
        return await asyncio.wrap_future(self.submit(work))

    def owner(self, scope: CacheScope) -> bytes:
        """Return the owner id of a client's rows, which reveals nothing of its key. Only within work."""
        assert self._owners is not None, "nothing was opened"
        return self._owners.of(scope)

    def _do(self, work: Work[T]) -> T:
        try:
            if self._connection is None:
                self._open()
            sql = self._connection
            assert sql is not None
            sql.execute("BEGIN IMMEDIATE")
            try:
                result = work(sql)
                sql.execute("COMMIT")
                return result
            except BaseException:
                if sql.in_transaction:
                    sql.execute("ROLLBACK")
                raise
        except StoreOff as error:
            _LOGGER.error("%s", error)
            raise
        except (sqlite3.Error, OSError) as error:
            _LOGGER.error("%s cannot be used: %s", self.path or "memory", error)
            raise StoreOff(f"stored responses and files cannot be read or written: {type(error).__name__}") from error

    def _open(self) -> None:
        try:
            connection, secret = _opened(self.path)
        except sqlite3.DatabaseError as error:
            if self.path is None or isinstance(error, sqlite3.OperationalError):
                raise
            aside = _set_aside(self.path)
            _LOGGER.error(
                "%s is damaged (%s); it was renamed to %s, and a new file is created", self.path, error, aside.name
            )
            connection, secret = _opened(self.path)
        self._connection, self._owners = connection, CacheNamespaces(ModelIdentity(), secret)
        self._closing.detach()
        self._closing = weakref.finalize(self, _close, self._thread, connection)


def _opened(path: Path | None) -> tuple[sqlite3.Connection, bytes]:
    """Return a connection, and the secret stored in the database. Migrates a database of an older version.

    Raises:
        StoreOff: the database has a newer version; it is left as it is.
        sqlite3.DatabaseError: it is damaged, or, if it is an OperationalError, the disk failed.
    """
    if path is not None:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite's other files get the same mode
        _require_known(path)
    sql = sqlite3.connect(":memory:" if path is None else path, isolation_level=None, check_same_thread=False)
    try:
        sql.execute("PRAGMA journal_mode = WAL")
        sql.execute("PRAGMA synchronous = NORMAL")
        sql.execute("PRAGMA secure_delete = ON")  # the data is private
        _migrate(sql)
        if sql.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("its check failed")
        with closing(sql.execute("SELECT value FROM secret")) as rows:
            found = rows.fetchone()
        if found is None:
            raise sqlite3.DatabaseError("it has no secret")
        return sql, bytes(found[0])
    except BaseException:
        sql.close()
        raise


def _require_known(path: Path) -> None:
    """Raise StoreOff if a database has a newer version. Reads only: a writer would move its log into the file."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as sql:
        version = _version(sql)
    if version > len(_MIGRATIONS):
        raise StoreOff(
            f"{path.name} has version {version}, and this radixlm reads versions up to {len(_MIGRATIONS)}; update "
            "radixlm, or move the file away to start with an empty one"
        )


def _migrate(sql: sqlite3.Connection) -> None:
    """Bring a database to the current version, in one transaction."""
    version = _version(sql)
    if version == len(_MIGRATIONS):
        return
    scripts = [*_MIGRATIONS[version:]]
    if version == 0:
        scripts.append(f"INSERT INTO secret VALUES (x'{secrets.token_hex(32)}');")
    sql.executescript(f"BEGIN IMMEDIATE; {''.join(scripts)} PRAGMA user_version = {len(_MIGRATIONS)}; COMMIT;")


def _version(sql: sqlite3.Connection) -> int:
    """Return the version of a database's schema; 0 for an empty file."""
    version: int = sql.execute("PRAGMA user_version").fetchone()[0]
    if version < 0:
        raise sqlite3.DatabaseError(f"its version is {version}")
    return version


def _set_aside(path: Path) -> Path:
    """Rename a damaged database and its write-ahead log, which can have changes that are not in the file yet."""
    aside = path.with_suffix(".broken")
    log, log_aside = Path(f"{path}-wal"), Path(f"{aside}-wal")
    log_aside.unlink(missing_ok=True)  # an earlier file's
    if log.exists():
        os.replace(log, log_aside)  # first: the next file must not find it
    os.replace(path, aside)
    for name in (path, aside):
        Path(f"{name}-shm").unlink(missing_ok=True)
    return aside


def _close(thread: ThreadPoolExecutor, connection: sqlite3.Connection) -> None:
    thread.shutdown(wait=False)
    connection.close()
