"""Count the bytes that are read from a disk for each byte that attention reads, and a prefix's size on disk.

    python -m bench.partial.amplification ARTIFACT

Real KV of real prefixes (`bench/partial/texts.py`) is written as pages and as the ordered run, and read back as a query
would, in whole units of 4 KiB; bytes and reads are counted by the store's reader. For each query half of the rows are
chosen by stored order, as many in each layer and head, and half in the pages that probing the keys of one KV head
finds; the order follows the attention of the prefix itself and of its other queries.

first    a request with nothing in memory: header, probe keys, ranked rows, parts of pages
later    with probe keys and checksums in memory
pages    the same rows from pages alone: each layer's part is read if it has one of them

On disk are pages, the run, and the scores that order it. Files are in TMPDIR, which may be in memory: nothing here is a
time.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.extras.approximate.packed_keys import PackedKeys
from radixlm.runtime.extras.approximate.records.ordered_reader import OpenRun
from radixlm.runtime.extras.approximate.records.ordered_record import RunTables
from radixlm.runtime.extras.approximate.records.row_records import RowRecords
from radixlm.runtime.extras.approximate.records.scores_record import RowScores
from radixlm.runtime.extras.approximate.row_selection import num_rows, ranks_to_store, scores_to_store, with_probed
from radixlm.runtime.store import NO_PARENT, PageKey, PageStore, StoreIdentity
from tokenizers import Tokenizer

from ..options import read_options
from ..report.page import publish
from .policies import Order, Scores, stored_half, stored_order
from .prefix import Prefix, PrefixModel
from .texts import Case, Texts

BUDGETS = (0.1, 0.25, 0.5, 0.75)
STORE_BYTES = 4 << 30
WORKLOADS = ("text", "nq", "tools", "bbh")
Json = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """The bytes and reads that the disk was asked for."""

    num_bytes: int
    num_reads: int


class Stored:
    """The pages of one prefix, its run and its scores."""

    def __init__(self, artifact: Artifact, directory: Path, model: PrefixModel, token_ids: list[int]) -> None:
        identity = StoreIdentity.of(artifact.manifest)
        self.heads: list[PageKey] = []
        for first in range(0, len(token_ids), PAGE_SIZE):
            parent = self.heads[-1].key if self.heads else NO_PARENT
            self.heads.append(PageKey.of(identity, b"", parent, token_ids[first : first + PAGE_SIZE], bytes(PAGE_SIZE)))
        self._probe_head, self._dims = model.probe_head, model.probe_dims
        self._store = PageStore.open(directory, identity, max_bytes=STORE_BYTES)
        self._store.put(self.heads, model.read(len(token_ids)))
        self.num_page_bytes = self._store.stats().num_bytes

    def write(self, scores: Scores) -> float:
        """Put the run in the order of `scores`, and store these; return all bytes on disk divided by those of pages."""
        num_tokens = scores.shape[-1]
        assert (
            RowRecords.of(self._store)
            .rewrite(
                *(self.heads, scores_to_store(scores, is_start=True)),
                num_ranks=ranks_to_store(num_tokens, is_start=True),
                probe_head=self._probe_head,
                pack_probe=lambda keys: PackedKeys.of(keys, self._dims).encode(),
            )
            .stored
        )
        kept = scores.astype(np.float32)
        assert (
            RowRecords.of(self._store)
            .scores.put(self.heads, RowScores(kept, kept, np.ones(num_tokens, np.float32)))
            .stored
        )
        self._store.gc()
        return self._store.stats().num_bytes / self.num_page_bytes

    def read(self, num_first: int, parts: NDArray[np.bool_], tables: RunTables | None) -> tuple[Asked, RunTables]:
        """Read the first ranks, and parts of pages, `[layers, pages]`; return the counts and the tables."""
        run = self._open(tables)
        assert tables is not None or run.probe_keys() is not None
        assert not num_first or run.first(num_first) is not None
        assert not parts.any() or run.page_rows(parts) is not None
        run.close()
        return Asked(run.counts.num_bytes, run.counts.num_reads), run.tables

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _open(self, tables: RunTables | None) -> OpenRun:
        """Open the run; `tables` are those of an earlier open, or None to read them."""
        run = RowRecords.of(self._store).open_ordered(self.heads, tables=tables)
        assert run is not None
        return run


def parts_of(chosen: Order, there: Order, num_tokens: int) -> NDArray[np.bool_]:
    """Return the parts of pages that have chosen rows which are not among the rows `there`: `[layers, pages]`."""
    is_wanted = np.zeros((*chosen.shape[:2], num_tokens), np.bool_)
    np.put_along_axis(is_wanted, chosen, True, axis=-1)
    np.put_along_axis(is_wanted, there, False, axis=-1)
    return np.asarray(is_wanted.reshape(*chosen.shape[:2], -1, PAGE_SIZE).any(axis=(1, 3)))


def measure(case: Case, artifact: Artifact, model: PrefixModel, directory: Path, *, max_queries: int) -> Iterator[Json]:
    """Yield, for the first queries of a case and each budget, what reading the chosen rows takes.

    The other queries are history, by which the rows are stored. `first` reads begin with empty tables, `later` ones
    have them, and `pages` read all rows from pages.
    """
    num_tokens = len(case.prefix) // PAGE_SIZE * PAGE_SIZE  # whole pages are stored
    prefix = Prefix(model, case.prefix[:num_tokens])
    masses = [prefix.exact(query.ids, 0).learned for query in case.queries]
    stored = Stored(artifact, directory, model, case.prefix[:num_tokens])
    token_bytes = artifact.manifest.kv.page_bytes / PAGE_SIZE
    for i, query in enumerate(case.queries[: min(case.num_counted, max_queries)]):
        others = [mass for j, mass in enumerate(masses) if j != i]
        scores: Scores = prefix.passed + np.asarray(sum(others)) / max(1, len(others))
        order, space = stored_order(scores), stored.write(scores)
        for budget in BUDGETS:
            count = num_rows(num_tokens, budget)
            half = stored_half(order, count)
            chosen = with_probed(half, prefix.probe(half, query.ids), count)
            parts, nothing = parts_of(chosen, half, num_tokens), chosen[..., :0]
            first, tables = stored.read(half.shape[-1], parts, None)
            later, _ = stored.read(half.shape[-1], parts, tables)
            alone, _ = stored.read(0, parts_of(chosen, nothing, num_tokens), tables)
            row: Json = {"budget": budget, "attended": count * token_bytes, "space": space}
            yield row | {"first": first, "later": later, "pages": alone, "parts": float(parts.mean())}
    stored.close()


def summary(measured: list[Json]) -> list[Json]:
    """Return a row for each budget, over all queries: bytes read by each kind of read, over those of the chosen rows.

    A row also has the mean bytes and reads of a query, and the means of `parts` and `space`.
    """
    groups: dict[float, list[Json]] = defaultdict(list)
    for one in measured:
        groups[one["budget"]].append(one)
    rows = []
    for budget, mine in sorted(groups.items()):
        attended = sum(one["attended"] for one in mine)
        row: Json = {"budget": budget, "num_queries": len(mine)}
        for what in ("first", "later", "pages"):
            asked: list[Asked] = [one[what] for one in mine]
            row[what] = sum(one.num_bytes for one in asked) / attended
            row[f"{what}_bytes"] = sum(one.num_bytes for one in asked) / len(mine)
            row[f"{what}_reads"] = sum(one.num_reads for one in asked) / len(mine)
        for name in ("parts", "space"):
            row[name] = float(np.mean([one[name] for one in mine]))
        rows.append(row)
    return rows


def main() -> None:
    """Measure all workloads, print, write `results/store_amplification.json`."""
    options = read_options(__doc__, "artifact", workloads=WORKLOADS, prefixes=3, queries=3)
    artifact = Artifact.open(options.artifact)
    model, texts = PrefixModel(artifact), Texts(Tokenizer.from_str(artifact.tokenizer_json))
    measured: dict[str, list[Json]] = {}
    lengths = []
    for workload in options.workloads:
        cases = list(texts.cases(workload))[: options.prefixes]
        lengths += [len(case.prefix) // PAGE_SIZE * PAGE_SIZE for case in cases]
        measured[workload] = []
        for case in cases:
            with tempfile.TemporaryDirectory() as directory:
                measured[workload] += measure(case, artifact, model, Path(directory), max_queries=options.queries)
    model.close()
    figures: Json = {"model": artifact.manifest.name, "num_prefixes": len(lengths)}
    figures |= {"shortest_prefix": min(lengths), "longest_prefix": max(lengths)}
    figures["rows"] = summary([one for some in measured.values() for one in some])
    figures["workloads"] = {name: summary(some) for name, some in measured.items()}
    publish("store_amplification", figures)


if __name__ == "__main__":
    main()
