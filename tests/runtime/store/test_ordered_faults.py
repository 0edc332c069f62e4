"""A run whose file broke, was moved, or was never finished is a miss: no read gives anything but what was written."""

from __future__ import annotations

import errno
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from radixlm.runtime.model.kv_rows import KVRows
from radixlm.runtime.store.files import OSFiles
from radixlm.runtime.store.ordered_file import RunHeader
from radixlm.runtime.store.ordered_layout import OrderedLayout
from radixlm.runtime.store.ordered_run import OrderedRun
from radixlm.runtime.store.ordered_store import OrderedStore
from radixlm.runtime.store.record import CHECKSUM_BYTES, sealed

from .faulty_files import FailAt, FaultyFiles, PowerLost
from .pages import BOB
from .runs import Run, kv_of, run_of
from .test_ordered_store import assert_same_rows, stored

LAYOUT = OrderedLayout(kv_of(), 48)


def reads_right_or_misses(store: OrderedStore, run: Run) -> bool:
    """Whether everything can be read; what can is right."""
    wanted = np.arange(3 * run.kv.num_layers).reshape(-1, 3, 1) * 7
    ordered = OrderedRun.of_pages(run.kv, run.pages, run.scores)
    found = store.open_run(run.heads)
    if found is None:
        return False
    keys, chosen, pages = found.probe_keys(), found.at(wanted), found.pages()
    assert keys is None or keys.tobytes() == run_keys(run).tobytes()
    assert chosen is None or np.array_equal(chosen.tokens, wanted)
    if chosen is not None:
        assert_same_rows(chosen.rows, KVRows.of_pages(run.kv, run.pages).take(wanted))
    assert pages is None or (pages == run.pages).all()
    first = found.first(16)
    assert first is None or np.array_equal(first.tokens, ordered.order[:, :, :16])
    found.close()
    return keys is not None and chosen is not None and pages is not None and first is not None


def run_keys(run: Run) -> NDArray[np.float32]:
    return KVRows.of_pages(run.kv, run.pages).keys_of(0)


def file_of(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


def test_a_flipped_bit_anywhere_is_a_miss_or_touches_nothing(tmp_path: Path) -> None:
    run = run_of(kv_of(), 3)
    stored(tmp_path, run)
    whole, chance = file_of(tmp_path).read_bytes(), random.Random(0)
    padding = 0
    places = [chance.randrange(len(whole)) for _ in range(30)]
    places += [LAYOUT.chunk(block, group).start + 3 for block in range(3) for group in range(6)]
    places += [LAYOUT.probe.start + 5, LAYOUT.block_head(1).start + 70, LAYOUT.block_head(2).start, 9, 20, 60, 110, 440]
    for place in places:
        broken = bytearray(whole)
        broken[place] ^= 1 << chance.randrange(8)
        for is_reopened in (False, True):
            (tmp_path / "ordered-0000000001.run").write_bytes(whole)
            store = OrderedStore.open(tmp_path, run.identity, OSFiles())
            (tmp_path / "ordered-0000000001.run").write_bytes(broken)
            if is_reopened:
                store = OrderedStore.open(tmp_path, run.identity, OSFiles())
            is_right = reads_right_or_misses(store, run)
            padding += is_right
            assert (store.find(run.heads) == 3) == is_right  # what broke is found no more
            store.put(run.heads[:1], OrderedRun.of_pages(run.kv, run.pages[:1], run.scores[..., :16]))
            assert len(list(tmp_path.iterdir())) == 1 + is_right  # and its file goes with the next change
            store.shrink(0)
    assert 0 < padding < len(places)  # most of so small a run is what fills up units


def test_every_byte_of_a_header_is_checked_and_so_is_its_format(tmp_path: Path) -> None:
    run = run_of(kv_of(), 3)
    store = stored(tmp_path, run)
    header = file_of(tmp_path).read_bytes()[: LAYOUT.header_bytes]
    assert RunHeader.decode(header) is not None
    for place in range(len(header)):
        broken = bytearray(header)
        broken[place] ^= 1 << place % 8
        assert RunHeader.decode(broken) is None, place
    for place in (0, 8):  # the magic, the version
        other = bytearray(header[:-CHECKSUM_BYTES])
        other[place] ^= 1
        assert RunHeader.decode(sealed(bytes(other), len(header))) is None
    with file_of(tmp_path).open("r+b") as file:
        file.write(broken)
    assert store.open_run(run.heads) is None
    assert store.misses() == {"header": 1}


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 8192, -1, -4096])
def test_a_cut_file_is_a_miss(tmp_path: Path, num_bytes: int) -> None:
    run = run_of(kv_of(), 3)
    store = stored(tmp_path, run)
    whole = file_of(tmp_path).read_bytes()
    file_of(tmp_path).write_bytes(whole[:num_bytes])
    assert not reads_right_or_misses(store, run)
    assert OrderedStore.open(tmp_path, run.identity, OSFiles()).find(run.heads) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_anything_else_is_a_miss_of_its_kind(tmp_path: Path) -> None:
    run = run_of(kv_of(), 3)
    stored(tmp_path, run)
    whole = file_of(tmp_path).read_bytes()
    header = RunHeader.decode(whole[: LAYOUT.header_bytes])
    assert header is not None
    others = {
        "identity": replace(header, identity_digest=bytes(32)),
        "namespace": replace(header, namespace=BOB),
        "parent": replace(header, parent_key=b"x" * 32),
        "tokens": replace(header, tokens=bytes(64) + header.tokens[64:]),
        "key": replace(header, key=bytes(32)),
        "place": replace(header, number=7),
    }
    for kind, other in others.items():
        file_of(tmp_path).write_bytes(whole)
        store = OrderedStore.open(tmp_path, run.identity, OSFiles())
        file_of(tmp_path).write_bytes(other.encode() + whole[LAYOUT.header_bytes :])
        assert store.open_run(run.heads) is None
        assert store.misses() == {kind: 1}
        if kind != "identity":
            OrderedStore.open(tmp_path, run.identity, OSFiles())
            assert list(tmp_path.iterdir()) == []
            (tmp_path / "ordered-0000000001.run").touch()


