"""What is counted is what a query reads, and tables show it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.artifact import Artifact

from bench.partial.amplification import BUDGETS, Json, measure, summary
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


def test_later_requests_read_less_and_all_read_more_than_their_rows(measured: list[Json]) -> None:
    assert len(measured) == 2 * len(BUDGETS)
    for one in measured:
        assert one["first"].num_bytes > one["later"].num_bytes > one["attended"]
        assert one["first"].num_reads == one["later"].num_reads + 1, "of the probe keys"
        assert one["pages"].num_bytes > one["attended"] and one["parts"] <= 1
        assert one["space"] > 1 and (one["parts"] > 0 or one["budget"] == 0.1)  # of 320 tokens, all that is always read


def test_tables_have_a_line_for_each_share(measured: list[Json]) -> None:
    rows = summary(measured)
    results = {"rows": rows, "workloads": {"text": rows, "nq": rows}}
    results |= {"num_prefixes": 1, "shortest_prefix": 320, "longest_prefix": 320}
    tables = [part for part in report.amplification(results) if part.startswith("|")]
    assert [table.count("\n") for table in tables] == [len(BUDGETS) + 1, 2 * len(BUDGETS) + 1]
    assert tables[1].count("nq, ") == len(BUDGETS)
