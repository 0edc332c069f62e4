"""How many bytes a disk is asked for, for each byte that attention reads, before and after tokens are put in order.

    python -m bench.partial.amplification ARTIFACT

Real KV of real prefixes (`bench/partial/texts.py`) is written as ordered runs in chunks of 16 to 256 tokens, and read
back as a query would, in whole units of 4 KiB; bytes, reads and chunks are what the store's reader counts. Tokens lie

text     as in the text: the same tokens are chosen, one by one
ranked   by the attention of the prefix itself and of its other queries, first and recent tokens before all
quarter  so ranked are as many as a quarter's stored half, and the others lie behind them as in the text: as it ships

stored: the first tokens of each layer and head, as many as fill whole pages of 16. hybrid: half
of them so, the other half in chunks of what ships that a look through the keys of one KV head finds.
What a choice needs to be read with it counts: header, orders and checksums; probe keys too, but for the columns
without. Runs lie where TMPDIR says, for instance in memory: nothing here is a time.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.pruning.packed_keys import PackedKeys
from radixlm.runtime.pruning.row_selection import (
    NUM_FIRST,
    NUM_RECENT,
    num_rows,
    scores_to_store,
    stored_shares,
    with_probed,
)
from radixlm.runtime.store import NO_PARENT, PageKey, PageStore, StoreIdentity
from radixlm.runtime.store.ordered.ordered_reader import OpenRun, ReadCounts
from radixlm.runtime.store.ordered.ordered_record import BlockHeads
from radixlm.runtime.store.ordered.ordered_run import OrderedRun
from tokenizers import Tokenizer

from ..options import read_options
from ..report.page import publish
from .policies import Order, Scores
from .prefix import Prefix, PrefixModel
from .texts import Case, Query, Texts

CHUNK_SIZES = (16, 32, 64, 128, 256)
BUDGETS = (0.1, 0.25, 0.5)
STORE_BYTES = 4 << 30
WORKLOADS = ("text", "nq", "tools", "bbh")
Json = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """What one query reads at one budget: the first `num_first` in the stored order, and then `picks`."""

    policy: str
    budget: float
    num_first: int
    first: Order  # [layers, kv_heads, num_first], the same tokens by name
    picks: Order  # [layers, kv_heads, n], none of those

    @property
    def num_tokens(self) -> int:
        """Of each layer and head."""
        return int(self.num_first + self.picks.shape[-1])


@dataclass(frozen=True)
class Asked:
    """What the disk was asked for, header and orders with it."""

    num_bytes: int
    num_bytes_orders_kept: int  # with orders and checksums in memory
    probe_bytes: int
    num_reads: int
    num_chunks: int


class Runs:
    """The ordered runs of one prefix."""

    def __init__(self, artifact: Artifact, directory: Path, model: PrefixModel, token_ids: list[int]) -> None:
        identity = StoreIdentity.of(artifact.manifest)
        self.heads: list[PageKey] = []
        for first in range(0, len(token_ids), PAGE_SIZE):
            parent = self.heads[-1].key if self.heads else NO_PARENT
            self.heads.append(PageKey.of(identity, b"", parent, token_ids[first : first + PAGE_SIZE], bytes(PAGE_SIZE)))
        self._kv, self._probe_head, self._dims = model.layout, model.probe_head, model.probe_dims
        self._pages = model.read(len(token_ids))
        self._store = PageStore.open(directory, identity, max_bytes=STORE_BYTES)
        self._store.put(self.heads, self._pages)

    def write(self, scores: Scores, chunk_size: int) -> int:
        """Put the run in the order of `scores`; the bytes that it takes."""
        run = OrderedRun.of_pages(
            *(self._kv, self._pages, scores),
            probe_head=self._probe_head,
            pack_probe=lambda keys: PackedKeys.of(keys, self._dims).encode(),
        )
        assert self._store.put_ordered(self.heads, run, chunk_size=chunk_size).stored
        return self._store.stats().num_ordered_bytes

    def read(self, choice: Choice, *, in_order: bool) -> Asked:
        """Read a choice; without the order, token by token."""
        counts = self._read(choice, in_order=in_order, block_heads=None)
        kept = self._open(None)
        heads = kept.block_heads()
        kept.close()
        again = self._read(choice, in_order=in_order, block_heads=heads)
        probe = 0
        if choice.policy == "hybrid":
            run = self._open(None)
            before = run.counts.num_bytes
            assert run.probe_keys() is not None
            probe = run.counts.num_bytes - before
            run.close()
        return Asked(counts.num_bytes, again.num_bytes, probe, counts.num_reads, counts.num_chunks)

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _read(self, choice: Choice, *, in_order: bool, block_heads: BlockHeads | None) -> ReadCounts:
        run = self._open(block_heads)
        if in_order:
            first = run.first(choice.num_first)
            assert first is not None and np.array_equal(np.sort(first.tokens), choice.first)
            assert not choice.picks.size or run.at(choice.picks) is not None
        else:
            assert run.at(np.concatenate([choice.first, choice.picks], axis=-1)) is not None
        run.close()
        return run.counts

    def _open(self, block_heads: BlockHeads | None) -> OpenRun:
        run = self._store.open_ordered(self.heads, block_heads=block_heads)
        assert run is not None
        return run


def choices(prefix: Prefix, query: Query, scores: Scores) -> Iterator[Choice]:
    """What both policies choose for a query; `scores` are what the tokens are stored by."""
    ranked = np.argsort(-scores, axis=-1, kind="stable")
    order = np.argsort(-scores_to_store(scores, is_start=True), axis=-1, kind="stable")
    nothing = ranked[..., :0]
    for budget in BUDGETS:
        count = max(1, round(budget * prefix.num_tokens / PAGE_SIZE)) * PAGE_SIZE  # pages of the pool are filled
        yield Choice("stored", budget, count, np.sort(ranked[..., :count]), nothing)
        num_first = -(-count // (2 * PAGE_SIZE)) * PAGE_SIZE
        half = np.sort(order[..., :num_first])
        is_picked = np.zeros(scores.shape, bool)
        np.put_along_axis(is_picked, with_probed(half, prefix.probe(half, query.ids), count, order), True, axis=-1)
        np.put_along_axis(is_picked, half, False, axis=-1)
        picks = np.nonzero(is_picked)[-1].reshape(*scores.shape[:2], count - num_first)
        yield Choice("hybrid", budget, num_first, half, picks)


def measure(case: Case, artifact: Artifact, model: PrefixModel, directory: Path, *, max_queries: int) -> Iterator[Json]:
    """The first queries of a case, all budgets and chunk sizes, before and after; the others are history."""
    num_tokens = len(case.prefix) // PAGE_SIZE * PAGE_SIZE  # whole pages are stored
    prefix = Prefix(model, case.prefix[:num_tokens])
    masses = [prefix.exact(query.ids, 0).learned for query in case.queries]
    asked: list[tuple[Scores, list[Choice]]] = []
    for i, query in enumerate(case.queries[: min(case.num_counted, max_queries)]):
        others = [mass for j, mass in enumerate(masses) if j != i]
        scores: Scores = prefix.passed + np.asarray(sum(others)) / max(1, len(others))
        scores[..., :NUM_FIRST] = scores[..., -NUM_RECENT:] = np.inf
        asked.append((scores, list(choices(prefix, query, scores))))
    runs = Runs(artifact, directory, model, case.prefix[:num_tokens])
    in_text = -np.broadcast_to(np.arange(num_tokens, dtype=np.float32), masses[0].shape)
    token_bytes = artifact.manifest.kv.page_bytes / PAGE_SIZE
    [num_ranked] = stored_shares([num_tokens], [NUM_FIRST + NUM_RECENT], num_rows(num_tokens, 0.25))
    for chunk_size in CHUNK_SIZES:
        runs.write(in_text, chunk_size)
        in_text_asked = [[runs.read(choice, in_order=False) for choice in chosen] for _, chosen in asked]
        for (scores, chosen), text in zip(asked, in_text_asked, strict=True):
            file_bytes = runs.write(scores, chunk_size)
            is_ranked = [choice.num_first <= num_ranked for choice in chosen]
            ranked = [
                runs.read(choice, in_order=choice.policy == "stored" or is_first)
                for choice, is_first in zip(chosen, is_ranked, strict=True)
            ]
            runs.write(scores_to_store(scores, is_start=True), chunk_size)
            for i, choice in enumerate(chosen):
                is_first = is_ranked[i] or choice.policy == "hybrid"
                yield {
                    "policy": choice.policy,
                    "budget": choice.budget,
                    "chunk_size": chunk_size,
                    "attended": choice.num_tokens * token_bytes,
                    "text": text[i],
                    "ranked": ranked[i],
                    "quarter": runs.read(choice, in_order=True) if is_first else None,
                    "space": file_bytes / (num_tokens * token_bytes),
                }
    runs.close()


def summary(measured: list[Json]) -> list[Json]:
    """A row for each policy, budget and chunk size: ratios of sums over queries."""
    groups: dict[tuple[str, float, int], list[Json]] = defaultdict(list)
    for one in measured:
        groups[one["policy"], one["budget"], one["chunk_size"]].append(one)
    rows = []
    for (policy, budget, chunk_size), mine in sorted(
        groups.items(), key=lambda item: (item[0][0] != "stored", item[0][1:])
    ):
        attended = sum(one["attended"] for one in mine)
        row: Json = {"policy": policy, "budget": budget, "chunk_size": chunk_size, "num_queries": len(mine)}
        for order in ("text", "ranked", "quarter"):
            asked: list[Asked] = [one[order] for one in mine]
            if None in asked:
                continue
            row[order] = sum(one.num_bytes + one.probe_bytes for one in asked) / attended
            row[f"{order}_no_probe"] = sum(one.num_bytes for one in asked) / attended
            row[f"{order}_no_order"] = sum(one.num_bytes_orders_kept for one in asked) / attended
            row[f"{order}_bytes"] = sum(one.num_bytes + one.probe_bytes for one in asked) / len(mine)
            row[f"{order}_reads"] = sum(one.num_reads for one in asked) / len(mine)
            row[f"{order}_chunks"] = sum(one.num_chunks for one in asked) / len(mine)
        row["space"] = float(np.mean([one["space"] for one in mine]))
        rows.append(row)
    return rows


def main() -> None:
    """Measure all workloads, print, write `results/store_amplification.json`."""
    options = read_options(__doc__, "artifact", workloads=WORKLOADS, prefixes=3, queries=3)
    artifact = Artifact.open(options.artifact)
    model, texts = PrefixModel(artifact), Texts(Tokenizer.from_str(artifact.tokenizer_json))
    measured: dict[str, list[Json]] = {}
    lengths = []
    with tempfile.TemporaryDirectory() as directory:
        for workload in options.workloads:
            cases = list(texts.cases(workload))[: options.prefixes]
            lengths += [len(case.prefix) // PAGE_SIZE * PAGE_SIZE for case in cases]
            measured[workload] = [
                one
                for case in cases
                for one in measure(case, artifact, model, Path(directory), max_queries=options.queries)
            ]
    model.close()
    rows = summary([one for some in measured.values() for one in some])
    figures: Json = {"model": artifact.manifest.name, "num_prefixes": len(lengths), "rows": rows}
    figures |= {"shortest_prefix": min(lengths), "longest_prefix": max(lengths)}
    figures["workloads"] = {
        name: [row for row in summary(some) if row["chunk_size"] == CHUNK_SIZES[0]] for name, some in measured.items()
    }
    publish("store_amplification", figures)


if __name__ == "__main__":
    main()
