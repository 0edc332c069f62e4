"""Store batches: a file of requests, and the results so far. They survive a restart at any time.

Knows lines and states. `batch_runner.py` processes the requests.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from ...cache.cache_namespace import CacheScope
from ..errors import HTTPError
from ..request_log import new_id
from .database import Database
from .files import Files

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
MAX_BATCHES: Final = 1000  # per client; the oldest that have ended are deleted
MAX_OPEN: Final = 100  # per client
MAX_OUTPUT_BYTES: Final = 500_000_000  # of a batch's output file, and of its error file; SQLite takes twice that
WINDOW_S: Final = 86400.0
WINDOW: Final = "24h"


class RequestCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchFault(msgspec.Struct):
    """An error in a batch's file; `line` is None if it concerns the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchFaults(msgspec.Struct):
    data: list[BatchFault]
    object: str = "list"


class BatchReply(msgspec.Struct, kw_only=True):
    """A batch in OpenAI's format."""

    id: str
    endpoint: str
    input_file_id: str
    status: BatchStatus
    created_at: int
    expires_at: int
    completion_window: str = WINDOW
    errors: BatchFaults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None
    object: str = "batch"

    @property
    def is_open(self) -> bool:
        """Return whether the batch has not ended."""
        return self.status in ("validating", "in_progress", "finalizing", "cancelling")


@dataclass(frozen=True)
class OpenBatch:
    """A batch that has not ended.

    Attributes:
        content: bytes of its file; None if the file was deleted.
        answered: the numbers of the lines that have a result.
    """

    owner: bytes
    batch: BatchReply
    content: bytes | None
    answered: Collection[int]


