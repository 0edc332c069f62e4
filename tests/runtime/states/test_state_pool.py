"""Slots of states: free, cached and in use add up, whatever is done."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from radixlm.runtime.cache.radix_node import encode_key
from radixlm.runtime.errors import OutOfStates
from radixlm.runtime.states.state_pool import NO_STATE, SPARE_SLOTS, FoundState, Place, StatePool

PLACES: st.SearchStrategy[Place] = st.sampled_from([b"", b"a", 0, 1, 2])
ROWS = st.lists(st.integers(0, 1), max_size=3).map(encode_key)


class SlotsOfStates(RuleBasedStateMachine):
    @initialize(num_slots=st.integers(3, 8))
    def start(self, num_slots: int) -> None:
        self.pool = StatePool(num_slots)
        self.users: list[int] = []
        self.kept: dict[tuple[Place, bytes], int] = {}

    @rule()
    def allocate(self) -> None:
        if self.pool.num_available == 0:
            with pytest.raises(OutOfStates):
                self.pool.allocate()
            return
        num_free = self.pool.num_free
        slot = self.pool.allocate()
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
    def keep(self, data: Any, place: Place, rows: bytes, num_saved: int) -> None:
        slot = data.draw(st.sampled_from(self.users))
        if slot not in self.kept.values():
            self.kept.setdefault((place, rows), slot)
        before, is_full = self.pool.num_evicted, self.pool.num_free < SPARE_SLOTS
        self.pool.keep(place, rows, slot, num_saved=num_saved)
        assert self.pool.num_evicted - before <= is_full
        if self.pool.num_evicted > before:
            (gone,) = [key for key, kept in self.kept.items() if kept in self.pool._free]
            del self.kept[gone]

    @rule(place=PLACES)
    def forget(self, place: Place) -> None:
        self.kept = {key: slot for key, slot in self.kept.items() if key[0] != place}
        self.pool.forget([place])

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


def test_a_pool_without_a_slot_to_write_is_refused() -> None:
    with pytest.raises(OutOfStates, match="3 are the least"):
        StatePool(2)
