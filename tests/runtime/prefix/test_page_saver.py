"""What is saved has its own key, whatever the tree went through; and what a prefix costs grows with its length."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.cache.radix_node import Node
from radixlm.runtime.cache.radix_tree import RadixTree
from radixlm.runtime.prefix import page_saver
from radixlm.runtime.prefix.disk_index import DiskIndex
from radixlm.runtime.prefix.page_saver import PageSaver
from radixlm.runtime.prefix.small_record_saver import StateSaver
from radixlm.runtime.states.state_pool import StatePool
from radixlm.runtime.store import NO_PARENT, PageKey, StoreIdentity

IDENTITY = StoreIdentity("model", "tokenizer", "q4", "f16", 8)
NUM_PAGES = 24
NUMBERS = st.integers(0, 99)


@dataclass
class Writer:
    """Takes pages while it has room, and stores them when it is told to."""

    room_pages: int = 1000
    max_bytes: int = 8000
    is_off: bool = False
    taken: list[PageKey] = field(default_factory=list)

    @property
    def room_bytes(self) -> int:
        return self.room_pages * IDENTITY.page_bytes

    def write(self, page_keys: Sequence[PageKey], pages: Any) -> bool:
        assert 0 < len(page_keys) == len(pages) <= self.room_pages
        self.room_pages -= len(page_keys)
        self.taken += page_keys
        return True


@dataclass
class Memory:
    """A cache above a disk that a `Writer` stands for."""

    num_pages: int = NUM_PAGES
    writer: Writer = field(default_factory=Writer)
    touched: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = PrefixCache(PagePool(self.num_pages))
        self.index = DiskIndex(10_000, clock=time.monotonic)
        none: Any = Mock()
        self.saver = PageSaver(
            self.cache,
            self.index,
            self.writer,
            self,
            IDENTITY,
            self.touched.extend,
            none,
            none,
            none,  # type: ignore[arg-type]
        )
        self.cache.tree.eviction.before_evict = self.saver.save_leaving

    def read_pages(self, page_ids: Sequence[int], out: np.ndarray) -> None:
        out[:] = 0

    def put(self, token_ids: Sequence[int]) -> None:
        """Keep a prompt of full pages in the tree, which makes room for it."""
        there = self.cache.tree.find(b"", token_ids).pages
        self.cache.pool.retain(there)
        num_new = len(token_ids) // 16 - len(there)
        self.cache.tree.eviction.evict(max(0, num_new - self.cache.pool.num_free))
        pages = self.cache.pool.allocate(num_new)
        new = token_ids[len(there) * 16 :]
        self.cache.tree.insert_after(
            b"", there[-1] if there else None, len(there), new, pages, bytes(token_id % 2 for token_id in new)
        )
        self.cache.pool.release([*there, *pages])

    def settle(self, lost: frozenset[int] = frozenset()) -> None:
        """The writer is done with what it took, but for some that did not fit."""
        page_keys, self.writer.taken = self.writer.taken, []
        self.writer.room_pages = 1000
        self.index.add(head for number, head in enumerate(page_keys) if number not in lost)
        self.saver.settle(page_keys)

    def nodes(self) -> list[Node]:
        return list(self.cache.tree._table.nodes.values())


def keys_of(token_ids: Sequence[int]) -> list[bytes]:
    """The keys of a prompt's pages, the slow way."""
    keys = [NO_PARENT]
    for at in range(0, len(token_ids), 16):
        keys.append(PageKey.of(IDENTITY, b"", keys[-1], token_ids[at : at + 16], bytes(16)).key)
    return keys[1:]


def prompt(seed: int, num_pages: int) -> list[int]:
    """Prompts of few different pages, which often begin alike."""
    chance = random.Random(seed)
    return [token for _ in range(num_pages) for token in [chance.randrange(2)] * 16]


