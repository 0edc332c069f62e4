"""What is counted is what a query reads, and tables show it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.artifact import Artifact

from bench.partial.amplification import BUDGETS, CHUNK_SIZES, Json, measure, summary
from bench.partial.prefix import PrefixModel
from bench.partial.texts import Case, Query
from bench.report import partial as report


@pytest.fixture(scope="module")
def measured(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Json]]:
    artifact = Artifact.open(tiny_artifact)
    model = PrefixModel(artifact)
    ids = np.random.default_rng(3).integers(0, 320, 400).tolist()
    queries = [Query(ids[start : start + 8], ids[start + 8 : start + 10]) for start in (340, 360)]
    yield list(measure(Case(ids[:330], queries), artifact, model, tmp_path_factory.mktemp("runs"), max_queries=9))
    model.close()


def test_every_choice_is_read_at_every_chunk_size_and_in_every_order(measured: list[Json]) -> None:
    assert len(measured) == 2 * 2 * len(BUDGETS) * len(CHUNK_SIZES)
    for one in measured:
        asked = one["ranked"]
        assert asked.num_bytes >= asked.num_bytes_orders_kept >= 0 and asked.num_bytes > one["attended"]
        assert (asked.probe_bytes > 0) == (one["policy"] == "hybrid")
        if one["policy"] == "stored":
            assert asked.num_reads == 2  # header and first blocks
            assert one["text"].num_chunks >= asked.num_chunks


def test_tables_have_a_line_for_each_share_and_chunk_size(measured: list[Json]) -> None:
    rows = summary(measured)
    in_pages = [row for row in rows if row["chunk_size"] == CHUNK_SIZES[0]]
    results = {"rows": rows, "workloads": {"text": in_pages, "nq": in_pages}}
    results |= {"num_prefixes": 1, "shortest_prefix": 320, "longest_prefix": 320}
    tables = [part for part in report.amplification(results) if isinstance(part, str) and part.startswith("|")]
    num_lines = len(BUDGETS) * len(CHUNK_SIZES)
    assert [table.count("\n") for table in tables] == [num_lines + 1, num_lines + 1, 2 * 2 * len(BUDGETS) + 1]
    assert tables[2].count("nq, hybrid") == len(BUDGETS)
