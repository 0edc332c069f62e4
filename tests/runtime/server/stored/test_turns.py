"""Trees of turns beside a dict: branches, deletions, restarts, expiry and conversations; every client sees its own."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import tempfile
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from radixlm.runtime.cache.cache_namespace import CacheScope
from radixlm.runtime.errors import StoreOff
from radixlm.runtime.server.errors import HTTPError
from radixlm.runtime.server.stored import turns as turns_module
from radixlm.runtime.server.stored.conversations import Conversations
from radixlm.runtime.server.stored.database import FILE, Database
from radixlm.runtime.server.stored.turns import EXPIRY_S, Turn, TurnLimits, Turns
from radixlm.runtime.server.stored.turns import Path as TurnPath

T = TypeVar("T")
OWNERS = st.sampled_from([CacheScope(), CacheScope("sk-1"), CacheScope("sk-1", "salt")])
NAMESPACES = st.sampled_from([b"a", b"b"])
TTL_S = 1000.0
NO_LIMITS = TurnLimits(10**6, 10**9, TTL_S)
TOTALS = (
    "SELECT owner, count(*), sum(num_bytes) FROM (SELECT owner, num_bytes FROM turns UNION ALL "
    "SELECT owner, length(metadata) FROM conversations) GROUP BY owner"
)
LEAVES = (
    "SELECT id, owner, used_at, created_at FROM turns WHERE id NOT IN (SELECT parent FROM turns WHERE parent NOT NULL) "
    "AND id NOT IN (SELECT head FROM conversations WHERE head NOT NULL)"
)


LOOP = asyncio.new_event_loop()


def run(work: Coroutine[Any, Any, T]) -> T:
    return LOOP.run_until_complete(work)


@dataclass
class Kept:
    """A turn as it must be found."""

    owner: CacheScope
    namespace: bytes
    parent: str | None
    path: list[tuple[bytes, bytes | None]]
    ids: tuple[int, ...]
    used_at: float
    gone: str | None = None


@dataclass
class Clock:
    now: float = 1e9

    def __call__(self) -> float:
        return self.now


class TreesOfTurns(RuleBasedStateMachine):
    """One file of turns, and what must be in it."""

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.clock = Clock()
        self.kept: dict[str, Kept] = {}
        self.conversations: dict[str, CacheScope] = {}
        self.number = 0
        self.open()

    def open(self) -> None:
        self.database = Database(Path(self.folder.name), clock=self.clock)
        self.turns = Turns(self.database, NO_LIMITS)

    def teardown(self) -> None:
        self.database._closing()
        self.folder.cleanup()

    def found(self, name: str) -> bool:
        turn = self.kept[name]
        return turn.gone is None and turn.used_at >= self.clock.now - TTL_S

    @rule(owner=OWNERS, namespace=NAMESPACES, data=st.data(), ids=st.lists(st.integers(0, 3), max_size=6))
    def add(self, owner: CacheScope, namespace: bytes, data: st.DataObject, ids: list[int]) -> None:
        parents = [name for name in self.kept if self.found(name) and self.kept[name].owner == owner]
        parent = data.draw(st.none() | st.sampled_from(parents) if parents else st.none())
        self.number += 1
        name, items, response = f"resp_{self.number}", b"[%d]" % self.number, b"{%d}" % self.number
        earlier = self.kept[parent] if parent else None
        token_ids = None if not ids else (*(earlier.ids[: len(ids)] if earlier else ()), *ids)
        after = run(self.turns.path(owner, parent)) if parent else TurnPath()
        turn = Turn(name, after, namespace, items, response, b"setup", token_ids)
        assert run(self.turns.save(owner, lambda: turn))
        if earlier:
            earlier.used_at = self.clock.now
        kept_ids = token_ids if token_ids is not None else (earlier.ids if earlier else ())
        path = [*(earlier.path if earlier else ()), (items, response)]
        self.kept[name] = Kept(owner, namespace, parent, path, kept_ids, self.clock.now)

    @rule(owner=OWNERS, data=st.data())
    def go_on(self, owner: CacheScope, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([*self.kept, "resp_0"]))
        turn = self.kept.get(name)
        if turn is None or turn.owner != owner or not self.found(name):
            with pytest.raises(HTTPError) as caught:
                run(self.turns.path(owner, name))
            assert caught.value.status == 404 and caught.value.code == "previous_response_not_found"
            is_own = turn is not None and turn.owner == owner
            assert ("not stored here" in str(caught.value)) != is_own, "why it is gone is told its owner alone"
            return
        path = run(self.turns.path(owner, name))
        assert list(path.turns) == turn.path and path.token_ids == turn.ids
        assert run(self.turns.response(owner, name)) == (turn.path[-1][1], turn.path[-1][0])
        turn.used_at = self.clock.now

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        alive = [name for name in self.kept if self.found(name)]
        if alive:
            name = data.draw(st.sampled_from(alive))
            run(self.turns.delete(self.kept[name].owner, name))
            self.kept[name].gone = "deleted"

    @rule(data=st.data(), response=st.binary(max_size=9))
    def change(self, data: st.DataObject, response: bytes) -> None:
        """Change the response of a turn that none continues, as one in the background does."""
        parents = {turn.parent for turn in self.kept.values()}
        alive = [name for name in self.kept if self.found(name) and name not in parents]
        if alive:
            turn = self.kept[name := data.draw(st.sampled_from(alive))]
            run(self.turns.change_response(turn.owner, name, lambda _: response))
            turn.path[-1] = (turn.path[-1][0], response)

    @rule(namespace=NAMESPACES)
    def forget(self, namespace: bytes) -> None:
        run(self.database.run(lambda sql: self.turns.forget(sql, namespace)))
        for turn in self.kept.values():  # parents first
            is_below = turn.parent is not None and self.kept[turn.parent].gone == "forgotten"
            if turn.namespace == namespace or is_below:
                turn.gone = "forgotten"

    @rule(owner=OWNERS, data=st.data())
    def converse(self, owner: CacheScope, data: st.DataObject) -> None:
        """Add to a conversation of items, or delete one."""
        conversations = Conversations(self.database, self.turns)
        if self.conversations and data.draw(st.booleans()):
            name = data.draw(st.sampled_from([*self.conversations]))
            with suppress(HTTPError):  # it was forgotten, or has expired
                own = self.conversations[name]
                match data.draw(st.sampled_from(["add", "update", "replace", "delete"])):
                    case "add":
                        run(conversations.add_items(own, name, [b"{}"]))
                    case "update":
                        run(conversations.update(own, name, {"a": "b" * self.number}))
                    case "replace":
                        run(conversations.replace_items(own, name, lambda path: [b"{}"] * len(path.turns)))
                    case "delete":
                        run(conversations.delete(own, name))
        else:
            made = run(
                conversations.create(owner, data.draw(NAMESPACES), {}, data.draw(st.sampled_from([[], [b"{}"]])))
            )
            self.conversations[made.id] = owner

    @rule(seconds=st.sampled_from([1.0, EXPIRY_S, TTL_S / 2, TTL_S + 1]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def restart(self) -> None:
        self.database._closing()
        self.open()

    @invariant()
    def totals_and_leaves_are_those_of_the_rows(self) -> None:
        def read(sql: sqlite3.Connection) -> None:
            totals = sql.execute("SELECT * FROM totals WHERE owner != x''").fetchall()
            assert totals == sql.execute(TOTALS).fetchall()
            (of_all,) = sql.execute("SELECT num_rows, num_bytes FROM totals WHERE owner = x''").fetchall()
            assert of_all == (sum(row[1] for row in totals), sum(row[2] for row in totals))
            assert sorted(sql.execute("SELECT * FROM leaves")) == sorted(sql.execute(LEAVES))

        run(self.database.run(read))

    @invariant()
    def nothing_is_kept_for_nobody(self) -> None:
        if not self.kept:
            return
        wanted = {name for name in self.kept if self.kept[name].gone is None}
        for name in list(wanted):
            parent = self.kept[name].parent
            while parent is not None:
                wanted.add(parent)
                parent = self.kept[parent].parent
        rows = {name for (name,) in run(self.database.run(lambda sql: sql.execute("SELECT id FROM turns").fetchall()))}
        rows = {name for name in rows if not name.startswith("items_")}
        assert rows <= wanted
        assert rows >= {name for name in self.kept if self.found(name)}


TestTreesOfTurns = TreesOfTurns.TestCase
TestTreesOfTurns.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)


@dataclass
class Bench:
    """Turns in memory, with few limits."""

    limits: TurnLimits
    database: Database = field(default_factory=lambda: Database(None))

    def __post_init__(self) -> None:
        self.turns = Turns(self.database, self.limits)
        self.conversations = Conversations(self.database, self.turns)

    def add(self, name: str, parent: str | None = None, *, owner: str = "sk-1", size: int = 10) -> None:
        turn = Turn(name, TurnPath(parent), b"", b"[" + b" " * size + b"]", b"{}")
        assert run(self.turns.save(CacheScope(owner), lambda: turn))

    def ids(self) -> set[str]:
        rows = run(self.database.run(lambda sql: sql.execute("SELECT id FROM turns").fetchall()))
        return {name for (name,) in rows}


@pytest.mark.parametrize("limits", [TurnLimits(6, 10**6, TTL_S), TurnLimits(10**6, 6 * 14, TTL_S)])
def test_the_client_that_has_most_gives_up_the_end_of_what_it_used_longest_ago(limits: TurnLimits) -> None:
    bench = Bench(limits)
    bench.add("a1", owner="sk-2")
    bench.add("b1")
    bench.add("b2", "b1")
    for number in range(6):
        bench.add(f"c{number}", f"c{number - 1}" if number else None)
    assert bench.ids() == {"a1", *(f"c{number}" for number in range(5))}, "the other client keeps its own"
    with pytest.raises(HTTPError, match="was evicted for newer ones"):
        run(bench.turns.path(CacheScope("sk-1"), "b2"))


def test_items_of_a_conversation_are_all_its_turns_and_two_responses_at_once_both_stay() -> None:
    bench, owner = Bench(NO_LIMITS), CacheScope("sk-1")
    made = run(bench.conversations.create(owner, b"n", {"a": "b"}, [b'{"id":"1"}']))
    before = run(bench.conversations.path(owner, made.id))
    for name in ("r1", "r2"):  # both go on from the same items
        turn = Turn(name, before, b"n", b"[]", b"{}", b"s", (1, 2))
        assert run(bench.turns.save(owner, partial(replace, turn), conversation=made.id))
    path = run(bench.conversations.path(owner, made.id))
    assert [response for _, response in path.turns] == [None, b"{}", b"{}"]
    assert (path.num_exact, path.token_ids) == (2, (1, 2)), "of the second it is not known what it went on from"
    run(bench.turns.delete(owner, "r1"))
    assert len(run(bench.conversations.path(owner, made.id)).turns) == 3
    for other in (CacheScope(), CacheScope("sk-1", "salt")):
        with pytest.raises(HTTPError, match="no conversation"):
            run(bench.conversations.path(other, made.id))
    run(bench.conversations.delete(owner, made.id))
    assert bench.ids() == {"r2", "r1", before.head}, "r2 goes on from the others"
    run(bench.turns.delete(owner, "r2"))
    assert bench.ids() == set()


def test_conversations_without_items_are_evicted_like_others() -> None:
    bench, owner = Bench(TurnLimits(3, 10**6, TTL_S)), CacheScope("sk-1")
    bench.add("r1", owner="sk-2")
    made = [run(bench.conversations.create(owner, b"n", {}, [])).id for _ in range(4)]
    for name in made[2:]:
        assert run(bench.conversations.get(owner, name)).metadata == {}
    for name in made[:2]:
        with pytest.raises(HTTPError, match="there is no conversation"):
            run(bench.conversations.get(owner, name))
    assert bench.ids() == {"r1"}
    bench.turns.limits = TurnLimits(3, 1000, TTL_S)
    run(bench.conversations.update(owner, made[2], {"a": "b" * 500}))
    run(bench.conversations.update(owner, made[3], {"a": "b" * 500}))
    with pytest.raises(HTTPError, match="there is no conversation"):
        run(bench.conversations.get(owner, made[2]))


def test_what_goes_on_from_a_turn_that_was_removed_meanwhile_is_not_kept() -> None:
    bench = Bench(NO_LIMITS)
    bench.add("r1")
    run(bench.turns.delete(CacheScope("sk-1"), "r1"))
    assert not run(bench.turns.save(CacheScope("sk-1"), lambda: Turn("r2", TurnPath("r1"), b"", b"[]", b"{}")))
    assert bench.ids() == set()


def test_a_broken_file_is_set_aside_and_a_disk_that_fails_is_said(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database " * 1000)
    turns = Turns(Database(tmp_path), NO_LIMITS)
    assert run(turns.save(CacheScope(), lambda: Turn("r1", TurnPath(), b"", b"[]", b"{}")))
    assert run(turns.response(CacheScope(), "r1")) == (b"{}", b"[]")
    assert [path.name for path in tmp_path.glob("*.broken")]
    lost = Turns(Database(tmp_path / "nowhere"), NO_LIMITS)
    with pytest.raises(StoreOff):
        run(lost.save(CacheScope(), lambda: Turn("r1", TurnPath(), b"", b"[]", b"{}")))


class Counted:
    """A chain of turns of ten ids each, and the steps of SQLite's machine that work on it takes."""

    def __init__(self, limits: TurnLimits, num_turns: int) -> None:
        self.bench, self.steps, self.num_turns = Bench(limits), 0, 0
        self.owner = CacheScope("sk-1")
        run(self.bench.database.run(lambda sql: sql.set_progress_handler(self._count, 1)))
        while self.num_turns < num_turns:
            self.add()

    def _count(self) -> int:
        self.steps += 1
        return 0

    def add(self) -> int:
        """Add a turn at the end of the chain; return how many steps that took."""
        number, self.steps = self.num_turns, 0
        ids = tuple(range(10 * number))
        after = TurnPath(f"r{number - 1}", token_ids=ids) if number else TurnPath()
        turn = Turn(f"r{number}", after, b"n", b"[]", b"{}", b"s", (*ids, *range(10 * number, 10 * number + 10)))
        assert run(self.bench.turns.save(self.owner, lambda: turn))
        self.num_turns += 1
        return self.steps


