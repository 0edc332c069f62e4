"""Ordered runs live with the pages of their store: they come from them, go with them, and take of the same room."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.errors import StoreError
from radixlm.runtime.extras.approximate.records.ordered_run import OrderedRun
from radixlm.runtime.extras.approximate.records.row_records import RowRecords
from radixlm.runtime.store import PageStore
from radixlm.runtime.store.files import OSFiles

from ....store.faulty_files import FailAt, FaultyFiles
from ....store.pages import BOB, IDENTITY, chain, keys, payload, single_files
from . import runs
from .runs import Run, all_pages, is_of_pages, kv_of, put_run, run_of


def opened(directory: Path, run: Run, max_bytes: int = 4 << 20, files: OSFiles | None = None) -> PageStore:
    return PageStore.open(directory, run.identity, max_bytes=max_bytes, files=files)


def is_right(store: PageStore, run: Run) -> bool:
    """Whether the run is there, and then all of it is right."""
    found = RowRecords.of(store).open_ordered(run.heads)
    if found is None:
        return False
    assert is_of_pages(found, run.pages)
    found.close()
    return True


def test_stored_pages_are_rewritten_in_order_and_found_again(tmp_path: Path) -> None:
    run = run_of(kv_of(), 6)
    with opened(tmp_path, run) as store:
        assert RowRecords.of(store).rewrite(run.heads, run.scores).stored == ()  # the pages are not there
        store.put(run.heads, run.pages)
        assert RowRecords.of(store).rewrite(run.heads, run.scores).stored == keys(run.heads)
        assert is_right(store, run)
        before = store.stats()
        assert before.num_ordered_bytes == single_files(tmp_path)[0].stat().st_size
        with pytest.raises(StoreError, match="scores"):
            RowRecords.of(store).rewrite(run.heads, run.scores[..., :16])
    with opened(tmp_path, run) as store:
        assert is_right(store, run)
        assert store.stats().num_bytes == before.num_bytes
        out = np.empty_like(run.pages)
        assert store.read(run.heads, out) == 6 and (out == run.pages).all()


def test_runs_go_with_one_of_their_pages_and_with_their_namespace(tmp_path: Path) -> None:
    run, other = run_of(kv_of(), 6), run_of(kv_of(), 4, 1, namespace=BOB)
    with opened(tmp_path, run) as store:
        for one in (run, other):
            store.put(one.heads, one.pages)
            RowRecords.of(store).rewrite(one.heads, one.scores)
        ordered = other.pages[0, :64].tobytes()
        path = single_files(tmp_path)[1]
        assert path.is_file() and ordered not in path.read_bytes()
        store.discard(BOB)
        assert not path.exists() and not is_right(store, other)
        store.drop([run.heads[5].key])
        assert not is_right(store, run)
        assert store.stats().num_ordered_bytes == 0


def test_pages_win_over_runs_and_runs_go_before_any_page_does(tmp_path: Path) -> None:
    run = run_of(kv_of(head_dim=64), 4)
    max_bytes = 24 * (run.kv.page_bytes + 4096)
    num_written = 0
    with opened(tmp_path / "beside", run, max_bytes) as store, opened(tmp_path / "alone", run, max_bytes) as alone:
        for seed in range(14):
            one = run_of(run.kv, 4, seed)
            ours, theirs = store.put(one.heads, one.pages), alone.put(one.heads, one.pages)
            assert (ours.stored, ours.evicted) == (theirs.stored, theirs.evicted), "runs cost a page its place"
            before = {head.key for head in store.page_keys()}
            result = RowRecords.of(store).rewrite(one.heads, one.scores)
            assert result.evicted == () and before == {head.key for head in store.page_keys()}
            num_written += bool(result.stored)
            assert is_right(store, one) == bool(result.stored)
            stats = store.stats()
            assert stats.num_bytes <= max_bytes and stats.num_ordered_bytes <= max_bytes // 2
            assert stats.num_bytes == sum(path.stat().st_size for path in (tmp_path / "beside").glob("segment-*"))
            for old_seed in range(seed + 1):
                old = run_of(run.kv, 4, old_seed)
                assert not is_right(store, old) or set(keys(old.heads)) <= before
    assert 0 < num_written < 14


def test_a_run_larger_than_its_share_is_not_stored(tmp_path: Path) -> None:
    run = run_of(kv_of(head_dim=64), 8)
    with opened(tmp_path, run, 10 * (run.kv.page_bytes + 4096)) as store:
        store.put(run.heads, run.pages)
        assert RowRecords.of(store).rewrite(run.heads, run.scores).stored == ()
        assert store.stats().num_pages == 8


def test_a_store_whose_layout_is_unknown_keeps_no_runs(tmp_path: Path) -> None:
    heads = chain(3)
    run = run_of(kv_of(), 3)
    with PageStore.open(tmp_path, IDENTITY, max_bytes=4 << 20) as store:
        store.put(heads, payload(heads))
        with pytest.raises(StoreError, match="cannot be ordered"):
            RowRecords.of(store).put_ordered(heads, OrderedRun.of_pages(run.kv, run.pages, run.scores))


def test_a_disk_that_fails_while_a_run_is_read_or_written_turns_the_store_off(tmp_path: Path) -> None:
    run = run_of(kv_of(), 3)
    for operations in (("preadv",), ("pwritev",)):
        files = FaultyFiles()
        with opened(tmp_path / operations[0], run, files=files) as store:
            store.put(run.heads, run.pages)
            RowRecords.of(store).rewrite(run.heads, run.scores)
            found = RowRecords.of(store).open_ordered(run.heads)
            assert found is not None
            files.before = FailAt(0, operations=operations)
            if operations == ("preadv",):
                assert found.first(16) is None
            else:
                ordered = OrderedRun.of_pages(run.kv, run.pages, run.scores)
                assert RowRecords.of(store).put_ordered(run.heads, ordered).stored == ()
            found.close()
            assert store.stats().is_off
            assert RowRecords.of(store).open_ordered(run.heads) is None


def test_what_a_run_reads_of_pages_that_were_moved_meanwhile_is_theirs(tmp_path: Path) -> None:
    run, other = run_of(kv_of(), 6), run_of(kv_of(), 4, 1, namespace=BOB)
    with opened(tmp_path, run) as store:
        store.put(other.heads, other.pages)  # before them in their segment
        assert put_run(store, run, num_ranks=32)
        found = [runs.opened(store, run) for _ in range(2)]
        is_first = np.zeros((2, 6), np.bool_)
        is_first[:, 0] = True
        assert found[1].page_rows(is_first) is not None  # its file stays open
        store.discard(BOB)
        assert store.gc().num_pages_moved == 6
        assert all(is_of_pages(one, run.pages) for one in found)
        for one in found:
            one.close()
        assert is_right(store, run) and store.stats().misses == {}


def test_what_is_discarded_while_a_run_is_open_is_read_no_more(tmp_path: Path) -> None:
    run = run_of(kv_of(), 6)
    with opened(tmp_path, run) as store:
        assert put_run(store, run, num_ranks=32)
        found = [runs.opened(store, run) for _ in range(2)]
        assert found[1].page_rows(all_pages(2, 6)) is not None
        store.discard(run.heads[0].namespace)
        assert [one.page_rows(all_pages(2, 6)) for one in found] == [None, None]
        assert store.stats().misses == {"gone": 2}
        for one in found:
            one.close()


def test_pages_that_were_put_again_with_other_bits_are_not_taken_for_those_of_a_run(tmp_path: Path) -> None:
    run, other = run_of(kv_of(), 3), run_of(kv_of(), 3, 1)
    with opened(tmp_path, run) as store:
        store.put(run.heads, other.pages)
        ordered = OrderedRun.of_pages(run.kv, run.pages, run.scores, num_ranks=16)
        assert RowRecords.of(store).put_ordered(run.heads, ordered).stored
        found = runs.opened(store, run)
        assert found.first(16) is not None and found.page_rows(all_pages(2, 3)) is None
        assert store.stats().misses == {"payload": 1}
        found.close()
        assert RowRecords.of(store).open_ordered(run.heads) is None
        out = np.empty_like(run.pages)
        assert store.read(run.heads, out) == 3 and (out == other.pages).all()
