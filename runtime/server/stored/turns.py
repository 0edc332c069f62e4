"""Store turns in a tree: each response can continue an earlier one, and any number can continue it.

Knows rows and token ids, not the content of items. A deleted turn is not found any more, but its row stays as long as
later turns need it.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from ...cache.cache_namespace import CacheScope
from ..errors import HTTPError
from .database import Database

Why = Literal["deleted", "expired", "evicted", "forgotten"]
_REASONS: Final = {
    "deleted": "was deleted",
    "expired": "has expired",
    "evicted": "was evicted for newer ones",
    "forgotten": "was deleted with the cache",
}
_NEVER_STORED: Final = (
    "is not stored here: it was created with store set to false, on another server, or by another client"
)
EXPIRY_S: Final = 60.0  # between two deletions of expired rows, which are not found anyway
MAX_GONE: Final = 10_000  # deleted ids for which the reason is kept, up to EXPIRY_S longer if there are more
_IS_HERE: Final = "id = ? AND owner = ? AND gone IS NULL"
_PATH: Final = (
    "WITH RECURSIVE path(id, parent, depth) AS (SELECT id, parent, 0 FROM turns WHERE id = ? UNION ALL "
    "SELECT turns.id, turns.parent, depth + 1 FROM path JOIN turns ON turns.id = path.parent) "
)


@dataclass(frozen=True)
class Path:
    """The turns from the first to one to continue.

    Attributes:
        head: id of the last turn; None if there are no turns.
        turns: items and response of each, in order.
        num_exact: number of first turns that `token_ids` covers.
        setup: as in `Turn`, of the last turn that `token_ids` covers.
    """

    head: str | None = None
    turns: tuple[tuple[bytes, bytes | None], ...] = ()
    num_exact: int = 0
    setup: bytes | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Turn:
    """A turn to store.

    Attributes:
        id: unique id.
        after: the turns that it continues.
        namespace: namespace of the prefix cache.
        items: the request's input, as a JSON array.
        response: the response as JSON, or None.
        setup: digest of everything that its prompt depends on, except the items.
        token_ids: ids of prompt and reply; None if unknown, or of no use to later turns.
    """

    id: str
    after: Path
    namespace: bytes
    items: bytes
    response: bytes | None = None
    setup: bytes | None = None
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TurnLimits:
    """Limits of the stored turns.

    Attributes:
        max_turns: turns and conversations of all clients. The client with the most loses those it used least recently.
        max_bytes: likewise.
        ttl_s: seconds until an unused turn is deleted.
    """

    max_turns: int
    max_bytes: int
    ttl_s: float


class Turns:
    """The turns of all clients. A client sees only its own.

    Methods raise StoreOff if the disk fails.
    """

    def __init__(self, database: Database, limits: TurnLimits) -> None:
        self._database, self.limits = database, limits
        self._expired_at = -math.inf

    async def save(
        self, scope: CacheScope, make: Callable[[], Turn], *, conversation: str | None = None, replaces: bool = False
    ) -> bool:
        """Store a turn, and make room for it. Returns False, with nothing stored, if its parent is gone.

        Args:
            make: makes the turn in the thread of the database, because items may be long.
            conversation: id of a conversation to append it to, after turns that were added in the meantime.
            replaces: the turn was stored before it ended. Returns False if it is gone.
        """

        def save(sql: sqlite3.Connection) -> bool:
            owner, turn = self._database.owner(scope), make()
            if replaces and not sql.execute(f"DELETE FROM turns WHERE {_IS_HERE}", (turn.id, owner)).rowcount:
                return False
            return self._save(sql, owner, turn, conversation)

        return await self._database.run(save)

    async def change_response(self, scope: CacheScope, turn_id: str, change: Callable[[bytes], bytes]) -> None:
        """Replace the response of a turn that was stored before it ended by `change` of it, unless it is gone."""

        def replace(sql: sqlite3.Connection) -> None:
            where = (turn_id, self._database.owner(scope))
            select = f"SELECT response FROM turns WHERE {_IS_HERE} AND response IS NOT NULL"
            found = sql.execute(select, where).fetchone()
            if found is not None:
                response = change(found[0])
                sql.execute(
                    f"UPDATE turns SET num_bytes = num_bytes - length(response) + ?, response = ? WHERE {_IS_HERE}",
                    (len(response), response, *where),
                )

        await self._database.run(replace)

    async def response(self, scope: CacheScope, turn_id: str) -> tuple[bytes, bytes]:
        """Return the response of a turn and its input items, as JSON.

        Raises:
            HTTPError: 404 if there is no such response.
        """

        def read(sql: sqlite3.Connection) -> tuple[bytes, bytes]:
            self.require(sql, self._database.owner(scope), turn_id)
            sql.execute("UPDATE turns SET used_at = ? WHERE id = ?", (self._database.clock(), turn_id))
            response, items = sql.execute("SELECT response, items FROM turns WHERE id = ?", (turn_id,)).fetchone()
            return response, items

        return await self._database.run(read)

    async def delete(self, scope: CacheScope, turn_id: str) -> None:
        """Delete a response.

        Raises:
            HTTPError: 404 if there is no such response.
        """

        def remove(sql: sqlite3.Connection) -> None:
            owner = self._database.owner(scope)
            self.require(sql, owner, turn_id)
            self._hide(sql, owner, turn_id, "deleted")

        await self._database.run(remove)

    async def path(self, scope: CacheScope, turn_id: str) -> Path:
        """Return the turns up to a response to continue.

        Raises:
            HTTPError: 404 if there is no such response.
        """

        def read(sql: sqlite3.Connection) -> Path:
            self.require(sql, self._database.owner(scope), turn_id, param="previous_response_id")
            return self.path_to(sql, turn_id)

        return await self._database.run(read)

    def forget(self, sql: sqlite3.Connection, namespace: bytes) -> None:
        """Delete all turns and conversations of a namespace of the prefix cache, and all turns that continue them."""
        roots = [turn_id for (turn_id,) in sql.execute("SELECT id FROM turns WHERE namespace = ?", (namespace,))]
        sql.execute("DELETE FROM conversations WHERE namespace = ?", (namespace,))
        for root in roots:
            self._remove_below(sql, root)

    def expire(self, sql: sqlite3.Connection, before: float) -> None:
        """Delete turns and conversations that were last used before a time."""
        old = sql.execute("SELECT id, head FROM conversations WHERE used_at < ?", (before,)).fetchall()
        for conversation_id, head in old:
            sql.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))
            self.prune(sql, head)
        turns = sql.execute("SELECT id, owner FROM turns WHERE used_at < ? AND gone IS NULL", (before,)).fetchall()
        for turn_id, owner in turns:
            self._hide(sql, owner, turn_id, "expired")

    # The methods below run within work of the database.

    def require(self, sql: sqlite3.Connection, owner: bytes, turn_id: str, *, param: str = "response_id") -> None:
        """Raise HTTPError 404, with the reason, unless an owner has a response with this id."""
        row = sql.execute(
            "SELECT used_at, gone FROM turns WHERE id = ? AND owner = ? AND response IS NOT NULL", (turn_id, owner)
        ).fetchone()
        if row is not None and row[1] is None and row[0] >= self._database.clock() - self.limits.ttl_s:
            return
        found = sql.execute("SELECT why FROM gone WHERE id = ? AND owner = ?", (turn_id, owner)).fetchone()
        why = found[0] if found is not None else None if row is None else row[1] or "expired"
        reason = _REASONS.get(why or "", _NEVER_STORED)
        message = f"the response {turn_id!r:.80} {reason}; send the whole conversation as input"
        code = "previous_response_not_found" if param == "previous_response_id" else "response_not_found"
        raise HTTPError(404, message, param=param, code=code)

    def path_to(self, sql: sqlite3.Connection, turn_id: str | None) -> Path:
        """Return the turns up to one, and mark it as used now."""
        if turn_id is None:
            return Path()
        sql.execute("UPDATE turns SET used_at = ? WHERE id = ?", (self._database.clock(), turn_id))
        columns = "items, response, setup, num_shared, token_ids"
        rows = sql.execute(
            f"{_PATH} SELECT {columns} FROM path JOIN turns USING (id) ORDER BY depth DESC", (turn_id,)
        ).fetchall()
        turns = tuple((items, response) for items, response, *_ in rows)
        with_ids = [place for place, row in enumerate(rows, start=1) if row[4] is not None]
        num_exact = with_ids[-1] if with_ids else 0
        setup = rows[num_exact - 1][2] if with_ids else None
        return Path(turn_id, turns, num_exact, setup, _joined([rows[place - 1][3:] for place in with_ids]))

    def add(self, sql: sqlite3.Connection, owner: bytes, turn: Turn) -> None:
        """Insert a turn whose parent exists."""
        num_shared, own = 0, None
        if turn.token_ids is not None:
            earlier, ids = np.array(turn.after.token_ids, "<u4"), np.array(turn.token_ids, "<u4")
            length = min(len(earlier), len(ids))
            unlike = np.flatnonzero(earlier[:length] != ids[:length])
            num_shared = int(unlike[0]) if len(unlike) else length
            own = ids[num_shared:].tobytes()
        num_bytes = len(turn.items) + len(turn.response or b"") + len(own or b"")
        now = self._database.clock()
        sql.execute(
            "INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, NULL, ?, ?, ?, ?, ?)",
            (
                *(turn.id, turn.after.head, owner, turn.namespace, now, now, num_bytes),
                *(turn.setup, num_shared, own, turn.items, turn.response),
            ),
        )

    def make_room(self, sql: sqlite3.Connection) -> None:
        """Delete expired turns, and evict turns above the limits."""
        now = self._database.clock()
        if now >= self._expired_at + EXPIRY_S:
            self._expired_at = now
            self.expire(sql, now - self.limits.ttl_s)
            sql.execute(
                "DELETE FROM gone WHERE id IN (SELECT id FROM gone ORDER BY at DESC LIMIT -1 OFFSET ?)", (MAX_GONE,)
            )
        while True:
            count, num_bytes = sql.execute("SELECT num_rows, num_bytes FROM totals WHERE owner = x''").fetchone()
            if count <= self.limits.max_turns and num_bytes <= self.limits.max_bytes:
                return
            most = "num_rows" if count > self.limits.max_turns else "num_bytes"
            (owner,) = sql.execute(
                f"SELECT owner FROM totals WHERE owner != x'' ORDER BY {most} DESC LIMIT 1"
            ).fetchone()
            self._evict(sql, owner)

    def prune(self, sql: sqlite3.Connection, turn_id: str | None) -> None:
        """Remove the row of a deleted turn and of deleted turns before it, unless later turns continue them."""
        while turn_id is not None:
            row = sql.execute(
                "SELECT parent FROM leaves JOIN turns USING (id) "
                "WHERE id = ? AND (gone IS NOT NULL OR response IS NULL)",
                (turn_id,),
            ).fetchone()
            if row is None:
                return
            sql.execute("DELETE FROM turns WHERE id = ?", (turn_id,))
            turn_id = row[0]

    def _save(self, sql: sqlite3.Connection, owner: bytes, turn: Turn, conversation: str | None) -> bool:
        if conversation is not None:
            row = sql.execute("SELECT head FROM conversations WHERE id = ?", (conversation,)).fetchone()
            if row is None:
                conversation = None  # it was deleted in the meantime
            elif row[0] != turn.after.head:
                turn = Turn(turn.id, Path(row[0]), turn.namespace, turn.items, turn.response)
        if turn.after.head is not None and _row(sql, turn.after.head) is None:
            return False
        self.add(sql, owner, turn)
        if conversation is not None:
            now = self._database.clock()
            sql.execute("UPDATE conversations SET head = ?, used_at = ? WHERE id = ?", (turn.id, now, conversation))
        self.make_room(sql)
        return True

    def _hide(self, sql: sqlite3.Connection, owner: bytes, turn_id: str, why: Why) -> None:
        sql.execute("UPDATE turns SET gone = ? WHERE id = ?", (why, turn_id))
        self._note(sql, owner, turn_id, why)
        self.prune(sql, turn_id)

    def _note(self, sql: sqlite3.Connection, owner: bytes, turn_id: str, why: Why) -> None:
        row = (turn_id, owner, why, self._database.clock())
        sql.execute("INSERT OR REPLACE INTO gone VALUES (?, ?, ?, ?)", row)

    def _evict(self, sql: sqlite3.Connection, owner: bytes) -> None:
        """Delete the last turn of an owner's least recently used conversation or chain of responses."""
        leaf = sql.execute(
            "SELECT id, used_at FROM leaves WHERE owner = ? ORDER BY used_at, created_at LIMIT 1", (owner,)
        ).fetchone()
        oldest = sql.execute(
            "SELECT id, head, used_at FROM conversations WHERE owner = ? ORDER BY used_at LIMIT 1", (owner,)
        ).fetchone()
        if leaf is not None and (oldest is None or leaf[1] <= oldest[2]):
            self._hide(sql, owner, leaf[0], "evicted")
            return
        assert oldest is not None, "turns without an end"
        conversation_id, head, _ = oldest
        sql.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))
        if head is not None:
            self._hide(sql, owner, head, "evicted")

    def _remove_below(self, sql: sqlite3.Connection, root: str) -> None:
        """Delete a turn, all turns that continue it, and their conversations."""
        found = _row(sql, root)
        for turn_id, owner in _below(sql, root):
            sql.execute("DELETE FROM conversations WHERE head = ?", (turn_id,))
            sql.execute("DELETE FROM turns WHERE id = ?", (turn_id,))
            self._note(sql, owner, turn_id, "forgotten")
        if found is not None:
            self.prune(sql, found[0])