class Saving(RuleBasedStateMachine):
    """Pages come, leave for others, are saved, and are lost on disk."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()

    @rule(seed=NUMBERS, num_pages=st.integers(1, 12), saves=st.booleans())
    def put(self, seed: int, num_pages: int, saves: bool) -> None:
        ids = prompt(seed, num_pages)
        self.memory.put(ids)
        if saves:
            self.memory.saver.save(b"", ids)

    @rule(num_pages=st.integers(1, 6))
    def evict(self, num_pages: int) -> None:
        pool = self.memory.cache.pool
        wanted = min(num_pages, pool.num_cached)
        has_room, num_dropped = self.memory.writer.room_pages >= NUM_PAGES, self.memory.saver.num_dropped_pages
        before = {keys_of(path)[-1] for _, path, _ in self.memory.cache.tree.paths()}
        self.memory.cache.tree.eviction.evict(wanted)
        after = {key for _, path, _ in self.memory.cache.tree.paths() for key in keys_of(path)}
        if has_room:  # then what left is saved
            assert all(self.memory.saver._is_saved(key) for key in before - after)
            assert self.memory.saver.num_dropped_pages == num_dropped

    @rule(room=st.integers(0, 3))
    def writer_is_slow(self, room: int) -> None:
        self.memory.writer.room_pages = min(room, self.memory.writer.room_pages)

    @rule()
    def advance(self) -> None:
        self.memory.saver.advance()

    @rule(lost=st.frozensets(st.integers(0, 9), max_size=2))
    def settle(self, lost: frozenset[int]) -> None:
        self.memory.settle(lost)

    @rule(number=NUMBERS)
    def lose_on_disk(self, number: int) -> None:
        keys = list(self.memory.index._record_of)
        self.memory.index.remove(keys[number % len(keys) :][:1] if keys else [])

    @rule()
    def clear(self) -> None:
        self.memory.cache.clear(b"")

    @rule(seed=NUMBERS, num_pages=st.integers(1, 12))
    def save_all(self, seed: int, num_pages: int) -> None:
        """With a writer that takes everything, what is in the tree is on disk in the end."""
        self.memory.settle()
        while self.memory.saver.has_pending:
            self.memory.saver.advance()
            self.memory.settle()
        ids = prompt(seed, num_pages)
        self.memory.put(ids)
        self.memory.saver.save(b"", ids)
        while self.memory.saver.has_pending:
            self.memory.saver.advance()
            self.memory.settle()
        assert self.memory.index.keys(b"", ids) == keys_of(ids)

    @invariant()
    def each_page_has_its_own_key(self) -> None:
        self.memory.cache.check()
        for node in self.memory.nodes():
            path = node.path()
            ids = np.frombuffer(path.key, ">u4").tolist()
            assert node.disk_keys == keys_of(ids)[node.start :][: len(node.disk_keys)]
        for head in self.memory.writer.taken:
            assert head == PageKey.of(IDENTITY, b"", head.parent_key, head.token_ids, head.generated)
            assert head.generated == bytes(token_id % 2 for token_id in head.token_ids)

    def teardown(self) -> None:
        self.memory.index.check()


TestSaving = Saving.TestCase
TestSaving.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class Counted:
    """How often some functions are called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        for owner, name in ((Node, "path"), (PageKey, "of"), (RadixTree, "find"), (PageSaver, "_is_saved")):
            monkeypatch.setattr(owner, name, self._counting(name, getattr(owner, name)))

    def _counting(self, name: str, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return function(*args, **kwargs)

        return counted


@pytest.mark.parametrize("num_pages", [50, 400])
@pytest.mark.parametrize("is_saved", [False, True])
def test_evicting_a_prefix_page_by_page_computes_each_key_once(
    monkeypatch: pytest.MonkeyPatch, num_pages: int, is_saved: bool
) -> None:
    ids, memory = prompt(1, num_pages), Memory(num_pages)
    memory.put(ids)
    memory.cache.tree.touch(memory.cache.tree.find(b"", ids).pages[: num_pages // 2])  # in two nodes
    if is_saved:
        for at, parent_key in zip(range(0, len(ids), 16), [NO_PARENT, *keys_of(ids)], strict=False):
            memory.index.add([PageKey.of(IDENTITY, b"", parent_key, ids[at : at + 16], bytes(16))])
    counted = Counted(monkeypatch)
    for _ in range(num_pages):
        memory.cache.tree.eviction.evict(1)
        memory.settle()
    assert counted.calls["path"] == counted.calls["find"] == 0
    assert counted.calls["of"] <= num_pages
    assert counted.calls["_is_saved"] <= 4 * num_pages
    assert len(memory.index) == num_pages and memory.saver.num_saved_pages == (0 if is_saved else num_pages)


@pytest.mark.parametrize("num_pages", [50, 400])
def test_saving_a_prefix_in_portions_finds_it_once(monkeypatch: pytest.MonkeyPatch, num_pages: int) -> None:
    monkeypatch.setattr(page_saver, "PORTION_BYTES", 5 * IDENTITY.page_bytes)
    ids, memory = prompt(1, num_pages), Memory(num_pages)
    memory.put(ids)
    memory.saver.save(b"", ids)
    counted, num_portions = Counted(monkeypatch), 0
    while memory.saver.has_pending:
        memory.saver.advance()
        memory.settle()
        num_portions += 1
    assert num_portions == num_pages // 5
    assert counted.calls["path"] == 0
    assert counted.calls["find"] == 2, "on disk and in memory"
    assert counted.calls["of"] == num_pages
    assert counted.calls["_is_saved"] <= 5 * num_pages


def test_leaves_behind_one_prefix_compute_its_keys_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk, memory = prompt(1, 100), Memory(200)
    for number in range(10):
        memory.put([*trunk, *[5 + number] * 16])
    counted = Counted(monkeypatch)
    memory.cache.tree.eviction.evict(110)
    assert counted.calls["of"] == 110
    assert counted.calls["_is_saved"] <= 6 * 110


def test_a_state_that_could_not_be_stored_is_tried_again() -> None:
    states = StatePool(10)
    cache, ids = PrefixCache(PagePool(40), states=states), prompt(1, 2)
    pages = cache.pool.allocate(2)
    cache.tree.insert_after(b"", None, 0, ids, pages, bytes(len(ids)))
    slot = states.allocate()
    states.keep(pages[1], b"", slot, num_saved=16)
    states.release(slot)
    store, queue = Mock(), Mock(post=lambda work: work())
    store.states.put.side_effect = [RuntimeError("on purpose"), Mock(stored=(1,))]
    writer = Mock(room_bytes=100, submit=lambda work, num_bytes: work(store))
    index = DiskIndex(100, num_states=10, clock=time.monotonic)
    saver = StateSaver(cache, Mock(state_bytes=8), index, writer, IDENTITY, queue)
    with pytest.raises(RuntimeError, match="on purpose"):
        saver.save(b"", ids)
    assert not saver._in_flight
    saver.save(b"", ids)
    assert store.states.put.call_count == 2


def test_states_that_are_stored_again_compute_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    states = StatePool(10)
    cache, ids = PrefixCache(PagePool(40), states=states), prompt(1, 40)
    pages = cache.pool.allocate(40)
    cache.tree.insert_after(b"", None, 0, ids, pages, bytes(len(ids)))
    cache.tree.touch(pages[:17])  # in two nodes
    for number in (9, 16, 38):
        slot = states.allocate()
        states.keep(pages[number], b"", slot, num_saved=16)
        states.release(slot)
    index, io, writer = DiskIndex(100, num_states=10, clock=time.monotonic), Mock(state_bytes=8), Mock(room_bytes=100)
    saver = StateSaver(cache, io, index, writer, IDENTITY, Mock())
    expected = {key for number, key in enumerate(keys_of(ids)) if number in (9, 16, 38)}
    counted = Counted(monkeypatch)
    saver.save(b"", ids)
    assert saver._in_flight == expected and saver.num_saved == writer.submit.call_count == 3
    assert counted.calls["of"] == 39
    saver.save(b"", ids)
    assert counted.calls["of"] == 39 and saver.num_saved == 3
