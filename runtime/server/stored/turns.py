"""The tree of turns: each response goes on from an earlier one, and any number may go on from it.

Knows rows and token ids, not what items or responses say. A turn that is deleted is not found any more; what later
turns need of it stays until they are gone, too.
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
_SAID: Final = {
    "deleted": "was deleted",
    "expired": "has expired",
    "evicted": "made room for newer ones",
    "forgotten": "was forgotten with the cache",
}
EXPIRY_S: Final = 60.0  # between two looks for what has expired, which is not found meanwhile
MAX_GONE: Final = 10_000  # ids of which it is known why they are gone
_IS_LEAF: Final = (
    "NOT EXISTS (SELECT 1 FROM turns AS later WHERE later.parent = turns.id) "
    "AND NOT EXISTS (SELECT 1 FROM conversations WHERE head = turns.id)"
)
_PATH: Final = (
    "WITH RECURSIVE path(id, parent, depth) AS (SELECT id, parent, 0 FROM turns WHERE id = ? UNION ALL "
    "SELECT turns.id, turns.parent, depth + 1 FROM path JOIN turns ON turns.id = path.parent) "
)


@dataclass(frozen=True)
class Turn:
    """A turn as it is written.

    Attributes:
        id: no other turn has it.
        parent: the turn that it goes on from; None: it is the first.
        namespace: of the prefix cache.
        items: those that were sent, as a JSON array.
        response: as JSON; None: there is none.
        setup: a digest of what its prompt depends on besides the items.
        token_ids: of prompt and reply; None: not known, or no use to later turns.
    """

    id: str
    parent: str | None
    namespace: bytes
    items: bytes
    response: bytes | None = None
    setup: bytes | None = None
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Path:
    """The turns from the first to one that is gone on from.

    Attributes:
        turns: the items and the response of each, in order.
        num_exact: of these turns, how many `token_ids` are of; 0: there are none.
    """

    head: str | None = None
    turns: tuple[tuple[bytes, bytes | None], ...] = ()
    num_exact: int = 0
    setup: bytes | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class TurnLimits:
    """What is kept at most.

    Attributes:
        max_turns, max_bytes: of all clients together; the client that has most gives up what it used longest ago.
        ttl_s: seconds that what nobody uses is kept.
    """

    max_turns: int
    max_bytes: int
    ttl_s: float


class Turns:
    """The turns of all clients. Every client sees its own alone.

    Methods raise StoreOff if the disk fails.
    """

    def __init__(self, database: Database, limits: TurnLimits) -> None:
        self._database, self.limits = database, limits
        self._expired_at = -math.inf

    async def save(self, scope: CacheScope, make: Callable[[], Turn], *, conversation: str | None = None) -> bool:
        """Keep a turn, and make room for it. Returns whether what it goes on from is still there.

        Args:
            make: makes the turn, in the thread of the database: items may be long.
            conversation: it is the last turn of. Where another one has become that meanwhile, it comes after that one.
        """
        return await self._database.run(lambda sql: self._save(sql, self._database.owner(scope), make(), conversation))

    async def response(self, scope: CacheScope, turn_id: str) -> tuple[bytes, bytes]:
        """The response of a turn and the items that were sent, as JSON.

        Raises:
            HTTPError: 404, there is no such response.
        """

        def read(sql: sqlite3.Connection) -> tuple[bytes, bytes]:
            self.require(sql, self._database.owner(scope), turn_id)
            sql.execute("UPDATE turns SET used_at = ? WHERE id = ?", (self._database.clock(), turn_id))
            response, items = sql.execute("SELECT response, items FROM turns WHERE id = ?", (turn_id,)).fetchone()
            return response, items

        return await self._database.run(read)

    async def delete(self, scope: CacheScope, turn_id: str) -> None:
        """Have a response found no more.

        Raises:
            HTTPError: 404, there is no such response.
        """

        def remove(sql: sqlite3.Connection) -> None:
            owner = self._database.owner(scope)
            self.require(sql, owner, turn_id)
            self._hide(sql, owner, turn_id, "deleted")

        await self._database.run(remove)

    async def path(self, scope: CacheScope, turn_id: str) -> Path:
        """The turns up to one that is to be gone on from.

        Raises:
            HTTPError: 404, there is no such response.
        """

        def read(sql: sqlite3.Connection) -> Path:
            self.require(sql, self._database.owner(scope), turn_id, param="previous_response_id")
            return self.path_to(sql, turn_id)

        return await self._database.run(read)

    def forget(self, sql: sqlite3.Connection, namespace: bytes) -> None:
        """Remove all that belongs to a namespace of the prefix cache, and all that goes on from it."""
        roots = [turn_id for (turn_id,) in sql.execute("SELECT id FROM turns WHERE namespace = ?", (namespace,))]
        sql.execute("DELETE FROM conversations WHERE namespace = ?", (namespace,))
        for root in roots:
            self._remove_below(sql, root)

    def expire(self, sql: sqlite3.Connection, before: float) -> None:
        """Remove what was last used before then."""
        old = sql.execute("SELECT id, head FROM conversations WHERE used_at < ?", (before,)).fetchall()
        for conversation_id, head in old:
            sql.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))
            self.prune(sql, head)
        turns = sql.execute("SELECT id, owner FROM turns WHERE used_at < ? AND gone IS NULL", (before,)).fetchall()
        for turn_id, owner in turns:
            self._hide(sql, owner, turn_id, "expired")

    # Within work of the database.

    def require(self, sql: sqlite3.Connection, owner: bytes, turn_id: str, *, param: str = "response_id") -> None:
        """Raise HTTPError, 404, unless an owner has a response of this id; it says why it is gone."""
        row = sql.execute(
            "SELECT used_at, gone FROM turns WHERE id = ? AND owner = ? AND response IS NOT NULL", (turn_id, owner)
        ).fetchone()
        if row is not None and row[1] is None and row[0] >= self._database.clock() - self.limits.ttl_s:
            return
        found = sql.execute("SELECT why FROM gone WHERE id = ? AND owner = ?", (turn_id, owner)).fetchone()
        why = found[0] if found is not None else None if row is None else row[1] or "expired"
        said = f"{_SAID[why]} here" if why in _SAID else (
            "is not kept here: it was sent with store set to false, or to another server, or by another client"
        )  # fmt: skip
        message = f"the response {turn_id!r:.80} {said}; send the whole conversation as input"
        code = "previous_response_not_found" if param == "previous_response_id" else "response_not_found"
        raise HTTPError(404, message, param=param, code=code)

    def path_to(self, sql: sqlite3.Connection, turn_id: str | None) -> Path:
        """The turns up to this one, all of which count as used now."""
        if turn_id is None:
            return Path()
        sql.execute("UPDATE turns SET used_at = ? WHERE id = ?", (self._database.clock(), turn_id))
        columns = "items, response, setup, num_shared, token_ids"
        rows = sql.execute(
            f"{_PATH} SELECT {columns} FROM path JOIN turns USING (id) ORDER BY depth DESC", (turn_id,)
        ).fetchall()
        ids = np.zeros(0, "<u4")
        num_exact, setup = 0, None
        for place, (_, _, turn_setup, num_shared, own) in enumerate(rows, start=1):
            if own is not None:
                ids = np.concatenate([ids[:num_shared], np.frombuffer(own, "<u4")])
                num_exact, setup = place, turn_setup
        turns = tuple((items, response) for items, response, *_ in rows)
        return Path(turn_id, turns, num_exact, setup, tuple(ids.tolist()))

    def add(self, sql: sqlite3.Connection, owner: bytes, turn: Turn) -> None:
        """Write a turn whose parent is there."""
        num_shared, own = 0, None
        if turn.token_ids is not None:
            earlier = np.array(self.path_to(sql, turn.parent).token_ids, "<u4")
            ids = np.array(turn.token_ids, "<u4")
            length = min(len(earlier), len(ids))
            unlike = np.flatnonzero(earlier[:length] != ids[:length])
            num_shared = int(unlike[0]) if len(unlike) else length
            own = ids[num_shared:].tobytes()
        num_bytes = len(turn.items) + len(turn.response or b"") + len(own or b"")
        now = self._database.clock()
        sql.execute(
            "INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, NULL, ?, ?, ?, ?, ?)",
            (
                *(turn.id, turn.parent, owner, turn.namespace, now, now, num_bytes),
                *(turn.setup, num_shared, own, turn.items, turn.response),
            ),
        )

    def make_room(self, sql: sqlite3.Connection) -> None:
        """Remove what is over the limits."""
        now = self._database.clock()
        if now >= self._expired_at + EXPIRY_S:
            self._expired_at = now
            self.expire(sql, now - self.limits.ttl_s)
        while True:
            count, num_bytes = sql.execute("SELECT count(*), coalesce(sum(num_bytes), 0) FROM turns").fetchone()
            if count <= self.limits.max_turns and num_bytes <= self.limits.max_bytes:
                return
            most = "count(*)" if count > self.limits.max_turns else "sum(num_bytes)"
            (owner,) = sql.execute(f"SELECT owner FROM turns GROUP BY owner ORDER BY {most} DESC LIMIT 1").fetchone()
            self._evict(sql, owner)

    def prune(self, sql: sqlite3.Connection, turn_id: str | None) -> None:
        """Remove a turn that is not found any more, unless something goes on from it; and those before it, likewise."""
        while turn_id is not None:
            row = sql.execute(
                f"SELECT parent FROM turns WHERE id = ? AND (gone IS NOT NULL OR response IS NULL) AND {_IS_LEAF}",
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
                conversation = None  # it was deleted meanwhile
            elif row[0] != turn.parent:
                turn = Turn(turn.id, row[0], turn.namespace, turn.items, turn.response)
        if turn.parent is not None and _row(sql, turn.parent) is None:
            return False
        self.add(sql, owner, turn)
        if conversation is not None:
            now = self._database.clock()
            sql.execute("UPDATE conversations SET head = ?, used_at = ? WHERE id = ?", (turn.id, now, conversation))
        self.make_room(sql)
        return True

    def _hide(self, sql: sqlite3.Connection, owner: bytes, turn_id: str, why: Why) -> None:
        sql.execute("UPDATE turns SET gone = ? WHERE id = ?", (why, turn_id))
        self._note(sql, owner, [turn_id], why)
        self.prune(sql, turn_id)

    def _note(self, sql: sqlite3.Connection, owner: bytes, turn_ids: Sequence[str], why: Why) -> None:
        now = self._database.clock()
        rows = ((turn_id, owner, why, now) for turn_id in turn_ids)
        sql.executemany("INSERT OR REPLACE INTO gone VALUES (?, ?, ?, ?)", rows)
        sql.execute(
            "DELETE FROM gone WHERE id IN (SELECT id FROM gone ORDER BY at DESC LIMIT -1 OFFSET ?)", (MAX_GONE,)
        )

    def _evict(self, sql: sqlite3.Connection, owner: bytes) -> None:
        """Remove the end of what an owner used longest ago."""
        leaf = sql.execute(
            f"SELECT id, used_at FROM turns WHERE owner = ? AND {_IS_LEAF} ORDER BY used_at, created_at LIMIT 1",
            (owner,),
        ).fetchone()
        oldest = sql.execute(
            "SELECT id, head, used_at FROM conversations WHERE owner = ? AND head IS NOT NULL ORDER BY used_at LIMIT 1",
            (owner,),
        ).fetchone()
        if leaf is not None and (oldest is None or leaf[1] <= oldest[2]):
            self._hide(sql, owner, leaf[0], "evicted")
        else:
            assert oldest is not None, "turns without an end"
            sql.execute("DELETE FROM conversations WHERE id = ?", oldest[:1])
            self._hide(sql, owner, oldest[1], "evicted")

    def _remove_below(self, sql: sqlite3.Connection, root: str) -> None:
        """Remove a turn and all that goes on from it, with the conversations that they belong to."""
        found = _row(sql, root)
        for turn_id, owner in _below(sql, root):
            sql.execute("DELETE FROM conversations WHERE head = ?", (turn_id,))
            sql.execute("DELETE FROM turns WHERE id = ?", (turn_id,))
            self._note(sql, owner, [turn_id], "forgotten")
        if found is not None:
            self.prune(sql, found[0])


def _row(sql: sqlite3.Connection, turn_id: str) -> Any:
    return sql.execute("SELECT parent FROM turns WHERE id = ?", (turn_id,)).fetchone()


def _below(sql: sqlite3.Connection, root: str) -> Iterator[tuple[str, bytes]]:
    """The ids and owners of a turn and of all that goes on from it."""
    yield from sql.execute(
        "WITH RECURSIVE below(id) AS (SELECT ? UNION ALL SELECT turns.id FROM turns JOIN below ON "
        "turns.parent = below.id) SELECT id, owner FROM turns JOIN below USING (id)",
        (root,),
    ).fetchall()