def _joined(rows: Sequence[tuple[int, bytes]]) -> tuple[int, ...]:
    """Return the token ids of the last turn of a path.

    Args:
        rows: of each turn with ids, how many of its first are those of the turn before, and the others.

    >>> _joined([(0, bytes([1, 0, 0, 0, 2, 0, 0, 0])), (1, bytes([3, 0, 0, 0]))])
    (1, 3)
    """
    parts = list[np.ndarray]()
    end: int | None = None  # of the ids that later turns share
    for num_shared, own in reversed(rows):
        if end is None or num_shared < end:
            parts.append(np.frombuffer(own, "<u4")[: None if end is None else end - num_shared])
            end = num_shared
    return tuple(np.concatenate([np.zeros(0, "<u4"), *reversed(parts)]).tolist())


def _row(sql: sqlite3.Connection, turn_id: str) -> Any:
    return sql.execute("SELECT parent FROM turns WHERE id = ?", (turn_id,)).fetchone()


def _below(sql: sqlite3.Connection, root: str) -> Iterator[tuple[str, bytes]]:
    """Yield the ids and owners of a turn and of all turns that continue it."""
    yield from sql.execute(
        "WITH RECURSIVE below(id) AS (SELECT ? UNION ALL SELECT turns.id FROM turns JOIN below ON "
        "turns.parent = below.id) SELECT id, owner FROM turns JOIN below USING (id)",
        (root,),
    ).fetchall()
