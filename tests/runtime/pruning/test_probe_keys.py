"""What memory knows of runs is dropped in the order of its use, and looking through it is no use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from radixlm.runtime.artifact.manifest import KVLayout
from radixlm.runtime.pruning.packed_keys import MEMORY_SHARE, PackedKeys, num_kept, slowest
from radixlm.runtime.pruning.probe_keys import ProbeKeyCache
from radixlm.runtime.store import PageKey
from radixlm.runtime.store.ordered.ordered_record import BlockHeads

from ..store.pages import ALICE, BOB, chain
from ..store.runs import identity_of, kv_of, open_store, opened, run_of

KV = kv_of()
KEYS = np.zeros((2, 16, 8), np.float16)
DIMS = np.array([range(8)] * 2)
NUM_BYTES = PackedKeys.of(KEYS, DIMS).nbytes


@dataclass
class FakeRun:
    """As much of an open run as the cache looks at."""

    header: PageKey
    kv: KVLayout = KV

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
        known.keep(run, BlockHeads(1, []), known.pack(KEYS))

    for head in (kept, left, gone):
        keep(head)
    assert known.find([kept])  # the one used longest ago is now `left`
    known.discard(BOB)
    for head in new:
        keep(head)
    assert known.find([kept]) and not known.find([left]) and not known.find([gone])
    assert known.num_bytes == 3 * NUM_BYTES


def test_a_run_on_disk_takes_little_more_than_its_rows(tmp_path: Path) -> None:
    """A quarter of it more with the keys of the probe head as they lie in rows."""
    run = run_of(kv_of("k12v8", layers=30, heads=3, head_dim=64), 20)
    known = ProbeKeyCache(slowest([64] * 30, 64, num_kept(run.kv, MEMORY_SHARE)))
    with open_store(tmp_path, run) as store, np.errstate(all="ignore"):  # any bits
        store.put(run.heads, run.pages)
        assert store.rewrite(run.heads, run.scores, pack_probe=known.pack).stored
        assert store.stats().num_ordered_bytes < 1.07 * run.pages.nbytes
        reader = opened(store, run)
        packed, heads = reader.probe_keys(), reader.block_heads()
        assert packed is not None and heads is not None and known.keep(reader, heads, packed) is not None
        reader.close()
