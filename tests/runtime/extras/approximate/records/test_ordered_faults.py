"""A run whose file broke, was moved, or was never finished is a miss: no read gives anything but what was written."""

from __future__ import annotations

import contextlib
import errno
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from radixlm.runtime.extras.approximate.records.ordered_layout import OrderedLayout
from radixlm.runtime.extras.approximate.records.ordered_record import RunHeader
from radixlm.runtime.extras.approximate.records.ordered_run import OrderedRun
from radixlm.runtime.extras.approximate.records.row_records import RowRecords
from radixlm.runtime.model.kv_rows import KVRows
from radixlm.runtime.store import PageStore
from radixlm.runtime.store.record import BLOCK, CHECKSUM_BYTES, Record, padded, sealed

from ....store.faulty_files import FailAt, FaultyFiles, PowerLost
from ....store.pages import BOB, single_files
from .runs import (
    Run,
    all_pages,
    is_of_pages,
    kv_of,
    num_found,
    open_store,
    opened,
    put_run,
    run_of,
    stored,
    unpack_keys,
)

RANKS = 32
LAYOUT = OrderedLayout(kv_of(), 48, RANKS)
HEADER_BYTES = RunHeader.num_bytes(3, kv_of())
START = BLOCK + HEADER_BYTES  # of the payload in the file


def reads_right_or_misses(store: PageStore, run: Run) -> bool:
    """Whether everything can be read; what can is right."""
    ordered = OrderedRun.of_pages(run.kv, run.pages, run.scores, num_ranks=RANKS)
    found = RowRecords.of(store).open_ordered(run.heads)
    if found is None:
        return False
    keys, first = found.probe_keys(), found.first(16)
    if keys is not None:
        assert unpack_keys(run.kv, keys.reshape(run.kv.num_layers, 48, -1)).tobytes() == run_keys(run).tobytes()
    assert first is None or np.array_equal(first.tokens, ordered.order[:, :, :16])
    is_right = is_of_pages(found, run.pages)
    found.close()
    return keys is not None and first is not None and is_right


def run_keys(run: Run) -> NDArray[np.float32]:
    return KVRows.of_pages(run.kv, run.pages).keys_of(0)


def file_of(directory: Path) -> Path:
    (path,) = single_files(directory)
    return path


def is_right(directory: Path, run: Run) -> bool:
    """The same of a store that is opened for it."""
    with open_store(directory, run) as store:
        return reads_right_or_misses(store, run)


def only_stored(directory: Path, run: Run) -> bytes:
    """Store a run, and close the store; the bytes of its file."""
    stored(directory, run, num_ranks=RANKS).close()
    return file_of(directory).read_bytes()


def test_a_flipped_bit_anywhere_is_a_miss_or_touches_nothing(tmp_path: Path) -> None:
    run, chance = run_of(kv_of(), 3), random.Random(0)
    whole = only_stored(tmp_path, run)
    padding = 0
    places = [chance.randrange(BLOCK, len(whole)) for _ in range(30)]
    places += [START + LAYOUT.chunk(block, group).start + 3 for block in range(2) for group in range(6)]
    places += [START + place for place in (LAYOUT.tail.start + 5, LAYOUT.block_head(1).start + 70)]
    places.append(START + LAYOUT.tail.start + 2 * LAYOUT.probe_bytes + 7)  # of a checksum of a part
    places += [START + LAYOUT.block_head(0).start, *(BLOCK + place for place in (9, 20, 60, 110, 440))]
    for place in places:
        broken = bytearray(whole)
        broken[place] ^= 1 << chance.randrange(8)
        for is_reopened in (False, True):
            with stored(tmp_path, run, num_ranks=RANKS) as store:
                path = file_of(tmp_path)
                content = bytearray(path.read_bytes())
                content[place] ^= 1 << chance.randrange(8)
                path.write_bytes(content)
                if is_reopened:
                    store.close()
                    store = open_store(tmp_path, run)
                right = reads_right_or_misses(store, run)
                padding += right
                assert (num_found(store, run.heads) == 3) == right  # what broke is found no more
                store.put((), run.pages[:0])
                assert len(single_files(tmp_path)) == right  # and its file goes with the next change
                store.close()
    assert 0 < padding < len(places)  # most of so small a run is what fills up units


