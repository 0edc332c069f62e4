"""Store files that clients upload, and the output of batches. Knows bytes and names, not the contents."""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec

from ...cache.cache_namespace import CacheScope
from ..errors import HTTPError
from ..request_log import new_id
from .database import Database


class FileReply(msgspec.Struct, kw_only=True):
    """A file, without its content."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str = "processed"
    object: str = "file"


MAX_FILES = 10_000  # of all clients: empty ones take room, too
_COLUMNS = "id, num_bytes, created_at, name, purpose"


class Files:
    """The files of all clients. A client sees only its own.

    Methods raise StoreOff if the disk fails, and HTTPError 404 if there is no such file.

    Args:
        max_bytes: limit for all files together. A file that does not fit is refused; none is evicted for it.
        ttl_s: seconds until a file is deleted.
    """

    def __init__(self, database: Database, *, max_bytes: int, ttl_s: float) -> None:
        self._database, self._max_bytes, self._ttl_s = database, max_bytes, ttl_s

    async def add(self, scope: CacheScope, name: str, purpose: str, content: bytes) -> FileReply:
        """Store a file.

        Raises:
            HTTPError: 413 if it does not fit.
        """

        def write(sql: sqlite3.Connection) -> FileReply:
            self._expire(sql)
            count, num_bytes = sql.execute("SELECT count(*), coalesce(sum(num_bytes), 0) FROM files").fetchone()
            if count >= MAX_FILES:
                message = f"there are {count} files, at most {MAX_FILES} are stored; delete other files"
                raise HTTPError(413, message, param="file", code="storage_full")
            if num_bytes + len(content) > self._max_bytes:
                message = (
                    f"the file has {len(content)} bytes, and {max(0, self._max_bytes - num_bytes)} of "
                    f"{self._max_bytes} are free; delete other files"
                )
                raise HTTPError(413, message, param="file", code="storage_full")
            return self.write(sql, self._database.owner(scope), name, purpose, content)

        return await self._database.run(write)

    async def all(self, scope: CacheScope) -> list[FileReply]:
        """Return all files of a client, oldest first."""

        def read(sql: sqlite3.Connection) -> list[FileReply]:
            self._expire(sql)
            rows = sql.execute(
                f"SELECT {_COLUMNS} FROM files WHERE owner = ? ORDER BY created_at, id", (self._database.owner(scope),)
            )
            return [self._reply(row) for row in rows]

        return await self._database.run(read)

    async def get(self, scope: CacheScope, file_id: str) -> FileReply:
        """Return the description of a file."""

        def read(sql: sqlite3.Connection) -> FileReply:
            return self._reply(self._row(sql, self._database.owner(scope), file_id, _COLUMNS))

        return await self._database.run(read)

    async def content(self, scope: CacheScope, file_id: str) -> bytes:
        """Return the bytes of a file."""
        return await self._database.run(lambda sql: self.read(sql, self._database.owner(scope), file_id))

    async def delete(self, scope: CacheScope, file_id: str) -> None:
        """Delete a file."""

        def remove(sql: sqlite3.Connection) -> None:
            self._row(sql, self._database.owner(scope), file_id, "id")
            sql.execute("DELETE FROM files WHERE id = ?", (file_id,))

        await self._database.run(remove)

    # The methods below run within work of the database.

    def read(self, sql: sqlite3.Connection, owner: bytes, file_id: str) -> bytes:
        """Return the bytes of an owner's file."""
        return bytes(self._row(sql, owner, file_id, "content")[0])

    def write(self, sql: sqlite3.Connection, owner: bytes, name: str, purpose: str, content: bytes) -> FileReply:
        """Store a file without checking the limit."""
        row = (new_id("file-"), len(content), self._database.clock(), name, purpose)
        sql.execute(
            f"INSERT INTO files ({_COLUMNS}, owner, content) VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, owner, content)
        )
        return self._reply(row)

    def _row(self, sql: sqlite3.Connection, owner: bytes, file_id: str, columns: str) -> Any:
        self._expire(sql)
        row = sql.execute(f"SELECT {columns} FROM files WHERE id = ? AND owner = ?", (file_id, owner)).fetchone()
        if row is None:
            message = f"there is no file {file_id!r:.80}; it was deleted, or has expired"
            raise HTTPError(404, message, param="file_id", code="file_not_found")
        return row

    def _expire(self, sql: sqlite3.Connection) -> None:
        sql.execute("DELETE FROM files WHERE created_at < ?", (self._database.clock() - self._ttl_s,))

    def _reply(self, row: Any) -> FileReply:
        file_id, num_bytes, created_at, name, purpose = row
        expires_at = int(created_at + self._ttl_s)
        return FileReply(
            id=file_id,
            bytes=num_bytes,
            created_at=int(created_at),
            expires_at=expires_at,
            filename=name,
            purpose=purpose,
        )
