"""Slots of states: free, cached and in use add up, whatever is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from radixlm.runtime.cache.radix_node import encode_key
from radixlm.runtime.errors import OutOfStates
from radixlm.runtime.states.state_pool import NO_STATE, SPARE_SLOTS, FoundState, SnapshotPlace, StatePool

PLACES: st.SearchStrategy[SnapshotPlace] = st.sampled_from([b"", b"a", 0, 1, 2])
ROWS = st.lists(st.integers(0, 1), max_size=3).map(encode_key)


@dataclass
class Book:
    """What a snapshot is worth, kept the slow, obvious way."""

    before: int
    num_saved: int
    credit: int


class Books:
    """Those of all snapshots by slot."""

    def __init__(self) -> None:
        self.of: dict[int, Book] = {}
        self.least = 0

    def next_victim(self, users: Sequence[int]) -> int:
        return min(self.of.keys() - {*users}, key=lambda slot: (self.of[slot].credit, slot))

    def evict(self, slot: int) -> None:
        self.least = self.of[slot].credit
        self.drop(slot)

    def drop(self, slot: int) -> None:
        gone = self.of.pop(slot)
        for book in self.of.values():
            if book.before == slot:
                book.before = gone.before
                book.num_saved += gone.num_saved
                book.credit += gone.num_saved


class SlotsOfStates(RuleBasedStateMachine):
    @initialize(num_slots=st.integers(3, 8))
    def start(self, num_slots: int) -> None:
        self.pool = StatePool(num_slots)
        self.users: list[int] = []
        self.kept: dict[tuple[SnapshotPlace, bytes], int] = {}
        self.books = Books()

    @rule()
    def allocate(self) -> None:
        if self.pool.num_available == 0:
            with pytest.raises(OutOfStates):
                self.pool.allocate()
            return
        num_free = self.pool.num_free
        victim = None if num_free else self.books.next_victim(self.users)
        slot = self.pool.allocate()
        if victim is not None:
            assert slot == victim
            self.books.evict(victim)
        assert slot != NO_STATE and slot not in self.users
        gone = [key for key, kept in self.kept.items() if kept == slot]
        assert len(gone) == (num_free == 0)
        for key in gone:
            del self.kept[key]
        self.users.append(slot)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        slot = data.draw(st.sampled_from(self.users))
        self.users.remove(slot)
        self.pool.release(slot)

    @precondition(lambda self: self.users or self.kept)
    @rule(data=st.data())
    def retain(self, data: Any) -> None:
        slot = data.draw(st.sampled_from([*self.users, *self.kept.values()]))
        self.users.append(slot)
        self.pool.retain(slot)

    @precondition(lambda self: self.users)
    @rule(data=st.data(), place=PLACES, rows=ROWS, num_saved=st.integers(1, 99))
    def keep(self, data: Any, place: SnapshotPlace, rows: bytes, num_saved: int) -> None:
        slot = data.draw(st.sampled_from(self.users))
        before = data.draw(st.sampled_from([NO_STATE, *self.kept.values()]))
        is_new = slot not in self.kept.values() and (place, rows) not in self.kept
        if is_new:
            self.kept[place, rows] = slot
            self.books.of[slot] = Book(before, num_saved, self.books.least + num_saved)
        elif (place, rows) in self.kept:
            book = self.books.of[self.kept[place, rows]]
            book.credit = self.books.least + book.num_saved
        num_evicted = self.pool.num_evicted
        makes_room = is_new and self.pool.num_free < SPARE_SLOTS and {*self.kept.values()} - {*self.users}
        self.pool.keep(place, rows, slot, num_saved=num_saved, before=before)
        assert self.pool.num_evicted - num_evicted == bool(makes_room)
        if makes_room:
            (gone,) = [key for key, kept in self.kept.items() if kept in self.pool._free]
            assert self.kept[gone] == self.books.next_victim(self.users)
            self.books.evict(self.kept.pop(gone))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def touch(self, data: Any) -> None:
        slot = data.draw(st.sampled_from(list(self.kept.values())))
        self.pool.touch(slot)
        self.books.of[slot].credit = self.books.least + self.books.of[slot].num_saved

    @rule(place=PLACES)
    def forget(self, place: SnapshotPlace) -> None:
        for key in [key for key in self.kept if key[0] == place]:
            self.books.drop(self.kept.pop(key))
        self.pool.forget([place])

    @rule(place=PLACES, page=ROWS, other=ROWS)
    def forget_rows(self, place: SnapshotPlace, page: bytes, other: bytes) -> None:
        gone = [key for key in self.kept if key[0] == place and key[1] and page.startswith(key[1])]
        for key in gone:
            if not other.startswith(key[1]):
                self.books.drop(self.kept.pop(key))
        self.pool.forget_rows(place, page, other.startswith)

    @rule(pages=st.permutations([0, 1, 2]), ids=st.lists(st.integers(0, 1), min_size=48, max_size=51))
    def find(self, pages: list[int], ids: list[int]) -> None:
        found = self.pool.find(b"", pages, encode_key(ids), len(ids))
        places = {(page, start): 16 * start for start, page in enumerate(pages, 1)} | {(b"", 0): 0}
        expected = FoundState(0, NO_STATE)
        for (place, _), start in places.items():
            for (kept, rows), slot in self.kept.items():
                length = start + len(rows) // 4
                if kept == place and length <= len(ids) and encode_key(ids[start:length]) == rows:
                    expected = max(expected, FoundState(length, slot))
        assert found.num_tokens == expected.num_tokens
        assert not found.num_tokens or found.slot == expected.slot

    @invariant()
    def is_whole(self) -> None:
        self.pool.check(self.users)
        assert self.pool.num_snapshots == len(self.kept)
        known = {slot: Book(each.before, each.num_saved, each.credit) for slot, each in self.pool._snapshots.items()}
        assert known == self.books.of


TestSlotsOfStates = SlotsOfStates.TestCase
TestSlotsOfStates.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_snapshot_that_saves_least_goes_first_until_others_are_not_used() -> None:
    pool = StatePool(6)
    [pool.allocate(), pool.allocate()]
    small, large, newer = (pool.allocate() for _ in range(3))
    pool.keep(b"", b"", small, num_saved=10)
    pool.keep(1, b"", large, num_saved=25)
    pool.keep(2, b"", newer, num_saved=20)
    for slot in (small, large, newer):
        pool.release(slot)
    assert pool.allocate() == small
    pool.release(small)
    pool.touch(newer)  # 20 above the 10 that the last one had
    pool.allocate()
    assert pool.allocate() == large


def test_what_a_snapshot_saved_is_saved_by_the_one_behind_it() -> None:
    pool = StatePool(8)
    first, second, other = (pool.allocate() for _ in range(3))
    pool.keep(b"", b"", first, num_saved=10)
    pool.keep(1, b"", second, num_saved=11, before=first)
    pool.keep(2, b"", other, num_saved=20)
    for slot in (first, second, other):
        pool.release(slot)
    taken = [pool.allocate() for _ in range(6)]
    assert first in taken and other in taken and second not in taken


class Watched(dict[int, Any]):
    """Says how many of its items were looked at one by one."""

    num_seen = 0

    def values(self) -> Any:
        self.num_seen += len(self)
        return super().values()

    def __iter__(self) -> Any:
        self.num_seen += len(self)
        return super().__iter__()


def test_states_are_forgotten_and_make_room_without_a_look_at_all_others() -> None:
    number = 200
    pool = StatePool(number + SPARE_SLOTS + 1)
    watched = pool._snapshots = Watched()
    before = NO_STATE
    for place in range(3 * number):
        slot = pool.allocate()
        pool.keep(place, b"", slot, num_saved=16, before=before if before in watched else NO_STATE)
        pool.release(slot)
        before = slot if place % 8 else NO_STATE
    assert pool.num_snapshots == number and pool.num_evicted == 2 * number
    pool.forget(range(3 * number))
    assert pool.num_snapshots == 0 and watched.num_seen == 0


def test_entries_of_what_is_used_again_and_again_do_not_pile_up() -> None:
    pool = StatePool(12)
    slot = pool.allocate()
    pool.keep(b"", b"", slot, num_saved=16)
    for _ in range(1000):
        pool.release(slot)
        pool.retain(slot)
    assert len(pool._unused) < 100


def test_a_pool_without_a_slot_to_write_is_refused() -> None:
    with pytest.raises(OutOfStates, match="3 are the least"):
        StatePool(2)
