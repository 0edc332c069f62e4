"""Scores of pages come back as they were stored, or not at all."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.errors import StoreError
from radixlm.runtime.extras.approximate.records.row_records import KINDS, RowRecords
from radixlm.runtime.extras.approximate.records.scores_record import RowScores, ScoresHeader, scores_record
from radixlm.runtime.store import OSFiles, PageStore
from radixlm.runtime.store.catalogue import verify
from radixlm.runtime.store.record import BLOCK, Kind, RecordHeader

from ....store.pages import ALICE, single_files
from .runs import kv_of, open_store, put_run, run_of

RUN = run_of(kv_of(), 4)


def scores_of(num_pages: int, seed: int = 0, num_uses: int = 5) -> RowScores:
    rng = np.random.default_rng(seed)
    history, first = rng.random((2, 2, 3, 16 * num_pages), np.float32)
    return RowScores(history, first, rng.random(16 * num_pages, np.float32), num_uses, 2 * num_uses)


def assert_same(one: RowScores, other: RowScores) -> None:
    for name in ("history", "first", "weight"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert (one.num_uses, one.next_at) == (other.num_uses, other.next_at)


def with_pages(directory: Path) -> PageStore:
    store = open_store(directory, RUN)
    store.put(RUN.heads, RUN.pages)
    return store


def test_scores_come_back_after_a_restart(tmp_path: Path) -> None:
    with with_pages(tmp_path) as store:
        assert RowRecords.of(store).scores.read(RUN.heads) == []
        assert RowRecords.of(store).scores.put(RUN.heads[1:], scores_of(3)).stored
    with open_store(tmp_path, RUN) as store:
        [(start, found)] = RowRecords.of(store).scores.read(RUN.heads)
        assert start == 1
        assert_same(found, scores_of(3))
        assert (
            RowRecords.of(store).scores.read(RUN.heads[:3]) == []
            and RowRecords.of(store).scores.read(RUN.heads[2:]) == []
        )
    report = verify(tmp_path, OSFiles(), kinds=KINDS)
    assert not report.bad and report.num_pages == 4


def test_scores_need_their_pages_and_leave_with_them(tmp_path: Path) -> None:
    with open_store(tmp_path, RUN) as store:
        assert not RowRecords.of(store).scores.put(RUN.heads, scores_of(4)).stored
        store.put(RUN.heads, RUN.pages)
        RowRecords.of(store).scores.put(RUN.heads[:2], scores_of(2))
        RowRecords.of(store).scores.put(RUN.heads[2:], scores_of(2))
        store.drop([RUN.heads[2].key])
        assert [start for start, _ in RowRecords.of(store).scores.read(RUN.heads)] == [0]
        assert len(single_files(tmp_path)) == 1
        store.discard(ALICE)
        assert single_files(tmp_path) == []


def test_new_scores_take_the_place_of_those_of_a_part_of_the_pages(tmp_path: Path) -> None:
    with with_pages(tmp_path) as store:
        for start, stop in ((0, 2), (2, 3), (0, 3), (2, 4)):
            RowRecords.of(store).scores.put(RUN.heads[start:stop], scores_of(stop - start, seed=stop))
        found = RowRecords.of(store).scores.read(RUN.heads)
        assert [(start, scores.num_tokens) for start, scores in found] == [(0, 48), (2, 32)], "the latest last"
        RowRecords.of(store).scores.put(RUN.heads, scores_of(4, 9))
        [(start, scores)] = RowRecords.of(store).scores.read(RUN.heads)
        assert_same(scores, scores_of(4, 9))
        assert len(single_files(tmp_path)) == 1 == store.stats().num_segments - 1


def test_runs_make_room_and_scores_stay(tmp_path: Path) -> None:
    with with_pages(tmp_path) as store:
        put_run(store, RUN)
        RowRecords.of(store).scores.put(RUN.heads, scores_of(4))
        evictor = store._writer._evictor
        victim = evictor.next_single()
        assert victim is not None
        evictor.evict(victim, 99)
        assert evictor.next_single() is None
        assert RowRecords.of(store).open_ordered(RUN.heads) is None and RowRecords.of(store).scores.read(RUN.heads)


def test_a_flipped_bit_anywhere_is_a_miss_or_touches_nothing(tmp_path: Path) -> None:
    chance, outcomes = random.Random(0), set[bool]()
    with with_pages(tmp_path) as store:
        for number in range(60):
            RowRecords.of(store).scores.put(RUN.heads, scores_of(4, number))
            [path] = single_files(tmp_path)
            content = bytearray(path.read_bytes())
            content[chance.randrange(BLOCK, len(content))] ^= 1 << chance.randrange(8)
            path.write_bytes(content)
            found = RowRecords.of(store).scores.read(RUN.heads)
            outcomes.add(bool(found))
            if found:
                assert_same(found[0].scores, scores_of(4, number))
            else:
                assert verify(tmp_path, OSFiles(), kinds=KINDS).bad
                assert RowRecords.of(store).scores.read(RUN.heads) == []
        assert outcomes == {True, False}, "padding is not looked at"
        assert store.stats().misses.keys() == {"header", "payload"}


@pytest.mark.parametrize("num_bytes", [0, 4096, 8192, -4096])
def test_a_cut_file_is_a_miss(tmp_path: Path, num_bytes: int) -> None:
    with with_pages(tmp_path) as store:
        RowRecords.of(store).scores.put(RUN.heads, scores_of(4))
        [path] = single_files(tmp_path)
        path.write_bytes(path.read_bytes()[:num_bytes])
        assert RowRecords.of(store).scores.read(RUN.heads) == []
        assert sum(store.stats().misses.values()) == 1


def test_scores_of_another_version_are_passed_over(tmp_path: Path) -> None:
    header = scores_record(RUN.kv, RUN.heads, scores_of(4)).header
    known = ScoresHeader.of(header)
    assert known is not None and known.num_uses == 5
    assert ScoresHeader.of(replace(header, details=b"\2" + header.details[1:])) is None
    assert ScoresHeader.of(replace(header, details=header.details[:-1])) is None
    assert ScoresHeader.of(RecordHeader(Kind.CALL, *[b""] * 4)) is None


def test_a_store_without_scores_is_read_and_the_index_is_made_again_with_them(tmp_path: Path) -> None:
    with with_pages(tmp_path) as store:
        RowRecords.of(store).scores.put(RUN.heads, scores_of(4))
    for path in tmp_path.glob("index.sqlite*"):
        path.unlink()
    with open_store(tmp_path, RUN) as store:
        [(_, found)] = RowRecords.of(store).scores.read(RUN.heads)
        assert_same(found, scores_of(4))


def test_scores_of_other_pages_are_refused(tmp_path: Path) -> None:
    with with_pages(tmp_path) as store:
        with pytest.raises(StoreError, match="not of the same pages"):
            RowRecords.of(store).scores.put(RUN.heads, scores_of(3))
        with pytest.raises(StoreError, match="not of the same pages"):
            RowRecords.of(store).scores.put([RUN.heads[0], RUN.heads[2]], scores_of(2))
        broken = replace(scores_of(4), weight=np.full(64, np.nan, np.float32))
        with pytest.raises(StoreError, match="not numbers"):
            RowRecords.of(store).scores.put(RUN.heads, broken)