class Batches:
    """The batches of all clients. A client sees only its own.

    Methods raise StoreOff if the disk fails, and HTTPError 404 if there is no such batch.
    """

    def __init__(self, database: Database, files: Files) -> None:
        self._database, self._files = database, files

    async def create(
        self, scope: CacheScope, endpoint: str, input_file_id: str, metadata: dict[str, str] | None
    ) -> BatchReply:
        """Create a batch.

        Raises:
            HTTPError: 429 if the client has too many open batches.
        """

        def write(sql: sqlite3.Connection) -> BatchReply:
            owner, now = self._database.owner(scope), int(self._database.clock())
            self._files.read(sql, owner, input_file_id)
            count = "SELECT count(*) FROM batches WHERE owner = ? AND is_open"
            if sql.execute(count, (owner,)).fetchone()[0] >= MAX_OPEN:
                raise HTTPError(429, f"{MAX_OPEN} batches are open; wait for one to end", code="rate_limit_exceeded")
            batch = BatchReply(
                id=new_id("batch_"),
                endpoint=endpoint,
                input_file_id=input_file_id,
                status="validating",
                created_at=now,
                expires_at=now + int(WINDOW_S),
                metadata=metadata,
            )
            values = (batch.id, owner, self._database.clock(), True, msgspec.json.encode(batch))
            sql.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?)", values)
            sql.execute(
                "DELETE FROM batches WHERE NOT is_open AND id IN (SELECT id FROM batches WHERE owner = ? "
                "ORDER BY created_at DESC LIMIT -1 OFFSET ?)",
                (owner, MAX_BATCHES),
            )
            return batch

        return await self._database.run(write)

    async def all(self, scope: CacheScope) -> list[BatchReply]:
        """Return all batches of a client, oldest first."""

        def read(sql: sqlite3.Connection) -> list[BatchReply]:
            owner = self._database.owner(scope)
            rows = sql.execute("SELECT value FROM batches WHERE owner = ? ORDER BY created_at, id", (owner,))
            return [_decoded(row) for row in rows]

        return await self._database.run(read)

    async def get(self, scope: CacheScope, batch_id: str) -> BatchReply:
        """Return the state of a batch."""
        return await self._database.run(lambda sql: self._own(sql, self._database.owner(scope), batch_id))

    async def cancel(self, scope: CacheScope, batch_id: str) -> BatchReply:
        """Cancel a batch: no more of its requests are started.

        Raises:
            HTTPError: 409 if it has ended.
        """

        def write(sql: sqlite3.Connection) -> BatchReply:
            batch = self._own(sql, self._database.owner(scope), batch_id)
            if not batch.is_open:
                raise HTTPError(409, f"the batch is {batch.status}, and cannot be cancelled", code="batch_ended")
            if batch.status != "cancelling":
                batch.status, batch.cancelling_at = "cancelling", int(self._database.clock())
            self._put(sql, batch)
            return batch

        return await self._database.run(write)

    async def next_open(self) -> OpenBatch | None:
        """Return the oldest batch that has not ended, or None."""

        def read(sql: sqlite3.Connection) -> OpenBatch | None:
            row = sql.execute("SELECT value, owner FROM batches WHERE is_open ORDER BY created_at LIMIT 1").fetchone()
            if row is None:
                return None
            batch, owner = _decoded(row), bytes(row[1])
            try:
                content = self._files.read(sql, owner, batch.input_file_id)
            except HTTPError:
                content = None
            numbers = sql.execute("SELECT number FROM batch_answers WHERE batch = ?", (batch.id,))
            return OpenBatch(owner, batch, content, frozenset(number for (number,) in numbers))

        return await self._database.run(read)

    async def owners(self, scopes: Collection[CacheScope]) -> dict[bytes, CacheScope]:
        """Return the scopes by owner id."""
        return await self._database.run(lambda sql: {self._database.owner(scope): scope for scope in scopes})

    async def answer(self, batch_id: str, number: int, line: bytes, *, is_error: bool) -> bool:
        """Store the result of a line. Returns whether to continue the batch."""

        def write(sql: sqlite3.Connection) -> bool:
            sql.execute("INSERT OR REPLACE INTO batch_answers VALUES (?, ?, ?, ?)", (batch_id, number, is_error, line))
            batch = self._any(sql, batch_id)
            batch.request_counts.failed += is_error
            batch.request_counts.completed += not is_error
            self._put(sql, batch)
            return self._goes_on(batch)

        return await self._database.run(write)

    async def goes_on(self, batch_id: str) -> bool:
        """Return whether to continue a batch: it is neither cancelled nor has it expired."""
        return await self._database.run(lambda sql: self._goes_on(self._any(sql, batch_id)))

    async def change(self, batch_id: str, change: Callable[[BatchReply, int], None]) -> BatchReply:
        """Apply a change, a function of the batch and the time, and return the new state."""

        def write(sql: sqlite3.Connection) -> BatchReply:
            batch = self._any(sql, batch_id)
            change(batch, int(self._database.clock()))
            self._put(sql, batch)
            return batch

        return await self._database.run(write)

    async def end(self, owner: bytes, batch_id: str, status: BatchStatus, late: Mapping[int, bytes]) -> None:
        """Write the results to output files, and set the final status: `failed` if they are too large to be stored.

        Args:
            late: by line number, the error line for a request without a result.
        """

        def write(sql: sqlite3.Connection) -> None:
            batch = self._any(sql, batch_id)
            unanswered = [(batch_id, number, True, line) for number, line in late.items()]
            added = sql.executemany("INSERT OR IGNORE INTO batch_answers VALUES (?, ?, ?, ?)", unanswered)
            batch.request_counts.failed += max(0, added.rowcount)
            sizes = "SELECT coalesce(max(bytes), 0) FROM (SELECT sum(length(line) + 1) AS bytes FROM batch_answers "
            sizes += "WHERE batch = ? GROUP BY is_error)"
            if sql.execute(sizes, (batch_id,)).fetchone()[0] > MAX_OUTPUT_BYTES:
                message = f"the results have more than {MAX_OUTPUT_BYTES:,} bytes; send fewer lines in a batch"
                batch.errors = BatchFaults([BatchFault("output_too_large", message)])
                sql.execute("DELETE FROM batch_answers WHERE batch = ?", (batch_id,))
            for is_error, name in ((False, "output"), (True, "error")):
                rows = sql.execute(
                    "SELECT line FROM batch_answers WHERE batch = ? AND is_error = ? ORDER BY number",
                    (batch_id, is_error),
                )
                content = b"".join(bytes(line) + b"\n" for (line,) in rows)
                if content:
                    made = self._files.write(sql, owner, f"{batch_id}_{name}.jsonl", "batch_output", content)
                    setattr(batch, f"{name}_file_id", made.id)
            sql.execute("DELETE FROM batch_answers WHERE batch = ?", (batch_id,))
            batch.status = status if batch.errors is None else "failed"
            setattr(batch, f"{batch.status}_at", int(self._database.clock()))
            self._put(sql, batch)

        await self._database.run(write)

    async def fail(self, batch_id: str, fault: BatchFault) -> None:
        """End a batch as `failed`. Its results are deleted, as those of any batch that fails are."""

        def write(sql: sqlite3.Connection) -> None:
            batch = self._any(sql, batch_id)
            if batch.is_open:
                sql.execute("DELETE FROM batch_answers WHERE batch = ?", (batch_id,))
                batch.status, batch.failed_at = "failed", int(self._database.clock())
                batch.errors = BatchFaults([fault])
                self._put(sql, batch)

        await self._database.run(write)

    def _goes_on(self, batch: BatchReply) -> bool:
        """Return whether a batch is in progress and has not expired."""
        return batch.status == "in_progress" and self._database.clock() < batch.expires_at

    def _own(self, sql: sqlite3.Connection, owner: bytes, batch_id: str) -> BatchReply:
        row = sql.execute("SELECT value FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)).fetchone()
        if row is None:
            message = f"there is no batch {batch_id!r:.80}"
            raise HTTPError(404, message, param="batch_id", code="batch_not_found")
        return _decoded(row)

    def _any(self, sql: sqlite3.Connection, batch_id: str) -> BatchReply:
        return _decoded(sql.execute("SELECT value FROM batches WHERE id = ?", (batch_id,)).fetchone())

    def _put(self, sql: sqlite3.Connection, batch: BatchReply) -> None:
        values = (batch.is_open, msgspec.json.encode(batch), batch.id)
        sql.execute("UPDATE batches SET is_open = ?, value = ? WHERE id = ?", values)


def _decoded(row: Any) -> BatchReply:
    return msgspec.json.decode(row[0], type=BatchReply)
