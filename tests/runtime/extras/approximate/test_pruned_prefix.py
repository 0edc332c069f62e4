"""A part of a prefix is right rows, as many in each layer and head, or none at all; whatever happens to its files."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from radixlm.runtime.artifact.manifest import KVDType, KVLayout
from radixlm.runtime.extras.approximate import pruned_prefix
from radixlm.runtime.extras.approximate.packed_keys import JoinedKeys, PackedKeys
from radixlm.runtime.extras.approximate.probe_keys import ProbeKeyCache
from radixlm.runtime.extras.approximate.pruned_prefix import PrunedPrefix
from radixlm.runtime.extras.approximate.records.ordered_layout import OrderedLayout
from radixlm.runtime.extras.approximate.records.row_records import RowRecords
from radixlm.runtime.extras.approximate.row_selection import (
    always,
    num_rows,
    probe,
    ranks_to_store,
    scores_to_store,
    with_probed,
)
from radixlm.runtime.model.kv_rows import ROW_DTYPES, KVRows
from radixlm.runtime.store import NO_PARENT, OSFiles, PageKey, PageStore
from radixlm.runtime.store.record import BLOCK, padded

from ...store.faulty_files import FailAt, FaultyFiles
from ...store.pages import BOB, chain
from .records.runs import DTYPES, identity_of, kv_of

PROBE_HEAD = 1
DIMS = np.array([range(8)] * 2)
PACK = ProbeKeyCache(DIMS).pack


@dataclass(frozen=True)
class Stored:
    """A prefix whose pages are in a store, in ordered runs of so many pages each."""

    store: PageStore
    directory: Path
    kv: KVLayout
    heads: list[PageKey]
    exact: KVRows
    queries: NDArray[np.float32]

    @property
    def num_tokens(self) -> int:
        return 16 * len(self.heads)

    def open(self, budget: float, known: ProbeKeyCache | None = None, *, num_before: int = 0) -> PrunedPrefix | None:
        known = ProbeKeyCache(DIMS) if known is None else known
        return PrunedPrefix.open(
            RowRecords.of(self.store), self.heads, budget=budget, num_before=num_before, known=known
        )

    def opened(self, budget: float, known: ProbeKeyCache | None = None) -> PrunedPrefix:
        part = self.open(budget, known)
        assert part is not None
        return part


def stored(
    directory: Path, lengths: Sequence[int], *, dtype: KVDType = "f16", seed: int = 0, files: OSFiles | None = None
) -> Stored:
    """Runs that have a quarter of the rows; half of the seeds put what is always read first in them, as it ships."""
    rng, kv, num_tokens = np.random.default_rng(seed), kv_of(dtype), 16 * sum(lengths)
    shape = (2, kv.num_layers, kv.num_kv_heads, num_tokens, kv.head_dim)
    items = rng.integers(-127, 128, shape) if kv.has_codes else rng.normal(size=shape) * 2
    scales = rng.random(shape[:-1], np.float32) / 50 if kv.has_codes else None
    exact = KVRows(kv, items.astype(ROW_DTYPES[dtype]), scales)
    identity = identity_of(kv)
    heads = chain(sum(lengths), seed, identity=identity)
    store = PageStore.open(directory, identity, max_bytes=8 << 20, files=files)
    store.put(heads, exact.to_pages())
    first = 0
    for length in lengths:
        scores = rng.integers(0, 30, (kv.num_layers, kv.num_kv_heads, 16 * length)).astype(np.float32)
        ranked = scores_to_store(scores, is_start=first == 0) if seed % 2 else scores
        some, num_ranks = heads[first : first + length], ranks_to_store(16 * length, is_start=first == 0)
        options: dict[str, Any] = {"num_ranks": num_ranks, "probe_head": PROBE_HEAD, "pack_probe": PACK}
        assert len(RowRecords.of(store).rewrite(some, ranked, **options).stored) == length
        first += length
    return Stored(
        store, directory, kv, heads, exact, rng.normal(size=(kv.num_layers, 5, 2, kv.head_dim)).astype(np.float32)
    )


def rows_of(part: PrunedPrefix, it: Stored) -> NDArray[np.int64]:
    """Which tokens were read, by the bytes of their keys, ascending; all of `rows` are rows of the prefix."""
    pages = part.rows()
    count = part.num_there
    assert len(pages) == -(-count // 16)
    read, found = KVRows.of_pages(it.kv, pages, count), np.empty((*it.exact.items.shape[1:3], count), np.int64)
    for layer, head in np.ndindex(found.shape[:2]):
        place = {it.exact.items[0, layer, head, token].tobytes(): token for token in range(it.num_tokens)}
        found[layer, head] = [place[row.tobytes()] for row in read.items[0, layer, head]]
    assert (it.exact.take(found).to_pages() == pages).all() and (found == part.chosen[..., :count]).all()
    for some in np.split(found, [part.num_stored], axis=-1):
        assert (np.diff(some, axis=-1) > 0).all()
    return np.sort(found, axis=-1)


@pytest.fixture
def prefix(tmp_path: Path) -> Iterator[Stored]:
    it = stored(tmp_path / "store", [6, 4, 5], seed=1)
    yield it
    it.store.close()


def test_what_is_always_read_and_is_in_no_run_is_read_from_pages(tmp_path: Path) -> None:
    it = stored(tmp_path / "store", [6, 4], seed=0)
    with closing(it.store), closing(it.opened(0.3)) as part:
        assert part.read_stored_rows() and part.num_reads == 2 + 2 + 2 + 2, "headers, probe keys, first ranks, pages"
        first = rows_of(part, it)
        for layer, head in np.ndindex(first.shape[:2]):
            assert set(always(it.num_tokens).tolist()) <= set(first[layer, head].tolist())


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    budget=st.floats(0.01, 1.0),
    num_before=st.sampled_from([0, 32]),
    seed=st.integers(0, 2**16),
)
@example([9, 9, 7], "k12v8", 0.6875, 0, 8105)  # 16 bits rank two chunks the other way round than 32
@settings(max_examples=25, deadline=None)
def test_what_is_read_is_what_is_chosen(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    dtype: KVDType,
    budget: float,
    num_before: int,
    seed: int,
) -> None:
    it, known = stored(tmp_path_factory.mktemp("store") / "s", lengths, dtype=dtype, seed=seed), ProbeKeyCache(DIMS)
    with closing(it.store):
        for is_known in (False, True):
            part = it.open(budget, known, num_before=num_before)
            assert part is not None and part.num_there == 0
            assert part.num_rows == num_rows(it.num_tokens, budget)
            assert part.read_stored_rows()
            first = rows_of(part, it)
            assert part.num_there == part.num_stored == first.shape[-1] <= part.num_rows
            dropped = part.choose(it.queries)
            assert 0 <= dropped <= 1
            assert part.read_chosen_rows()
            chosen = rows_of(part, it)
            assert part.num_there == part.num_rows == chosen.shape[-1]
            ends, keys = np.cumsum([16 * length for length in lengths])[:-1], it.exact.keys_of(PROBE_HEAD)
            keys_in_memory = JoinedKeys([PackedKeys.of(part, DIMS) for part in np.split(keys, ends, axis=1)])
            seen = probe(it.queries, keys_in_memory, first[:, PROBE_HEAD])
            assert (chosen == with_probed(first, seen.largest, part.num_rows)).all()
            for layer, head in np.ndindex(first.shape[:2]):
                assert set(always(it.num_tokens, num_before).tolist()) <= set(first[layer, head].tolist())
            kept = np.take_along_axis(seen.mean, chosen[:, PROBE_HEAD], axis=-1).sum(axis=-1)
            assert dropped == pytest.approx(1 - kept.mean(), abs=2e-3)
            assert (known.num_bytes > 0) == (part.num_rows < it.num_tokens)
            assert not is_known or part.num_reads <= len(lengths) * (2 + 2 * 2 * sum(lengths))
            part.close()


def test_a_budget_of_one_has_all_rows_of_the_pages_to_the_last_bit(prefix: Stored) -> None:
    part = prefix.opened(1.0)
    assert part.num_rows == prefix.num_tokens
    assert part.read_stored_rows() and part.num_reads == 6  # a header and all of each run at once
    dropped = part.choose(prefix.queries)
    assert dropped == 0
    assert part.read_chosen_rows()
    read = KVRows.of_pages(prefix.kv, part.rows())
    assert (read.take(np.argsort(part.chosen, axis=-1)).to_pages() == prefix.exact.to_pages()).all()
    part.close()
    part.close()


def test_what_is_known_is_not_read_again(prefix: Stored) -> None:
    known = ProbeKeyCache(DIMS)
    asked = []
    for _ in range(2):
        part = prefix.opened(0.3, known)
        estimate, before = part.bytes_to_read, part.bytes_read
        assert before == 3 * 4096 == 4096 * part.num_reads  # the headers
        assert part.read_stored_rows() and part.choose(prefix.queries) < 1 and part.read_chosen_rows()
        asked.append((part.bytes_read, part.num_reads, estimate))
        part.close()
    assert asked[1][0] < asked[0][0] and asked[1][1] < asked[0][1] and asked[1][2] < asked[0][2]


def test_an_order_written_again_is_another_run(prefix: Stored) -> None:
    known = ProbeKeyCache(DIMS)
    for seed in range(3):
        part = prefix.opened(0.3, known)
        assert part.read_stored_rows()
        rows_of(part, prefix)
        assert part.choose(prefix.queries) < 1 and part.read_chosen_rows()
        rows_of(part, prefix)
        part.close()
        scores = np.random.default_rng(seed).random((2, 3, 64))
        options: dict[str, Any] = {"num_ranks": 32, "probe_head": PROBE_HEAD, "pack_probe": PACK}
        assert RowRecords.of(prefix.store).rewrite(prefix.heads[6:10], scores, **options).stored


def test_runs_that_leave_a_gap_or_differ_in_their_probe_are_not_opened(prefix: Stored) -> None:
    known = ProbeKeyCache(DIMS)
    for heads in ([], prefix.heads[1:], prefix.heads[:5], prefix.heads[:14]):
        assert PrunedPrefix.open(RowRecords.of(prefix.store), heads, budget=0.5, num_before=0, known=known) is None
    parts = [prefix.heads[:6], prefix.heads[6:10], prefix.heads[6:]]
    for heads in parts:
        part = PrunedPrefix.open(RowRecords.of(prefix.store), heads, budget=0.5, num_before=16, known=known)
        assert part is not None and part.num_tokens == 16 * len(heads)
        part.close()
    RowRecords.of(prefix.store).rewrite(prefix.heads[6:10], np.zeros((2, 3, 64)), probe_head=0, pack_probe=PACK)
    assert prefix.open(0.5) is None
    other = chain(6, 5, namespace=BOB, identity=identity_of(prefix.kv), parent_key=NO_PARENT)
    assert PrunedPrefix.open(RowRecords.of(prefix.store), other, budget=0.5, num_before=0, known=known) is None


def test_a_closed_store_opens_nothing_and_what_is_open_reads_on(prefix: Stored) -> None:
    part = prefix.opened(0.3)
    prefix.store.close()
    assert prefix.open(0.3) is None
    assert part.read_stored_rows()
    rows_of(part, prefix)
    part.close()


def test_a_discarded_run_is_read_no_more(prefix: Stored) -> None:
    known = ProbeKeyCache(DIMS)
    part = prefix.opened(0.3, known)
    assert part.read_stored_rows() and part.choose(prefix.queries) < 1
    assert known.num_bytes > 0
    prefix.store.discard(prefix.heads[0].namespace)
    known.discard(prefix.heads[0].namespace)
    assert known.num_bytes == 0
    assert not part.read_chosen_rows() and part.num_there == 0
    part.close()
    assert prefix.open(0.3) is None


def test_flipped_bits_are_no_rows(tmp_path: Path) -> None:
    it, chance = stored(tmp_path / "store", [6, 4]), random.Random(0)
    it.store.close()
    wholes = {path: path.read_bytes() for path in (tmp_path / "store").glob("segment-*")}
    runs = [path for path in wholes if path.suffix == ".run"]
    [pages] = set(wholes) - set(runs)
    probe_bytes = PACK(it.exact.keys_of(PROBE_HEAD)[:, :96]).shape[1]
    layout, longest = OrderedLayout(it.kv, 96, 32, 16, probe_bytes), max(runs, key=lambda path: len(wholes[path]))
    start = len(wholes[longest]) - layout.num_bytes  # of the payload in the file
    places = [(longest, start + place) for place in (layout.block_head(1).start, layout.tail.start + 9)]
    places += [(longest, start + layout.chunk(1, group).start + 3) for group in range(6)]
    places.append((longest, BLOCK + 70))
    record_bytes, parts = BLOCK + padded(it.kv.page_bytes), [layout.part(layer) for layer in range(2)]
    picks = [BLOCK + number * record_bytes + part.start + 5 for number in range(10) for part in parts]
    places += [(path, chance.randrange(len(whole))) for path, whole in wholes.items() for _ in range(12)]
    outcomes = set()
    for path, place in [*places, *((pages, pick) for pick in picks)]:
        broken = bytearray(wholes[path])
        broken[place] ^= 1 << chance.randrange(8)
        with reopened(it) as again:
            path.write_bytes(broken)
            outcomes.add((path == pages, read_right_or_not(again)))
        for each, whole in wholes.items():
            each.write_bytes(whole)
        (tmp_path / "store" / "index.sqlite").unlink()  # which has forgotten what was found wrong
    assert outcomes >= {(False, "not opened"), (False, "nothing stored"), (False, "right"), (True, "right")}
    assert outcomes >= {(True, "nothing chosen"), (True, "nothing stored")}, "what is always read may be in pages"


def test_a_disk_that_fails_gives_no_rows_and_turns_the_store_off(tmp_path: Path) -> None:
    it = stored(tmp_path / "store", [6, 4])
    it.store.close()
    wholes = {path: path.read_bytes() for path in it.directory.glob("segment-*")}
    outcomes = []
    for at in range(100):
        with reopened(it, files := FaultyFiles()) as again:
            files.before = fault = FailAt(at, operations=("open", "preadv", "drop_cache"))
            outcomes.append(read_right_or_not(again))
            assert (outcomes[-1] != "right") == fault.has_failed == (again.store.stats().off_because is not None)
        for path, whole in wholes.items():
            path.write_bytes(whole)
        if not fault.has_failed:
            break
    assert not fault.has_failed and set(outcomes) == {"not opened", "nothing stored", "nothing chosen", "right"}


@contextmanager
def reopened(it: Stored, files: OSFiles | None = None) -> Iterator[Stored]:
    with PageStore.open(it.directory, it.store.identity, max_bytes=8 << 20, files=files) as store:
        yield replace(it, store=store)


def read_right_or_not(it: Stored) -> str:
    """How far it came; what it had until then was right."""
    part = it.open(0.6)
    if part is None:
        return "not opened"
    with closing(part):
        if not part.read_stored_rows():
            assert part.num_there == 0
            return "nothing stored"
        rows_of(part, it)
        part.choose(it.queries)
        if not part.read_chosen_rows():
            assert part.num_there == 0
            return "nothing chosen"
        assert rows_of(part, it).shape[-1] == part.num_rows
        return "right"


def test_what_is_known_has_a_bound(prefix: Stored) -> None:
    whole = ProbeKeyCache(DIMS)
    part = prefix.opened(0.3, whole)
    assert part.read_stored_rows()
    part.close()
    small = ProbeKeyCache(DIMS, max_bytes=whole.num_bytes - 1)
    part = prefix.opened(0.3, small)
    assert part.read_stored_rows()  # though what it knew of the first run is forgotten by now
    assert 0 < small.num_bytes <= small.max_bytes
    assert small.find(prefix.heads[:6]) is None and small.find(prefix.heads[6:10]) is not None
    assert part.choose(prefix.queries) < 1 and part.read_chosen_rows()
    rows_of(part, prefix)
    part.close()
    small.discard()
    assert small.num_bytes == 0 and small.find(prefix.heads[6:10]) is None


class CountingFiles(OSFiles):
    """Knows which descriptors are open, and that none is closed twice."""

    def __init__(self) -> None:
        self.open_ones: set[int] = set()

    def open(self, path: Path, **options: bool) -> int:
        self.open_ones.add(fd := super().open(path, **options))
        return fd

    def close(self, fd: int) -> None:
        self.open_ones.remove(fd)
        super().close(fd)


def test_no_file_stays_open_whatever_came_of_it(
    prefix: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix.store.close()
    with reopened(prefix, files := CountingFiles()) as it:
        before = set(files.open_ones)
        part = it.opened(0.3)
        assert len(files.open_ones - before) == 3
        assert part.read_stored_rows() and part.choose(it.queries) < 1 and part.read_chosen_rows()
        assert len(files.open_ones - before) > 3, "of pages, too"
        part.close()
        part.close()
        assert files.open_ones == before
        monkeypatch.setattr(pruned_prefix, "MAX_RUNS", 2)
        assert it.open(0.3) is None and files.open_ones == before, "there are three runs"
        monkeypatch.setattr(pruned_prefix, "MAX_RUNS", 3)
        it.opened(0.3).close()
        monkeypatch.setattr(PrunedPrefix, "__init__", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            it.open(0.3)
        assert files.open_ones == before
