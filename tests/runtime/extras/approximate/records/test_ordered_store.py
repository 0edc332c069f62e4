"""What is read of a run is of its pages: the most important tokens of them, and other rows from where they lie."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.runtime.artifact.manifest import KVDType
from radixlm.runtime.errors import StoreError
from radixlm.runtime.extras.approximate.records import ordered_record
from radixlm.runtime.extras.approximate.records.ordered_layout import OrderedLayout
from radixlm.runtime.extras.approximate.records.ordered_reader import OpenRun
from radixlm.runtime.extras.approximate.records.ordered_run import OrderedRun
from radixlm.runtime.extras.approximate.records.row_records import KINDS, RowRecords
from radixlm.runtime.model.kv_rows import KVRows
from radixlm.runtime.store import OSFiles, PageStore, page_key
from radixlm.runtime.store.catalogue import verify
from radixlm.runtime.store.page_key import pack_tokens

from ....store.faulty_files import FaultyFiles
from ....store.pages import ALICE, BOB, chain, single_files
from .runs import (
    DTYPES,
    Run,
    all_pages,
    identity_of,
    kv_of,
    num_found,
    open_store,
    opened,
    put_run,
    run_of,
    stored,
    unpack_keys,
)


def most_important(run: Run, layer: int, head: int) -> list[int]:
    """The slow and obvious order: by score, equals as in the text."""
    scores = run.scores[layer, head]
    return sorted(range(len(scores)), key=lambda token: (-scores[token], token))


@given(
    dtype=st.sampled_from(DTYPES),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 6, 16]),
    num_pages=st.integers(1, 9),
    chunk_size=st.integers(16, 80),
    num_ranks=st.integers(1, 144),
    num_tokens=st.integers(0, 144),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_any_part_of_a_stored_run_is_that_of_its_pages(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: KVDType,
    layers: int,
    heads: int,
    head_dim: int,
    num_pages: int,
    chunk_size: int,
    num_ranks: int,
    num_tokens: int,
    seed: int,
) -> None:
    run = run_of(kv_of(dtype, layers=layers, heads=heads, head_dim=head_dim), num_pages, seed)
    num_ranks = min(num_ranks, 16 * num_pages)
    num_tokens = min(num_tokens, num_ranks)
    exact = KVRows.of_pages(run.kv, run.pages)
    store = stored(tmp_path_factory.mktemp("run"), run, chunk_size, num_ranks)
    open_run = opened(store, run)
    keys = open_run.probe_keys()
    assert keys is not None
    with np.errstate(over="ignore", invalid="ignore"):  # any bits: some scales are infinite
        keys_in_text = unpack_keys(run.kv, keys.reshape(layers, 16 * num_pages, -1))
        np.testing.assert_array_equal(keys_in_text, exact.keys_of(0))
    first = open_run.first(num_tokens)
    assert first is not None
    for layer in range(layers):
        for head in range(heads):
            assert first.tokens[layer, head].tolist() == most_important(run, layer, head)[:num_tokens]
    assert_same_rows(first.rows, exact.take(first.tokens.astype(int)))
    is_wanted = np.random.default_rng(seed).random((layers, num_pages)) < 0.5
    is_wanted[0, 0] = True
    read = open_run.page_rows(is_wanted)
    assert read is not None
    for layer in range(layers):
        mine = np.flatnonzero(is_wanted[layer])
        assert_same_layer(read, layer, KVRows.of_pages(run.kv, run.pages[mine]))
    assert open_run.check()
    open_run.close()
    store.close()


def assert_same_layer(rows: KVRows, layer: int, wanted: KVRows) -> None:
    """That the first rows of a layer are the wanted ones."""
    count = wanted.num_tokens
    assert rows.items[:, layer, :, :count].tobytes() == wanted.items[:, layer].tobytes()
    if rows.scales is not None and wanted.scales is not None:
        assert rows.scales[:, layer, :, :count].tobytes() == wanted.scales[:, layer].tobytes()


def test_a_packed_probe_is_read_as_it_was_packed_and_takes_no_more_room(tmp_path: Path) -> None:
    run = run_of(kv_of(), 3)
    store, packed = open_store(tmp_path, run), np.arange(2 * 7, dtype=np.uint8).reshape(2, 7)
    store.put(run.heads, run.pages)
    assert RowRecords.of(store).rewrite(run.heads, run.scores, pack_probe=lambda keys: packed).stored
    for _ in range(2):
        open_run = opened(store, run)
        assert (open_run.probe_keys() == packed).all()
        assert open_run.layout.tail.num_bytes == 4096 < OrderedLayout(run.kv, 48 * 16, 1).tail.num_bytes
        assert reads_all_pages(open_run, run) and open_run.check()
        open_run.close()
        store.close()
        assert verify(tmp_path, OSFiles(), kinds=KINDS).bad == {}
        store = open_store(tmp_path, run)
    store.close()


@pytest.mark.parametrize("how", ["found", "collected"])
def test_a_run_of_another_version_is_found_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    run = run_of(kv_of(), 3)
    with monkeypatch.context() as older:
        older.setattr(ordered_record, "_VERSION", 1)
        stored(tmp_path, run).close()
    with open_store(tmp_path, run) as store:
        if how == "found":
            assert RowRecords.of(store).open_ordered(run.heads) is None
            store.put((), run.pages[:0])
        else:
            assert store.gc().num_segments_removed == 1
        pages = np.empty_like(run.pages)
        assert store.read(run.heads, pages) == 3 and (pages == run.pages).all()
        assert single_files(tmp_path) == [] and store.stats().num_ordered_bytes == 0
        assert put_run(store, run) and num_found(store, run.heads) == 3
        assert store.gc().num_segments_removed == 0 and num_found(store, run.heads) == 3


def reads_all_pages(open_run: OpenRun, run: Run) -> bool:
    """Whether the rows of all its pages are read, and are those of the pages."""
    rows = open_run.page_rows(all_pages(run.kv.num_layers, len(run.heads)))
    return rows is not None and bool((rows.to_pages() == run.pages).all())


def assert_same_rows(rows: KVRows, wanted: KVRows) -> None:
    assert rows.items.tobytes() == wanted.items.tobytes()
    assert (rows.scales is None) == (wanted.scales is None)
    if rows.scales is not None and wanted.scales is not None:
        assert rows.scales.tobytes() == wanted.scales.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_tokens_are_one_read_that_wastes_little(tmp_path: Path, dtype: KVDType) -> None:
    run = run_of(kv_of(dtype, layers=30, heads=3, head_dim=64), 5)
    open_run = opened(stored(tmp_path, run), run)
    header = replace(open_run.counts)
    open_run.first(32)
    assert open_run.counts.num_reads - header.num_reads == 1
    token_bytes = run.kv.page_bytes // 16
    assert open_run.counts.num_bytes - header.num_bytes <= 1.05 * 32 * token_bytes
    open_run.first(64)  # and only the rest of what is wanted then
    assert open_run.counts.num_bytes - header.num_bytes <= 1.05 * 64 * token_bytes
    assert open_run.counts.num_chunks == 90 * 4


def test_a_chunk_of_the_usual_size_is_a_unit_of_the_disk_alone() -> None:
    layout = OrderedLayout(kv_of("f16", layers=2, heads=3, head_dim=64), 64, 64)
    assert {layout.chunk(block, group).start % 4096 for block in range(4) for group in range(6)} == {0}


def test_what_a_page_has_of_neighbouring_layers_is_one_read(tmp_path: Path) -> None:
    run = run_of(kv_of("f16", layers=4, heads=2, head_dim=64), 3)  # 8,192 bytes of a page for each layer
    open_run = opened(stored(tmp_path, run, num_ranks=16), run)
    open_run.probe_keys()
    before, is_wanted = replace(open_run.counts), np.zeros((4, 3), np.bool_)
    is_wanted[:2, 0] = is_wanted[3, 0] = is_wanted[1, 2] = True
    rows = open_run.page_rows(is_wanted)
    assert rows is not None and rows.num_tokens == 32
    assert open_run.counts.num_bytes - before.num_bytes == 4 * 8192
    assert open_run.counts.num_reads - before.num_reads == 3


def test_a_disk_is_told_of_all_places_before_it_is_waited_for(tmp_path: Path) -> None:
    run, operations = run_of(kv_of("f16", layers=4, heads=2, head_dim=64), 3), list[str]()
    store = stored(tmp_path, run, num_ranks=16)
    store.close()
    open_run = opened(open_store(tmp_path, run, FaultyFiles(operations.append)), run)
    open_run.probe_keys()
    operations.clear()
    is_wanted = np.zeros((4, 3), np.bool_)
    is_wanted[0, 0] = is_wanted[3, 0] = is_wanted[1, 2] = True
    assert open_run.page_rows(is_wanted) is not None
    told = [operation for operation in operations if operation in ("will_need", "preadv")]
    assert told == ["will_need"] * 2 + ["preadv"] * 3


def test_a_kept_order_is_not_read_again(tmp_path: Path) -> None:
    run = run_of(kv_of(), 6)
    store = stored(tmp_path, run)
    first = opened(store, run)
    order = first.order()
    again = RowRecords.of(store).open_ordered(run.heads, tables=first.tables)
    assert again is not None
    before = replace(again.counts)
    np.testing.assert_array_equal(again.order(), order)
    assert again.counts == before


def test_a_kept_order_of_a_run_that_was_written_again_is_not_used(tmp_path: Path) -> None:
    run = run_of(kv_of(), 6)
    store = stored(tmp_path, run)
    before = opened(store, run)
    assert before.order() is not None and before.probe_keys() is not None
    put_run(store, run, -1)
    again = RowRecords.of(store).open_ordered(run.heads, tables=before.tables)
    assert again is not None
    np.testing.assert_array_equal(again.order(), OrderedRun.of_pages(run.kv, run.pages, -run.scores).order)
    assert reads_all_pages(again, run)


def test_runs_are_found_after_a_restart_by_the_pages_that_begin_with_them(tmp_path: Path) -> None:
    run, other = run_of(kv_of(), 6), run_of(kv_of(), 3, 1, namespace=BOB)
    with stored(tmp_path, run) as store:
        put_run(store, other)
        part = OrderedRun.of_pages(run.kv, run.pages[:2], run.scores[..., :32])
        RowRecords.of(store).put_ordered(run.heads[:2], part)
    for _ in range(2):
        with open_store(tmp_path, run) as store:
            assert (num_found(store, run.heads), num_found(store, run.heads[:5])) == (6, 2)
            assert num_found(store, [*run.heads, *chain(2, 9, parent_key=run.heads[-1].key)]) == 6
            assert [num_found(store, run.heads[first:]) for first in (0, 1, 2)] == [6, 0, 0]
            assert (num_found(store, other.heads), num_found(store, other.heads[:2])) == (3, 0)
            assert RowRecords.of(store).open_ordered([]) is None
            found = RowRecords.of(store).open_ordered(run.heads[:4])
            assert found is not None and found.header.num_pages == 2
            found.close()
            sizes = [path.stat().st_size for path in tmp_path.glob("segment-*")]
            assert store.stats().num_bytes == sum(sizes)
            assert store.stats().num_ordered_bytes == sum(path.stat().st_size for path in single_files(tmp_path))
    assert {stat.S_IMODE(os.stat(path).st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_a_run_that_is_written_again_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    run = run_of(kv_of(), 4)
    with stored(tmp_path, run) as store:
        old = opened(store, run)
        put_run(store, run, -1, chunk_size=32)
        assert len(single_files(tmp_path)) == 1
        assert old.check() and reads_all_pages(old, run)  # a reader that has it open still can
        old.close()
        found = opened(store, run)
        new = found.first(5)
        assert new is not None
        assert new.tokens[1, 2].tolist() == most_important(replace(run, scores=np.negative(run.scores)), 1, 2)[:5]
        found.close()


def test_the_run_that_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    runs = [run_of(kv_of(head_dim=64), 4, seed) for seed in range(3)]
    record_bytes = runs[0].kv.page_bytes + 4096
    with PageStore.open(tmp_path, runs[0].identity, max_bytes=28 * record_bytes) as store:
        for run in runs[:2]:
            assert put_run(store, run)
        opened(store, runs[0]).close()
        store.put(runs[2].heads, runs[2].pages)  # from here on the other one was used longest ago
        assert put_run(store, runs[2])
        assert [num_found(store, run.heads) for run in runs] == [4, 0, 4]


@pytest.mark.parametrize("how", ["drop", "discard"])
def test_what_is_forgotten_is_overwritten_before_it_is_removed(tmp_path: Path, how: str) -> None:
    run = run_of(kv_of(), 4)
    with stored(tmp_path / "store", run) as store:
        [path] = single_files(tmp_path / "store")
        os.link(path, tmp_path / "disk")  # what is on the disk when the file has no name any more
        if how == "drop":
            store.drop([run.heads[2].key])
        else:
            store.discard(ALICE)
        left = (tmp_path / "disk").read_bytes()
        assert not path.exists() and not any(left[8192:])
        on_disk = left + b"".join(file.read_bytes() for file in (tmp_path / "store").iterdir())
        assert run.heads[3].key not in on_disk and pack_tokens(run.heads[3].token_ids) not in on_disk


def test_runs_of_another_model_are_not_found_and_take_room(tmp_path: Path) -> None:
    run = run_of(kv_of(), 4)
    with stored(tmp_path, run) as store:
        num_bytes = store.stats().num_ordered_bytes
    with PageStore.open(tmp_path, identity_of(kv_of("f32")), max_bytes=64 << 20) as other:
        assert (other.stats().num_ordered_bytes, num_found(other, run.heads)) == (num_bytes, 0)
        other.discard(ALICE)
        assert other.stats().num_ordered_bytes == 0 and single_files(tmp_path) == []


def test_what_cannot_be_ordered_is_refused(tmp_path: Path) -> None:
    run = run_of(kv_of(), 4)
    with pytest.raises(StoreError, match=r"the scores are \[2, 3, 63\]"):
        OrderedRun.of_pages(run.kv, run.pages, run.scores[..., 1:])
    with pytest.raises(StoreError, match="not numbers"):
        OrderedRun.of_pages(run.kv, run.pages, run.scores * np.float32(np.nan))
    with pytest.raises(StoreError, match="not 0"):
        OrderedRun.of_pages(run.kv, run.pages[:0], run.scores[..., :0])
    for num_ranks in (0, 65):
        with pytest.raises(StoreError, match=f"{num_ranks} ranks are wanted of a run of 64"):
            OrderedRun.of_pages(run.kv, run.pages, run.scores, num_ranks=num_ranks)
    with pytest.raises(StoreError, match="no KV head 3"):
        OrderedRun.of_pages(run.kv, run.pages, run.scores, probe_head=3)
    for size in (15, 257):
        with pytest.raises(StoreError, match="16 to 256 tokens"):
            OrderedLayout(run.kv, 64, 64, size)
    store = open_store(tmp_path, run)
    store.put(run.heads, run.pages)
    ordered = OrderedRun.of_pages(run.kv, run.pages, run.scores)
    for heads in (run.heads[1:], [run.heads[0], *run.heads[:3]]):
        with pytest.raises(StoreError, match="not of the same pages"):
            RowRecords.of(store).put_ordered(heads, ordered)
    assert single_files(tmp_path) == []
    put_run(store, run, num_ranks=32)
    open_run = opened(store, run)
    with pytest.raises(StoreError, match="33 tokens are wanted of a run that has 32"):
        open_run.first(33)
    for wrong in (all_pages(2, 5), all_pages(3, 4), np.zeros((2, 4), np.bool_)):
        with pytest.raises(StoreError, match="are wanted of a run of 4, and some"):
            open_run.page_rows(wrong)


def test_a_store_without_this_extra_reads_its_pages_and_keeps_its_records(tmp_path: Path) -> None:
    """What no one reads is neither wrong nor in the way."""
    run = run_of(kv_of(), 3)
    stored(tmp_path, run).close()
    with PageStore.open(tmp_path, run.identity, max_bytes=64 << 20) as store:
        pages = np.empty_like(run.pages)
        assert store.read(run.heads, pages) == 3 and (pages == run.pages).all()
        assert store.verify().bad == {} and store.gc().num_segments_removed == 0
    with open_store(tmp_path, run) as store:
        assert num_found(store, run.heads) == 3
    with PageStore.open(tmp_path, run.identity, max_bytes=64 << 20) as store:
        store.drop([run.heads[0].key])
        assert single_files(tmp_path) == [], "it is of pages that are gone"


def test_runs_of_a_kind_that_is_no_more_are_wrong_and_pages_are_verified_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(kv_of("k12v8"), 3)
    stored(tmp_path, run).close()
    monkeypatch.setattr(page_key, "KVLayout", int)  # reads the layout's JSON as little as it reads that of another kind
    report = verify(tmp_path, OSFiles(), kinds=KINDS)
    assert report.bad == {"identity": 1}
    assert report.num_pages == 3
