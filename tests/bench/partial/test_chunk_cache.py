"""The replayed cache misses what a reader of real files misses; knowing the future misses least."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVLayout
from radixlm.runtime.extras.approximate.records.chunk_cache import ChunkCache
from radixlm.runtime.extras.approximate.records.ordered_layout import OrderedLayout
from radixlm.runtime.extras.approximate.records.ordered_record import RunHeader, RunTables
from radixlm.runtime.extras.approximate.records.ordered_run import OrderedRun
from radixlm.runtime.extras.approximate.records.row_records import RowRecords
from radixlm.runtime.store import NO_PARENT, PageKey, PageStore, StoreIdentity

from bench.partial.chunk_cache import CONTESTANTS, SHARES, measure, replay, replay_optimum
from bench.partial.chunk_traces import Asked, asked, zipf_trace
from bench.partial.prefix import PrefixModel
from bench.partial.texts import Case, Query
from bench.report.partial import chunk_cache

KV = KVLayout.uniform("f16", num_layers=2, num_kv_heads=2, head_dim=32)


def prefixes_of(count: int, seed: int = 0) -> list[Asked]:
    """Prefixes of 6 pages: each request reads the first block of four groups, and some parts of pages."""
    chance, layout = np.random.default_rng(seed), OrderedLayout(KV, 96, 32)
    importance = 1 / np.arange(1, layout.num_pieces + 1)
    return [
        Asked(layout, importance, [(np.arange(4), np.sort(chance.permutation(np.arange(8, 20))[:5])) for _ in range(5)])
        for _ in range(count)
    ]


def test_a_replay_misses_what_a_reader_of_files_misses(tmp_path: Path) -> None:
    prefixes = prefixes_of(3)
    trace = zipf_trace(prefixes, 40, change_after=None)
    identity = StoreIdentity("model", "tokenizer", "q4", msgspec.json.encode(KV).decode(), KV.page_bytes)
    store = PageStore.open(tmp_path, identity, max_bytes=64 << 20)
    chains, chance = [], np.random.default_rng(1)
    for number in range(len(prefixes)):
        heads: list[PageKey] = []
        for _ in range(6):
            parent = heads[-1].key if heads else NO_PARENT
            heads.append(PageKey.of(identity, bytes([number]), parent, range(PAGE_SIZE), bytes(PAGE_SIZE)))
        pages = chance.integers(0, 256, (6, KV.page_bytes), np.uint8)
        run = OrderedRun.of_pages(KV, pages, chance.random((2, 2, 96)), num_ranks=32)
        store.put(heads, pages)
        assert RowRecords.of(store).put_ordered(heads, run).stored
        chains.append(heads)
    layout = prefixes[0].layout
    max_bytes = 30 * layout.chunk_bytes(0)
    cache, missed = ChunkCache(max_bytes, policy=CONTESTANTS["LFU"].policy), []
    tables: dict[int, RunTables] = {}
    for number, request in trace:
        pieces, before = prefixes[number].requests[request], cache.stats().hit_bytes
        reader = RowRecords.of(store).open_ordered(chains[number], chunks=cache, tables=tables.get(number))
        assert reader is not None and reader.first(PAGE_SIZE) is not None
        is_wanted = np.zeros((6, 2), np.bool_)
        is_wanted.reshape(-1)[pieces[1] - layout.num_chunks] = True
        assert reader.page_rows(is_wanted.T) is not None
        tables[number] = reader.tables
        reader.close()
        wanted = sum(int(layout.piece_bytes(ids).sum()) for ids in pieces)
        missed.append(wanted - (cache.stats().hit_bytes - before))
    found = replay(prefixes, trace, max_bytes, CONTESTANTS["LFU"])
    assert found.disk_bytes == pytest.approx(RunHeader.num_bytes(6, KV) + np.mean(missed[10:]))
    assert 0 < found.hit_ratio < 1


def test_nobody_beats_who_knows_the_future() -> None:
    prefixes = prefixes_of(8)
    for change_after in (None, 10):
        trace = zipf_trace(prefixes, 60, change_after=change_after)
        for num_chunks in (20, 50, 8 * 40):
            max_bytes = num_chunks * prefixes[0].layout.chunk_bytes(0)
            best = replay_optimum(prefixes, trace, max_bytes)
            for contestant in CONTESTANTS.values():
                assert replay(prefixes, trace, max_bytes, contestant).hit_ratio <= best.hit_ratio
        assert best.hit_ratio > 0.9  # with room for all only what nobody wanted yet is missed


def test_favourites_change_when_they_should() -> None:
    prefixes = prefixes_of(40)
    trace = [number for number, _ in zipf_trace(prefixes, 400, change_after=200, seed=3)]
    favourites = [int(np.bincount(part).argmax()) for part in (trace[:100], trace[100:200], trace[200:])]
    assert favourites[0] == favourites[1] != favourites[2]


def test_real_queries_want_the_first_blocks_and_pages_that_they_look_at(tiny_artifact: Path) -> None:
    model = PrefixModel(Artifact.open(tiny_artifact))
    ids = np.random.default_rng(3).integers(0, 320, 400).tolist()
    queries = [Query(ids[start : start + 8], ids[start + 8 : start + 10]) for start in range(250, 370, 20)]
    prefix = asked(Case(ids[:245], queries[:3]), queries[3:], model)
    model.close()
    layout = prefix.layout
    assert layout.num_tokens == 240 and len(prefix.requests) == 1 + 1
    ranked, pages = np.split(prefix.attention, [layout.num_chunks])
    assert (ranked.reshape(-1, layout.num_groups).sum(axis=0) < 1).all()
    assert pages.reshape(layout.num_pages, -1).sum(axis=0) == pytest.approx(1)
    for first, others in prefix.requests:
        assert first.tolist() == list(range(2 * layout.num_groups))  # half of 64 tokens
        assert others.min() >= layout.num_chunks and others.max() < layout.num_pieces == len(prefix.attention)
        assert len(others) >= 2 * layout.kv.num_layers  # whatever pages hold 32 more of each


def test_tables_have_a_line_for_each_trace_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.partial.chunk_cache.NUM_REQUESTS", 16)
    rows = measure(prefixes_of(3))
    assert len(rows) == 2 * len(SHARES) * (len(CONTESTANTS) + 1)
    sums = dict.fromkeys(("num_prefixes", "shortest_prefix", "longest_prefix", "kv_bytes", "wanted_bytes"), 1)
    results = {**sums, "num_requests": 16, "budget": 0.25, "change_after": 8, "passes_s": 0.02, "rows": rows}
    ratios, first = (part.splitlines() for part in chunk_cache(results) if part.startswith("|"))
    assert len(ratios) == 2 + 2 * len(SHARES) and ratios[0].endswith("optimum |")
    assert first[0].count("s at") == 6 and first[2].startswith("| steady, 5% |")