def test_storing_a_turn_takes_as_long_after_a_long_conversation_as_after_a_short_one() -> None:
    added, evicted = [], []
    for num_turns in (30, 300):
        counted = Counted(NO_LIMITS, num_turns)
        added.append(counted.add())
        counted.bench.turns.limits = TurnLimits(num_turns + 1, 10**9, TTL_S)
        counted.steps = 0
        counted.bench.add("other")
        evicted.append(counted.steps)
        assert f"r{num_turns}" not in counted.bench.ids(), "the only end that was there before"
    assert added[1] < 1.5 * added[0], "B-trees of more turns are a little deeper"
    assert evicted[1] < 1.5 * evicted[0]


def test_a_path_is_read_once_and_each_id_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    concatenate = turns_module.np.concatenate

    def counting(parts: Any) -> Any:
        copied.append(sum(map(len, parts)))
        return concatenate(parts)

    monkeypatch.setattr(turns_module.np, "concatenate", counting)
    steps = []
    for num_turns in (50, 200):
        counted = Counted(NO_LIMITS, num_turns)
        counted.steps = 0
        path = run(counted.bench.turns.path(counted.owner, f"r{num_turns - 1}"))
        assert path.token_ids == tuple(range(10 * num_turns)) and path.num_exact == num_turns
        steps.append(counted.steps)
    assert sum(copied) == 10 * (50 + 200)
    assert steps[1] < 4.5 * steps[0]


def test_deleting_all_turns_takes_a_bounded_number_of_steps_for_each() -> None:
    steps = []
    for num_turns in (100, 400):
        counted = Counted(NO_LIMITS, num_turns)
        counted.steps = 0
        run(counted.bench.database.run(partial(counted.bench.turns.forget, namespace=b"n")))
        assert counted.bench.ids() == set()
        steps.append(counted.steps)
    assert steps[1] < 5 * steps[0]


def test_the_thread_ends_with_its_database() -> None:
    database = Database(None)
    run(database.run(lambda sql: None))
    thread: ThreadPoolExecutor = database._thread
    del database
    gc.collect()
    with pytest.raises(RuntimeError):
        thread.submit(print)
