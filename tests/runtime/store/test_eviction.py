"""The oldest segment goes first, what was used in it stays, and nobody keeps a page that cannot be found."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.store import PageKey, PageStore, VerifyReport
from radixlm.runtime.store.evictor import kept_rows
from radixlm.runtime.store.index_rows import RecordRow
from radixlm.runtime.store.record import BlockRange, RecordHeader

from .faulty_files import FaultyFiles
from .pages import ALICE, BOB, IDENTITY, OTHER, PAGE_BYTES, chain, keys, payload

MAX_BYTES = 1_000_000  # 80 pages, in segments of 9


def read(store: PageStore, page_keys: list[PageKey]) -> int:
    out = np.empty((len(page_keys), PAGE_BYTES), np.uint8)
    num_read = store.read(page_keys, out)
    assert (out[:num_read] == payload(page_keys[:num_read])).all()
    return num_read


def put(store: PageStore, *chains: list[PageKey]) -> set[bytes]:
    """Put prompts one after the other; the keys that had to go."""
    evicted: set[bytes] = set()
    for page_keys in chains:
        result = store.put(page_keys, payload(page_keys))
        assert result.stored == keys(page_keys)
        evicted |= set(result.evicted)
    return evicted


def test_the_oldest_pages_go_and_the_owner_is_told_which(tmp_path: Path) -> None:
    chains = [chain(5, seed) for seed in range(30)]
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        evicted = put(store, *chains)
        stats = store.stats()
        listed = {head.key for head in store.page_keys()}
        assert stats.num_bytes <= MAX_BYTES
        assert sum(path.stat().st_size for path in tmp_path.glob("segment-*")) == stats.num_bytes
        assert evicted | listed == {head.key for page_keys in chains for head in page_keys}
        assert not evicted & listed
        assert (stats.num_pages, stats.num_pages_evicted) == (len(listed), len(evicted))
        found = [read(store, page_keys) for page_keys in chains]
        assert found == sorted(found)
        assert found[0] == 0
        assert found[-1] == 5


def test_what_was_used_since_stays_with_all_before_it(tmp_path: Path) -> None:
    trunk = chain(4)
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        put(store, trunk)
        for seed in range(1, 40):
            put(store, chain(5, seed))
            store.touch([trunk[-1].key])  # reaches up to the first
        assert read(store, trunk) == 4


def test_writing_behind_a_page_counts_as_using_it(tmp_path: Path) -> None:
    trunk = chain(3)
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        put(store, trunk)
        last = chain(1, 1, parent_key=trunk[-1].key)
        for seed in range(2, 60):
            last = chain(4, seed, parent_key=trunk[-1].key)
            put(store, last)
        assert read(store, [*trunk, *last]) == 7


def test_pages_that_all_were_used_still_make_room(tmp_path: Path) -> None:
    chains = [chain(5, seed) for seed in range(40)]
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        for number, page_keys in enumerate(chains):
            put(store, page_keys)
            store.touch(head.key for some in chains[:number] for head in some)
            assert store.stats().num_bytes <= MAX_BYTES


def test_a_prompt_larger_than_the_store_leaves_its_beginning(tmp_path: Path) -> None:
    page_keys = chain(200)
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        put(store, chain(5, 1))
        stored = store.put(page_keys, payload(page_keys)).stored
        assert 60 < len(stored) < 85
        assert stored == keys(page_keys)[: len(stored)]
        assert read(store, page_keys) == len(stored)


def test_pages_of_another_model_go_like_any(tmp_path: Path) -> None:
    others = [chain(5, seed, identity=OTHER) for seed in range(10)]
    with PageStore.open(tmp_path, OTHER, max_bytes=MAX_BYTES) as store:
        put(store, *others)
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        assert put(store, *(chain(5, seed) for seed in range(20, 33))) == set()  # nothing of ours had to go
        assert store.stats().num_pages == 65
    with PageStore.open(tmp_path, OTHER, max_bytes=MAX_BYTES) as store:
        assert 0 < len(list(store.page_keys())) < 50


def test_children_of_a_page_that_goes_do_not_stay() -> None:
    page_keys = chain(4)
    rows = [
        RecordRow(RecordHeader.of_page(head), BlockRange(1, i, 1), use)
        for i, (head, use) in enumerate(zip(page_keys, (1, 1, 9, 1), strict=True))
    ]
    assert [row.place.block for row in kept_rows(rows, 5, 4)] == [0, 1, 2]
    assert [row.place.block for row in kept_rows(rows, 5, 2)] == [0, 1]
    assert list(kept_rows(rows, 9, 4)) == []


def test_reading_beside_a_writer_that_evicts_gives_nothing_wrong(tmp_path: Path) -> None:
    chains = [chain(5, seed) for seed in range(60)]
    done, found = threading.Event(), [0]
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:

        def keep_reading() -> None:
            chance = random.Random(0)
            while not done.is_set():
                found[0] += read(store, chance.choice(chains))
                store.touch(keys(chains[0]))

        reader = threading.Thread(target=keep_reading)
        reader.start()
        try:
            put(store, *chains)
            store.discard(ALICE)
            put(store, *chains[:20])
        finally:
            done.set()
            reader.join()
        assert not store.stats().misses.keys() - {"absent", "gone"}
        assert not store.stats().is_off
        assert read(store, chains[19]) == 5


def test_what_is_read_while_it_is_discarded_is_gone_and_not_wrong(tmp_path: Path) -> None:
    page_keys, files, found = chain(5), FaultyFiles(), list[int]()
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES, files=files) as store:
        put(store, page_keys)

        def read_when_overwritten(operation: str) -> None:
            if operation == "fdatasync":
                found.append(read(store, page_keys))

        files.before = read_when_overwritten
        store.discard(ALICE)
        assert found == [0] and store.stats().misses == {"gone": 1}
        files.before = lambda operation: None
        put(store, page_keys)
        assert read(store, page_keys) == 5, "what is stored again is not taken for what was overwritten"


def test_gc_gives_back_the_room_of_pages_that_are_no_more(tmp_path: Path) -> None:
    kept, dropped = [chain(5, seed) for seed in range(6)], [chain(5, seed, namespace=BOB) for seed in range(6)]
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        for a, b in zip(kept, dropped, strict=True):
            put(store, a, b)
        store.discard(BOB)
        report = store.gc()
        assert report.num_pages_moved > 0
        assert report.bytes_after == store.stats().num_bytes < report.bytes_before * 0.6
        assert [read(store, page_keys) for page_keys in kept] == [5] * 6
        assert store.gc().num_segments_removed == 0
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        assert [read(store, page_keys) for page_keys in kept] == [5] * 6
        assert store.stats().num_pages == 30


def test_verify_finds_what_broke_and_then_it_is_found_no_more(tmp_path: Path) -> None:
    chains = [chain(5, seed) for seed in range(6)]
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        put(store, *chains)
        assert store.verify() == VerifyReport(30, store.verify().num_bytes, {})
        path = sorted(tmp_path.glob("segment-*"))[0]
        data = bytearray(path.read_bytes())
        data[4096 + 2 * 12288 + 5000] ^= 4
        path.write_bytes(data)
        report = store.verify()
        assert (report.num_pages, report.bad, report.bad_keys) == (29, {"payload": 1}, {chains[0][2].key})
        assert read(store, chains[0]) == 2


def test_pages_that_had_to_go_for_those_behind_them_are_written_again(tmp_path: Path) -> None:
    trunk = chain(30)
    page_keys = [*trunk, *chain(40, 1, parent_key=trunk[-1].key)]
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        put(store, trunk, *(chain(9, seed) for seed in range(2, 7)))
        assert store.put(page_keys, payload(page_keys)).stored == keys(page_keys)
        assert read(store, page_keys) == 70


@pytest.mark.parametrize("num_pages", [1, 3])
def test_a_store_with_room_for_one_page_or_a_few_works(tmp_path: Path, num_pages: int) -> None:
    with PageStore.open(tmp_path, IDENTITY, max_bytes=4096 + num_pages * 12288 + (num_pages - 1) * 4096) as store:
        for seed in range(5):
            page_keys = chain(2, seed)
            stored = store.put(page_keys, payload(page_keys)).stored
            assert read(store, page_keys) == len(stored) > 0
