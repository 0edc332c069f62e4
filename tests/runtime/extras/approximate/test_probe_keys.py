"""What memory knows of runs is dropped in the order of its use, and looking through it is no use."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from radixlm.runtime.extras.approximate.packed_keys import MEMORY_SHARE, PackedKeys, num_kept, slowest
from radixlm.runtime.extras.approximate.probe_keys import ProbeKeyCache
from radixlm.runtime.extras.approximate.records.ordered_record import RunTables
from radixlm.runtime.extras.approximate.records.row_records import RowRecords
from radixlm.runtime.extras.approximate.records.scores_record import RowScores
from radixlm.runtime.extras.approximate.row_selection import ranks_to_store
from radixlm.runtime.store import PageKey

from ...store.pages import ALICE, BOB, chain
from .records.runs import identity_of, kv_of, open_store, opened, run_of

KV = kv_of()
KEYS = np.zeros((2, 16, 8), np.float16)
DIMS = np.array([range(8)] * 2)
NUM_BYTES = PackedKeys.of(KEYS, DIMS).nbytes + 100


@dataclass
class FakeRun:
    """As much of an open run as the cache looks at."""

    header: PageKey
    tables: RunTables = field(default_factory=lambda: RunTables(1, []))
    table_bytes: int = 100

    @property
    def layout(self) -> FakeRun:
        return self


def page(seed: int, namespace: bytes) -> PageKey:
    return chain(1, seed, namespace=namespace, identity=identity_of(KV))[0]


def test_forgetting_a_namespace_is_no_use_of_the_runs_of_others() -> None:
    known = ProbeKeyCache(DIMS, 3 * NUM_BYTES)
    kept, left, gone, new = page(1, ALICE), page(2, ALICE), page(3, BOB), [page(4, ALICE), page(5, ALICE)]

    def keep(head: PageKey) -> None:
        run: Any = FakeRun(head)
        known.keep(run, known.pack(KEYS))

    for head in (kept, left, gone):
        keep(head)
    assert known.find([kept])  # the one used longest ago is now `left`
    known.discard(BOB)
    for head in new:
        keep(head)
    assert known.find([kept]) and not known.find([left]) and not known.find([gone])
    assert known.num_bytes == 3 * NUM_BYTES


def test_keys_of_which_other_numbers_were_kept_are_not_known() -> None:
    known, run = ProbeKeyCache(DIMS), page(1, ALICE)
    other: Any = FakeRun(run)
    assert known.keep(other, ProbeKeyCache(DIMS[:, :4]).pack(KEYS)) is None and not known.find([run])
    assert known.keep(other, known.pack(KEYS)) is not None and known.find([run])


def test_pages_with_their_run_and_scores_take_at_most_1_35_of_pages_alone(tmp_path: Path) -> None:
    run = run_of(kv_of("k12v8", layers=30, heads=3, head_dim=64), 56)  # SmolLM2's keys and values of 896 tokens
    known = ProbeKeyCache(slowest([64] * 30, 64, num_kept(run.kv, MEMORY_SHARE)))
    with open_store(tmp_path, run) as store, np.errstate(all="ignore"):  # any bits
        store.put(run.heads, run.pages)
        alone = store.stats().num_bytes
        num_ranks = ranks_to_store(56 * 16, is_start=True)
        assert RowRecords.of(store).rewrite(run.heads, run.scores, num_ranks=num_ranks, pack_probe=known.pack).stored
        assert (
            RowRecords.of(store)
            .scores.put(run.heads, RowScores(run.scores, run.scores, np.ones(56 * 16, np.float32)))
            .stored
        )
        store.gc()
        assert alone < store.stats().num_bytes <= 1.35 * alone
        reader = opened(store, run)
        packed = reader.probe_keys()
        assert packed is not None
        kept = known.keep(reader, packed)
        assert kept is not None and kept.num_bytes <= 0.0403 * run.pages.nbytes
        reader.close()
