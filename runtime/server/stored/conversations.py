"""Store conversations. Each is a name for its last turn. Items that a client adds are a turn without a response.

Knows rows and items as JSON, not their content.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from ...cache.cache_namespace import CacheScope
from ..errors import HTTPError
from ..request_log import new_id
from .database import Database
from .turns import Path, Turn, Turns

T = TypeVar("T")


@dataclass(frozen=True)
class StoredConversation:
    """A conversation, without its items."""

    id: str
    created_at: int
    metadata: dict[str, str]


class Conversations:
    """The conversations of all clients. A client sees only its own.

    Methods raise StoreOff if the disk fails, and HTTPError 404 if there is no such conversation.
    """

    def __init__(self, database: Database, turns: Turns) -> None:
        self._database, self._turns = database, turns

    async def create(
        self, scope: CacheScope, namespace: bytes, metadata: dict[str, str], items: Sequence[bytes]
    ) -> StoredConversation:
        """Create a conversation with items, each as JSON."""
        conversation_id = new_id("conv_")

        def write(sql: sqlite3.Connection) -> StoredConversation:
            owner, now = self._database.owner(scope), self._database.clock()
            head = self._add_items(sql, owner, namespace, None, items)
            values = (conversation_id, owner, namespace, now, now, head, msgspec.json.encode(metadata))
            sql.execute("INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?, ?)", values)
            made = _read(sql, conversation_id)
            self._turns.make_room(sql)
            return made

        return await self._database.run(write)

    async def get(self, scope: CacheScope, conversation_id: str) -> StoredConversation:
        """Return a conversation."""
        return await self._with(scope, conversation_id, lambda sql, owner: _read(sql, conversation_id))

    async def update(self, scope: CacheScope, conversation_id: str, metadata: dict[str, str]) -> StoredConversation:
        """Replace the metadata of a conversation."""

        def write(sql: sqlite3.Connection, owner: bytes) -> StoredConversation:
            encoded = msgspec.json.encode(metadata)
            sql.execute("UPDATE conversations SET metadata = ? WHERE id = ?", (encoded, conversation_id))
            updated = _read(sql, conversation_id)
            self._turns.make_room(sql)
            return updated

        return await self._with(scope, conversation_id, write)

    async def delete(self, scope: CacheScope, conversation_id: str) -> None:
        """Delete a conversation, but not its responses."""

        def remove(sql: sqlite3.Connection, owner: bytes) -> None:
            head = _head(sql, conversation_id)
            sql.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))
            self._turns.prune(sql, head)

        await self._with(scope, conversation_id, remove)

    async def path(self, scope: CacheScope, conversation_id: str) -> Path:
        """Return the turns of a conversation."""
        return await self._with(
            scope, conversation_id, lambda sql, owner: self._turns.path_to(sql, _head(sql, conversation_id))
        )

    async def add_items(self, scope: CacheScope, conversation_id: str, items: Sequence[bytes]) -> None:
        """Append items, each as JSON, to a conversation."""

        def write(sql: sqlite3.Connection, owner: bytes) -> None:
            head = self._add_items(sql, owner, _namespace(sql, conversation_id), _head(sql, conversation_id), items)
            sql.execute("UPDATE conversations SET head = ? WHERE id = ?", (head, conversation_id))
            self._turns.make_room(sql)

        await self._with(scope, conversation_id, write)

    async def replace_items(
        self, scope: CacheScope, conversation_id: str, change: Callable[[Path], Sequence[bytes]]
    ) -> None:
        """Replace all items of a conversation by those that `change` makes of its turns, each as JSON.

        The earlier turns are dropped. What `change` raises leaves all as it is.
        """

        def write(sql: sqlite3.Connection, owner: bytes) -> None:
            before = _head(sql, conversation_id)
            items = change(self._turns.path_to(sql, before))
            head = self._add_items(sql, owner, _namespace(sql, conversation_id), None, items)
            sql.execute("UPDATE conversations SET head = ? WHERE id = ?", (head, conversation_id))
            self._turns.prune(sql, before)
            self._turns.make_room(sql)

        await self._with(scope, conversation_id, write)

    async def _with(self, scope: CacheScope, conversation_id: str, work: Callable[[sqlite3.Connection, bytes], T]) -> T:
        """Run `work` on a conversation, and mark it as used now."""

        def checked(sql: sqlite3.Connection) -> T:
            owner = self._database.owner(scope)
            now = self._database.clock()
            found = sql.execute(
                "UPDATE conversations SET used_at = ? WHERE id = ? AND owner = ? AND used_at >= ?",
                (now, conversation_id, owner, now - self._turns.limits.ttl_s),
            )
            if found.rowcount == 0:
                message = f"there is no conversation {conversation_id!r:.80}; it was deleted, or has expired"
                raise HTTPError(404, message, param="conversation", code="conversation_not_found")
            return work(sql, owner)

        return await self._database.run(checked)

    def _add_items(
        self, sql: sqlite3.Connection, owner: bytes, namespace: bytes, parent: str | None, items: Sequence[bytes]
    ) -> str | None:
        """Add items as a turn, and return the id of the last turn, which is `parent` if there are no items."""
        if not items:
            return parent
        turn = Turn(new_id("items_"), Path(parent), namespace, b"[" + b",".join(items) + b"]")
        self._turns.add(sql, owner, turn)
        return turn.id


def _read(sql: sqlite3.Connection, conversation_id: str) -> StoredConversation:
    row = sql.execute("SELECT created_at, metadata FROM conversations WHERE id = ?", (conversation_id,)).fetchone()
    return StoredConversation(conversation_id, int(row[0]), msgspec.json.decode(row[1]))


def _head(sql: sqlite3.Connection, conversation_id: str) -> str | None:
    (head,) = sql.execute("SELECT head FROM conversations WHERE id = ?", (conversation_id,)).fetchone()
    return None if head is None else str(head)


def _namespace(sql: sqlite3.Connection, conversation_id: str) -> bytes:
    (found,) = sql.execute("SELECT namespace FROM conversations WHERE id = ?", (conversation_id,)).fetchone()
    return bytes(found)