def test_a_block_of_the_same_run_in_an_older_order_is_a_miss(tmp_path: Path) -> None:
    run = run_of(kv_of(), 3)
    older = stored(tmp_path, run)
    before = file_of(tmp_path).read_bytes()
    older.put(run.heads, OrderedRun.of_pages(run.kv, run.pages, -run.scores))
    path, block = file_of(tmp_path), LAYOUT.blocks(1, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[: block.start] + before[block.start : block.stop] + whole[block.stop :])
    assert not reads_right_or_misses(
        OrderedStore.open(tmp_path, run.identity, OSFiles()), replace(run, scores=-run.scores)
    )


def test_a_block_of_another_stores_file_of_this_number_is_a_miss(tmp_path: Path) -> None:
    run, other = run_of(kv_of(), 3), run_of(kv_of(), 3, 1)
    stored(tmp_path / "ours", run)
    stored(tmp_path / "theirs", other)
    path, block = file_of(tmp_path / "ours"), LAYOUT.blocks(1, 2)
    whole, theirs = path.read_bytes(), file_of(tmp_path / "theirs").read_bytes()
    path.write_bytes(whole[: block.start] + theirs[block.start : block.stop] + whole[block.stop :])
    assert not reads_right_or_misses(OrderedStore.open(tmp_path / "ours", run.identity, OSFiles()), run)


def test_blocks_of_another_run_or_place_are_misses(tmp_path: Path) -> None:
    run, other = run_of(kv_of(), 3), run_of(kv_of(), 3, 1)
    store = stored(tmp_path, run)
    path = file_of(tmp_path)
    store.put(other.heads, OrderedRun.of_pages(other.kv, other.pages, other.scores))
    whole, theirs = path.read_bytes(), (tmp_path / "ordered-0000000002.run").read_bytes()
    block = LAYOUT.blocks(1, 2)
    path.write_bytes(whole[: block.start] + theirs[block.start : block.stop] + whole[block.stop :])
    assert not reads_right_or_misses(store, run)
    first = LAYOUT.blocks(0, 1)
    path.write_bytes(whole[: block.start] + whole[first.start : first.stop] + whole[block.stop :])
    assert not reads_right_or_misses(OrderedStore.open(tmp_path, run.identity, OSFiles()), run)
    chunks = [whole[LAYOUT.chunk(0, group).start : LAYOUT.chunk(0, group).stop] for group in range(2)]
    start = LAYOUT.chunk(0, 0).start
    swapped = b"".join(reversed(chunks))
    path.write_bytes(whole[:start] + swapped + whole[start + len(swapped) :])
    assert not reads_right_or_misses(OrderedStore.open(tmp_path, run.identity, OSFiles()), run)


def test_after_any_loss_of_power_there_is_the_old_run_or_the_new_one(tmp_path: Path) -> None:
    run, chance = run_of(kv_of(layers=1), 3), random.Random(1)
    better = replace(run, scores=-run.scores)
    seen = set()
    for at in range(40):
        directory, left = tmp_path / str(at), tmp_path / f"left {at}"
        stored(directory, run)
        fault = FailAt(at, PowerLost())
        files = FaultyFiles(before=fault, max_write=1 << chance.randrange(9, 16))
        try:
            store = OrderedStore.open(directory, run.identity, files)
            store.put(run.heads, OrderedRun.of_pages(run.kv, run.pages, better.scores))
        except PowerLost:
            pass
        files.lose_power(directory, left, chance)
        found = OrderedStore.open(left, run.identity, OSFiles()).open_run(run.heads)
        assert found is not None and (found.pages() == run.pages).all()
        first = found.first(48)
        assert first is not None
        orders = [OrderedRun.of_pages(run.kv, run.pages, scores).order for scores in (run.scores, better.scores)]
        (which,) = (i for i, order in enumerate(orders) if np.array_equal(order, first.tokens))
        seen.add(which)
        assert len(list(left.iterdir())) == 1
        if not fault.has_failed:
            break
    assert not fault.has_failed and seen == {0, 1}


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_put_that_fails_leaves_the_run_that_was_there(tmp_path: Path, error: int) -> None:
    run = run_of(kv_of(layers=1), 3)
    for at in range(40):
        directory = tmp_path / str(at)
        stored(directory, run)
        files = FaultyFiles()
        store = OrderedStore.open(directory, run.identity, files)
        files.before = fault = FailAt(at, error, operations=("open", "pwritev", "fdatasync", "fsync_dir"))
        try:
            store.put(run.heads, OrderedRun.of_pages(run.kv, run.pages, -run.scores))
        except OSError:
            assert reads_right_or_misses(store, run)
            assert store.num_bytes == sum(path.stat().st_size for path in directory.iterdir())
        if not fault.has_failed:
            return
    pytest.fail("there was no end to the operations")
