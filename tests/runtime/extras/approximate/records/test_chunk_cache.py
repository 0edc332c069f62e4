"""The cache of chunks beside a slow one: it keeps to its bound, lets the least worthy go, and gives no stale bytes."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.runtime.errors import StoreError
from radixlm.runtime.extras.approximate.records.chunk_cache import FADING, LFU, LRU, ChunkCache, Policy, RunChunks
from radixlm.runtime.extras.approximate.records.ordered_layout import OrderedLayout
from radixlm.runtime.extras.approximate.records.ordered_reader import OpenRun
from radixlm.runtime.extras.approximate.records.ordered_record import RunHeader, RunTables, chunk_checksum
from radixlm.runtime.extras.approximate.records.ordered_run import OrderedRun
from radixlm.runtime.extras.approximate.records.row_records import RowRecords
from radixlm.runtime.store import PageStore

from ....store.pages import single_files
from .runs import Run, all_pages, is_of_pages, kv_of, open_store, put_run, run_of

# of 512 bytes a chunk, and of 1024 and 512; what a page has of a layer has 1536
LAYOUTS = (OrderedLayout(kv_of(), 48, 48), OrderedLayout(kv_of(), 80, 80, 32))
CHUNK = 512
Place = tuple[int, int]  # number of a run, chunk


@dataclass
class SlowCache:
    """Adds up the worth of each chunk from all of its uses."""

    policy: Policy
    max_bytes: int
    time: float = 0.0  # in times of the cache's size
    chunks: dict[Place, tuple[int, bytes]] = field(default_factory=dict)
    uses: defaultdict[Place, list[float]] = field(default_factory=lambda: defaultdict(list))

    def use(self, places: list[Place], num_bytes: int) -> None:
        for place in places:
            self.uses[place].append(self.time)
        self.time += num_bytes / self.max_bytes

    def worth(self, place: Place, num_groups: int) -> float:
        uses = sum(2 ** ((time - self.time) / self.policy.half_life) for time in self.uses[place])
        block = min(place[1] // num_groups, 3)  # parts of pages come behind all blocks
        return float(uses * (1 / (1 + block)) ** self.policy.importance)

    def forget(self, number: int) -> None:
        self.chunks = {place: chunk for place, chunk in self.chunks.items() if place[0] != number}
        for place in [place for place in self.uses if place[0] == number]:
            del self.uses[place]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([Policy(0.1), FADING, LFU, Policy(2.0, 1.0), Policy(1e6, 0.5)]),
    st.integers(1, 24),
    st.lists(
        st.tuples(
            st.integers(0, 3), st.sets(st.integers(0, 23), min_size=1), st.integers(0, 1), st.sampled_from("uuuuuuudd")
        ),
        max_size=30,
    ),
)
def test_what_stays_is_what_a_slow_cache_finds_most_worthy(
    policy: Policy, num_chunks: int, steps: list[tuple[int, set[int], int, str]]
) -> None:
    slow = SlowCache(policy, num_chunks * CHUNK)
    cache = ChunkCache(slow.max_bytes, policy=policy)
    opened: dict[int, RunChunks] = {}
    for number, wanted, version, what in steps:
        if what == "d":
            cache.drop(number)
            slow.forget(number)
        layout = LAYOUTS[number % 2]
        run = cache.of_run(number, layout)
        for other in [other for other, chunks in opened.items() if chunks.is_gone]:
            slow.forget(opened.pop(other) and other)  # its books were too long
        opened[number] = run
        ids = np.array(sorted(wanted))
        contents = [bytes([number, i, version]) * 600 for i in ids]
        sizes = [layout.chunk_bytes(i // 6) if i < 18 else 1536 for i in ids]
        contents = [content[:size] for content, size in zip(contents, sizes, strict=True)]
        checksums = np.array([chunk_checksum(np.frombuffer(content, np.uint8)) for content in contents], np.uint64)
        slow.use([(number, int(i)) for i in ids], sum(map(len, contents)))
        found = run.take(ids, checksums)
        for i, content, chunk in zip(ids.tolist(), contents, found, strict=True):
            kept = slow.chunks.get((number, i))
            assert (chunk is not None) == (kept is not None and kept[1] == content)
            assert chunk is None or chunk.tobytes() == content
        missing = [i for i, chunk in enumerate(found) if chunk is None]
        run.put(ids[missing], checksums[missing], [np.frombuffer(contents[i], np.uint8) for i in missing])
        for i in missing:
            slow.chunks[number, int(ids[i])] = (int(checksums[i]), contents[i])
        cache.check()
        here = {(other, int(i)) for other, chunks in opened.items() for i in np.flatnonzero(chunks.is_here)}
        gone = slow.chunks.keys() - here
        assert here <= slow.chunks.keys()
        if gone:
            worth = {place: slow.worth(place, 6) for place in slow.chunks}
            least = min((worth[place] for place in here), default=np.inf)
            assert all(worth[place] <= least * (1 + 1e-9) for place in gone)
            best = max(gone, key=lambda place: worth[place])
            kept_bytes = sum(len(slow.chunks[place][1]) for place in here)
            largest = max(len(slow.chunks[place][1]) for place in gone if worth[place] >= worth[best] * (1 - 1e-9))
            assert kept_bytes + largest > slow.max_bytes  # no more had to go
        slow.chunks = {place: chunk for place, chunk in slow.chunks.items() if place in here}
        assert cache.stats().num_bytes == sum(len(content) for _, content in slow.chunks.values())


def use(cache: ChunkCache, number: int, i: int) -> bool:
    """Want one chunk, and bring it if it is not there; whether it was."""
    run, ids, content = cache.of_run(number, LAYOUTS[0]), np.array([i]), np.full(CHUNK, i, np.uint8)
    checksums = np.array([chunk_checksum(content)], np.uint64)
    (found,) = run.take(ids, checksums)
    if found is None:
        run.put(ids, checksums, [content])
    return found is not None


@pytest.mark.parametrize(("policy", "stays"), [(LRU, [False, True, True]), (LFU, [True, False, True])])
def test_lru_lets_the_oldest_go_and_lfu_the_rarest(policy: Policy, stays: list[bool]) -> None:
    cache = ChunkCache(2 * CHUNK, policy=policy)
    for i in (0, 0, 1, 2):
        use(cache, 1, i)
    here = cache.of_run(1, LAYOUTS[0]).is_here
    assert here[:3].tolist() == stays
    stats = cache.stats()
    assert (stats.num_hits, stats.hit_bytes, stats.num_misses, stats.num_evicted) == (1, CHUNK, 3, 1)


def test_old_favourites_fade_and_uses_of_what_had_to_go_are_remembered() -> None:
    fading, lfu = ChunkCache(2 * CHUNK), ChunkCache(2 * CHUNK, policy=LFU)
    favourites = 20 * [0, 1] + 20 * [2, 3]
    hits = [sum(use(cache, 1, i) for i in favourites) for cache in (fading, lfu)]
    assert hits[0] > 50 and hits[1] == 38  # none of the new ones is used more often than the old ones were
    late = ChunkCache(CHUNK, policy=LFU)
    assert [use(late, 1, i) for i in (0, 0, 1, 1, 1, 1)] == [False, True, False, False, True, True]


def test_a_run_of_another_layout_under_the_same_number_finds_nothing() -> None:
    cache = ChunkCache(4 * CHUNK)
    use(cache, 0, 1)
    assert cache.of_run(0, LAYOUTS[1]).take(np.array([1]), np.zeros(1, np.uint64)) == [None]
    assert cache.stats().num_bytes == 0


def test_books_of_runs_without_chunks_are_few() -> None:
    cache = ChunkCache(100 * CHUNK)
    runs = [cache.of_run(number, LAYOUTS[0]) for number in range(200)]
    cache.check()
    assert 0 < cache.table_bytes <= 0.02 * 100 * CHUNK + 1000
    assert cache.of_run(199, LAYOUTS[0]) is runs[199] and runs[0].is_gone
    with pytest.raises(StoreError, match="0 bytes"):
        ChunkCache(0)


# With files.


def opened(store: PageStore, run: Run, cache: ChunkCache | None, tables: RunTables | None = None) -> OpenRun:
    found = RowRecords.of(store).open_ordered(run.heads, tables=tables, chunks=cache)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", ["f16", "k12v8"])
@pytest.mark.parametrize("chunk_size", [16, 32])
def test_reads_through_a_cache_are_the_same_and_ask_the_disk_for_what_is_not_there(
    tmp_path: Path, dtype: str, chunk_size: int
) -> None:
    run = run_of(kv_of(dtype, head_dim=64), 5)  # type: ignore[arg-type]
    store = open_store(tmp_path, run)
    put_run(store, run, chunk_size=chunk_size, num_ranks=48)
    cache, chance = ChunkCache(1 << 20), np.random.default_rng(0)
    tables: RunTables | None = None
    asked = []
    for _ in range(6):
        is_wanted = chance.random((2, 5)) < 0.3
        is_wanted[0, 3] = True
        count = int(chance.integers(49))
        plain, cached = opened(store, run, None), opened(store, run, cache, tables)
        for one in (plain, cached):
            first, read = one.first(count), one.page_rows(is_wanted)
            assert first is not None and read is not None
            if one is plain:
                rows, chosen = first, read
        assert np.array_equal(first.tokens, rows.tokens)
        for mine, theirs in ((first.rows, rows.rows), (read, chosen)):
            assert mine.items.tobytes() == theirs.items.tobytes()
            assert mine.scales is theirs.scales or np.array_equal(mine.scales, theirs.scales, equal_nan=True)  # type: ignore[arg-type]
        assert cached.first(48) is not None and cached.page_rows(all_pages(2, 5)) is not None
        tables = cached.tables
        asked.append(cached.counts.num_bytes)
        assert cached.counts.num_chunks == (0 if len(asked) > 1 else 6 * -(-48 // chunk_size) + 2 * 5)
        plain.close()
        cached.close()
    assert set(asked[1:]) == {RunHeader.num_bytes(5, run.kv)}  # all is there, and the tables were kept
    cache.check()


def test_a_run_that_is_written_again_or_removed_leaves_nothing(tmp_path: Path) -> None:
    run, cache = run_of(kv_of(), 3), ChunkCache(1 << 20)
    store = open_store(tmp_path, run)
    put_run(store, run)
    old = opened(store, run, cache)
    assert old.first(16) is not None and old.page_rows(all_pages(2, 3)) is not None
    assert cache.stats().num_bytes == 6 * CHUNK + 6 * 1536
    put_run(store, run, -1)
    assert cache.stats().num_bytes == 0
    # a reader that has it open still reads it, for itself alone
    assert is_of_pages(old, run.pages) and cache.stats().num_bytes == 0
    old.close()
    new = opened(store, run, cache)
    first = new.first(16)
    assert first is not None
    assert np.array_equal(first.tokens, OrderedRun.of_pages(run.kv, run.pages, -run.scores).order[:, :, :16])
    new.close()
    assert cache.stats().num_bytes > 0
    store.drop([run.heads[2].key])
    assert cache.stats().num_bytes == 0 and RowRecords.of(store).open_ordered(run.heads, chunks=cache) is None


def test_numbers_that_a_directory_gives_twice_are_no_danger(tmp_path: Path) -> None:
    run, cache = run_of(kv_of(), 3), ChunkCache(1 << 20)
    for sign in (1, -1):  # the same pages in another order, by a store that knows of no other
        store = open_store(tmp_path, run)
        put_run(store, run, sign)
        found = opened(store, run, cache)
        assert is_of_pages(found, run.pages)
        found.close()
        store.close()
        for path in tmp_path.iterdir():
            path.unlink()


def test_chunks_that_broke_on_disk_are_not_kept(tmp_path: Path) -> None:
    run, cache = run_of(kv_of(), 3), ChunkCache(1 << 20)
    store = open_store(tmp_path, run)
    put_run(store, run)
    (path,) = single_files(tmp_path)
    whole = bytearray(path.read_bytes())
    whole[len(whole) - LAYOUTS[0].num_bytes + LAYOUTS[0].chunk(2, 4).start] ^= 1
    path.write_bytes(whole)
    found = opened(store, run, cache)
    assert found.first(32) is not None and cache.stats().num_bytes > 0
    assert found.first(48) is None and RowRecords.of(store).open_ordered(run.heads) is None
    assert cache.stats().num_bytes == 0
    found.close()


def test_parts_of_pages_that_broke_on_disk_are_not_kept(tmp_path: Path) -> None:
    run, cache = run_of(kv_of(), 3), ChunkCache(1 << 20)
    store = open_store(tmp_path, run)
    put_run(store, run, num_ranks=16)
    [path] = tmp_path.glob("segment-*.pages")
    whole = bytearray(path.read_bytes())
    whole[4096 + LAYOUTS[0].part(1).start] ^= 1  # of the first page
    path.write_bytes(whole)
    found, is_wanted = opened(store, run, cache), all_pages(2, 3)
    is_wanted[1, 0] = False
    assert found.page_rows(is_wanted) is not None and cache.stats().num_bytes == 5 * 1536
    assert found.page_rows(all_pages(2, 3)) is None and RowRecords.of(store).open_ordered(run.heads) is None
    assert cache.stats().num_bytes == 0
    found.close()


def test_many_threads_read_what_was_written(tmp_path: Path) -> None:
    runs, cache = [run_of(kv_of(), 3, seed) for seed in range(3)], ChunkCache(20 * CHUNK)
    store = open_store(tmp_path, runs[0])
    for run in runs:
        put_run(store, run)
    wrong: list[int] = []

    def read(seed: int) -> None:
        for turn in range(30):
            run = runs[(seed + turn) % 3]
            found = RowRecords.of(store).open_ordered(run.heads, chunks=cache)
            if found is not None:
                try:
                    is_of_pages(found, run.pages)
                except AssertionError:
                    wrong.append(seed)
                found.close()

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(30):
        put_run(store, runs[turn % 3], -1 if turn % 2 else 1)
    for thread in threads:
        thread.join()
    assert not wrong
    cache.check()
    for run in runs:
        store.drop([run.heads[0].key])
    assert cache.stats().num_bytes == 0