def test_a_flipped_bit_in_a_page_is_no_row_of_a_run_and_the_page_is_found_no_more(tmp_path: Path) -> None:
    run, chance = run_of(kv_of(), 3), random.Random(0)
    record_bytes = BLOCK + padded(run.kv.page_bytes)
    for layer in range(2):
        with stored(tmp_path / str(layer), run, num_ranks=RANKS) as store:
            [path] = (tmp_path / str(layer)).glob("segment-*.pages")
            part, content = LAYOUT.part(layer), bytearray(path.read_bytes())
            assert len(content) == BLOCK + 3 * record_bytes
            place = BLOCK + record_bytes + chance.randrange(part.start, part.stop)
            content[place] ^= 1 << chance.randrange(8)
            path.write_bytes(content)
            found = opened(store, run)
            is_wanted = all_pages(2, 3)
            is_wanted[layer, 1] = False
            assert found.page_rows(is_wanted) is not None  # all but the part that broke
            is_wanted[layer, 1] = True
            assert found.page_rows(is_wanted) is None
            found.close()
            assert RowRecords.of(store).open_ordered(run.heads) is None
            assert store.read(run.heads, np.empty_like(run.pages)) == 1
            assert store.stats().misses == {"payload": 2}


def test_every_byte_of_a_header_is_checked_and_so_is_its_format(tmp_path: Path) -> None:
    run = run_of(kv_of(), 3)
    with stored(tmp_path, run, num_ranks=RANKS) as store:
        header = file_of(tmp_path).read_bytes()[BLOCK:START]
        assert Record.decode(header) is not None
        for place in range(len(header)):
            broken = bytearray(header)
            broken[place] ^= 1 << place % 8
            assert Record.decode(broken) is None, place
        for place in (0, 8):  # the magic, the version
            other = bytearray(header[:-CHECKSUM_BYTES])
            other[place] ^= 1
            assert Record.decode(sealed(bytes(other), len(header))) is None
        with file_of(tmp_path).open("r+b") as file:
            file.seek(BLOCK)
            file.write(broken)
        assert RowRecords.of(store).open_ordered(run.heads) is None
        assert store.stats().misses == {"header": 1}


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 8192, -1, -4096])
def test_a_cut_file_is_a_miss(tmp_path: Path, num_bytes: int) -> None:
    run = run_of(kv_of(), 3)
    with stored(tmp_path, run, num_ranks=RANKS) as store:
        whole = file_of(tmp_path).read_bytes()
        file_of(tmp_path).write_bytes(whole[:num_bytes])
        assert not reads_right_or_misses(store, run)
    only_stored(tmp_path, run)
    file_of(tmp_path).write_bytes(whole[:num_bytes])
    with open_store(tmp_path, run) as store:
        assert RowRecords.of(store).open_ordered(run.heads) is None
        assert single_files(tmp_path) == []


@pytest.mark.parametrize("kind", ["identity", "namespace", "parent", "tokens", "key", "place"])
def test_a_run_of_anything_else_is_a_miss_of_its_kind(tmp_path: Path, kind: str) -> None:
    run = run_of(kv_of(), 3)
    with stored(tmp_path, run, num_ranks=RANKS) as store:
        whole = file_of(tmp_path).read_bytes()
        record = Record.decode(whole[BLOCK:START])
        assert record is not None
        header, at = record.header, len(record.header.details) - 24 - 3 * 64
        others = {
            "identity": replace(record, identity_digest=bytes(32)),
            "namespace": replace(record, header=replace(header, namespace=BOB)),
            "parent": replace(record, header=replace(header, details=_with(header.details, at - 32, b"x" * 32))),
            "tokens": replace(record, header=replace(header, details=_with(header.details, at, bytes(64)))),
            "key": replace(record, header=replace(header, parent_key=bytes(32))),
            "place": replace(record, segment=7),
        }
        file_of(tmp_path).write_bytes(whole[:BLOCK] + others[kind].encode() + whole[START:])
        assert RowRecords.of(store).open_ordered(run.heads) is None
        assert store.stats().misses == {kind: 1}


def _with(whole: bytes, start: int, part: bytes) -> bytes:
    return whole[:start] + part + whole[start + len(part) :]


