"""When a page was used last is known of all pages before it, and costs no more than that of the page itself."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from radixlm.runtime.store import NO_PARENT, PageKey, PageStore, StoreIdentity
from radixlm.runtime.store.index import Index
from radixlm.runtime.store.index_rows import RecordRow
from radixlm.runtime.store.record import BlockRange, Kind, RecordHeader

from .pages import chain, payload

IDENTITY = StoreIdentity("model", "tokenizer", "q4", "f16", 700)
PORTION = 15
NUMBERS = st.integers(0, 99)


class Uses(RuleBasedStateMachine):
    """`last_used` has what writing each use to all pages before it makes of the same calls."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.index = Index.open(self.directory / "index.sqlite")
        self.use = 0
        self.headers: dict[bytes, RecordHeader] = {}
        self.last_used: dict[bytes, int] = {}

    def key(self, number: int) -> bytes | None:
        pages = [key for key, header in self.headers.items() if header.kind == Kind.PAGE]
        return pages[number % len(pages)] if pages else None

    @rule(parent=st.none() | NUMBERS, kind=st.sampled_from((Kind.PAGE, Kind.PAGE, Kind.ALIAS, Kind.CALL)))
    def put(self, parent: int | None, kind: Kind) -> None:
        parent_key = (None if parent is None else self.key(parent)) or NO_PARENT
        kind = Kind.PAGE if parent_key == NO_PARENT else kind
        details = bytes(80 if kind == Kind.PAGE else 8)
        header = RecordHeader(kind, (self.use + 1).to_bytes(32, "big"), parent_key, b"n", details)
        self.touch_keys([header.key, parent_key])
        self.index.put([RecordRow(header, BlockRange(1, self.use, 1), self.use)])
        self.headers[header.key], self.last_used[header.key] = header, self.use

    @rule(numbers=st.lists(NUMBERS, max_size=3))
    def touch(self, numbers: list[int]) -> None:
        self.touch_keys([key for number in numbers if (key := self.key(number)) is not None])

    def touch_keys(self, keys: list[bytes]) -> None:
        self.use += 1
        with self.index.transaction():
            self.index.uses.touch(keys, self.use)
        used = set[bytes]()
        for each in keys:
            key = each
            while key in self.headers:
                used.add(key)
                header = self.headers[key]
                key = header.parent_key if header.kind == Kind.PAGE else b""
        beside = (key for key, each in self.headers.items() if each.kind != Kind.PAGE and each.parent_key in used)
        self.last_used |= dict.fromkeys([*used, *beside], self.use)

    @rule(number=NUMBERS, was_used=st.booleans())
    def remove(self, number: int, was_used: bool) -> None:
        if was_used:
            self.touch([number])
        for gone in self.index.remove([key] if (key := self.key(number)) else []):
            del self.headers[gone.key], self.last_used[gone.key]

    @rule()
    def fail(self) -> None:
        with pytest.raises(OSError, match="full"), self.index.transaction():
            self.index.uses.spread()
            raise OSError("the disk is full")

    @rule()
    def crash(self) -> None:
        self.index.close()
        self.index = Index.open(self.directory / "index.sqlite")
        self.index.uses.find_unspread()

    @rule()
    def spread(self) -> None:
        self.index.uses.spread()
        rows = self.index.rows_of(b"n")
        assert {key: row.last_used for key, row in rows.items() if row is not None} == self.last_used

    @invariant()
    def the_last_use_is_known_at_once(self) -> None:
        assert self.index.last_use() == max(self.last_used.values(), default=0)

    def teardown(self) -> None:
        self.spread()
        self.index.close()
        shutil.rmtree(self.directory)


TestUses = Uses.TestCase
TestUses.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def changed_rows(store: PageStore, do: Callable[[], object]) -> int:
    sql = store._writer.index._sql
    before = sql.total_changes
    do()
    return sql.total_changes - before


def put(store: PageStore, page_keys: list[PageKey]) -> None:
    """In portions, as a prompt is saved."""
    rows = payload(page_keys, IDENTITY.page_bytes)
    for first in range(0, len(page_keys), PORTION):
        store.put(page_keys[first : first + PORTION], rows[first : first + PORTION])


def rows_to_put(directory: Path, num_pages: int, room: int) -> int:
    """Rows that a prefix of so many pages changes, in a store with room for `room` of them, closing it included."""
    page_keys = chain(num_pages, identity=IDENTITY)
    with PageStore.open(directory, IDENTITY, max_bytes=room * 8192) as store:
        return changed_rows(store, lambda: put(store, page_keys)) + changed_rows(
            store, lambda: store._apply(store._writer.finish)
        )


def test_a_prefix_twice_as_long_changes_twice_as_many_rows(tmp_path: Path) -> None:
    for name, room in (("fits", 3.0), ("evicts", 0.5)):
        few, many = (rows_to_put(tmp_path / f"{name}{n}", n, int(n * room)) for n in (300, 900))
        assert many < 3.2 * few, name
        assert many < 10 * 900, name


def test_a_long_prefix_that_is_used_again_changes_a_row(tmp_path: Path) -> None:
    page_keys, out = chain(300, identity=IDENTITY), np.empty((300, IDENTITY.page_bytes), np.uint8)
    with PageStore.open(tmp_path, IDENTITY, max_bytes=10_000_000) as store:
        put(store, page_keys)
        for _ in range(3):
            assert store.read(page_keys, out) == 300
            store.touch([page_keys[-1].key])
            assert changed_rows(store, lambda: store._apply(store._writer.settle)) < 10


def test_a_crash_forgets_no_use_of_a_page_that_the_pages_before_it_are_kept_for(tmp_path: Path) -> None:
    trunk = chain(2, identity=IDENTITY)
    others = [chain(8, seed, identity=IDENTITY) for seed in range(1, 9)]
    room = 40 * 8192
    store = PageStore.open(tmp_path / "a", IDENTITY, max_bytes=room)
    put(store, trunk)
    for page_keys in others[:3]:
        put(store, page_keys)
    store.touch([trunk[-1].key])
    store._apply(store._writer.settle)
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # what a crash would leave here
    store.close()
    with PageStore.open(tmp_path / "b", IDENTITY, max_bytes=room) as store:
        for page_keys in others[3:6]:
            put(store, page_keys)
        out = np.empty((2, IDENTITY.page_bytes), np.uint8)
        assert store.read(trunk, out) == 2
        assert others[0][0].key not in {head.key for head in store.page_keys()}, "room was made"


def test_an_alias_of_less_than_a_page_is_used_with_every_page(tmp_path: Path) -> None:
    index = Index.open(tmp_path / "index.sqlite")
    alias, page = (
        RecordHeader(kind, bytes([kind]) * 32, NO_PARENT, b"n", bytes(80)) for kind in (Kind.ALIAS, Kind.PAGE)
    )
    index.put([RecordRow(header, BlockRange(1, number, 1), 1) for number, header in enumerate((alias, page))])
    index.uses.touch([page.key], 5)
    index.uses.spread()
    assert [row.last_used for row in index.rows_of(b"n").values() if row is not None] == [5, 5]
    index.close()