def test_a_block_of_the_same_run_in_an_older_order_is_a_miss(tmp_path: Path) -> None:
    run, block = run_of(kv_of(), 3), LAYOUT.blocks(1, 2)
    with stored(tmp_path, run, num_ranks=RANKS) as store:
        before = file_of(tmp_path).read_bytes()
        put_run(store, run, -1, num_ranks=RANKS)
        whole = file_of(tmp_path).read_bytes()
        part = before[START + block.start : START + block.stop]
        file_of(tmp_path).write_bytes(_with(whole, START + block.start, part))
        assert not reads_right_or_misses(store, replace(run, scores=-run.scores))


def test_a_block_of_another_stores_segment_of_this_number_is_a_miss(tmp_path: Path) -> None:
    run, other = run_of(kv_of(), 3), run_of(kv_of(), 3, 1)
    whole, theirs = only_stored(tmp_path / "ours", run), only_stored(tmp_path / "theirs", other)
    path, block = file_of(tmp_path / "ours"), LAYOUT.blocks(1, 2)
    assert path.name == file_of(tmp_path / "theirs").name
    path.write_bytes(_with(whole, START + block.start, theirs[START + block.start : START + block.stop]))
    assert not is_right(tmp_path / "ours", run)


def test_blocks_of_another_run_or_place_are_misses(tmp_path: Path) -> None:
    run, other = run_of(kv_of(), 3), run_of(kv_of(), 3, 1)
    whole = only_stored(tmp_path, run)
    with open_store(tmp_path, run) as store:
        put_run(store, other, num_ranks=RANKS)
    path, theirs = single_files(tmp_path)
    block, first, chunk = LAYOUT.blocks(1, 2), LAYOUT.blocks(0, 1), LAYOUT.chunk(0, 0)
    chunks = [whole[START + part.start : START + part.stop] for part in (chunk, LAYOUT.chunk(0, 1))]
    for start, part in (
        (block.start, theirs.read_bytes()[START + block.start : START + block.stop]),
        (block.start, whole[START + first.start : START + first.stop]),
        (chunk.start, b"".join(reversed(chunks))),
    ):
        path.write_bytes(_with(whole, START + start, part))
        assert not is_right(tmp_path, run)
        with open_store(tmp_path, run) as store:
            put_run(store, run, num_ranks=RANKS)
        path = max(set(single_files(tmp_path)) - {theirs})
        whole = path.read_bytes()


def test_after_any_loss_of_power_there_is_the_old_run_or_the_new_one(tmp_path: Path) -> None:
    run, chance = run_of(kv_of(layers=1), 3), random.Random(1)
    orders = [OrderedRun.of_pages(run.kv, run.pages, scores).order for scores in (run.scores, -run.scores)]
    seen = set()
    for at in range(60):
        directory, left = tmp_path / str(at), tmp_path / f"left {at}"
        only_stored(directory, run)
        fault = FailAt(at, PowerLost())
        files = FaultyFiles(before=fault, max_write=1 << chance.randrange(9, 16))
        with contextlib.suppress(PowerLost):
            put_run(open_store(directory, run, files), run, -1, num_ranks=RANKS)
        files.lose_power(directory, left, chance)
        with open_store(left, run) as store:
            found = RowRecords.of(store).open_ordered(run.heads)
            assert found is not None and is_of_pages(found, run.pages)
            order = found.order()
            assert order is not None
            (which,) = (i for i, each in enumerate(orders) if np.array_equal(each[..., :RANKS], order))
            found.close()
        seen.add(which)
        assert len(single_files(left)) == 1
        if not fault.has_failed:
            break
    assert not fault.has_failed and seen == {0, 1}


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_put_that_fails_leaves_the_run_that_was_there(tmp_path: Path, error: int) -> None:
    run = run_of(kv_of(layers=1), 3)
    for at in range(40):
        directory = tmp_path / str(at)
        only_stored(directory, run)
        files = FaultyFiles()
        with open_store(directory, run, files) as store:
            files.before = fault = FailAt(at, error, operations=("open", "pwritev", "fdatasync", "fsync_dir"))
            if not put_run(store, run, -1, num_ranks=RANKS):
                assert store.stats().is_off == (error == errno.EIO)
                assert store.stats().num_bytes == sum(path.stat().st_size for path in directory.glob("segment-*"))
        if not fault.has_failed:
            return
        assert is_right(directory, run) or is_right(directory, replace(run, scores=-run.scores))
    pytest.fail("there was no end to the operations")
