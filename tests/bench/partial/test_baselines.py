"""Ways read the chunks that hold their rows, and what they keep beside chunks is taken off their cache."""

from __future__ import annotations

import doctest
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.extras.approximate.calibration.calibration import Calibration

from bench.partial import all_heads, baselines, contestants
from bench.partial.baselines import ABLATION, BASELINES, CACHE_SHARES, RECOMPUTE, losses, read_shares, rows_of
from bench.partial.contestants import FALLING_BACK, FULL, RANKED, TEXT, VOTING, Contested, contested
from bench.partial.policies import Scores
from bench.partial.prefix import PrefixModel
from bench.partial.rows_by_layer import RowsByLayer
from bench.partial.texts import Case, Query
from bench.partial.voting import Vote, select_by_vote
from bench.report.answers import baselines as section

from ...conftest import CompileOnce


def test_examples_are_true() -> None:
    assert doctest.testmod(all_heads).failed == 0


@pytest.fixture(scope="module")
def prefixes(tiny_artifact: Path) -> list[Contested]:
    model = PrefixModel(Artifact.open(tiny_artifact))
    ids = np.random.default_rng(3).integers(0, 320, 440).tolist()
    queries = [Query(ids[start : start + 8], ids[start + 8 : start + 12]) for start in range(250, 430, 20)]
    found = [contested(Case(ids[i : i + 245], queries[:4]), queries[4:], model) for i in range(2)]
    model.close()
    return found


def test_every_way_reads_at_least_a_quarter_and_at_most_all(prefixes: list[Contested]) -> None:
    shares = read_shares(prefixes)
    assert shares["full, text"] == 1 and min(shares.values()) >= 64 / 240
    assert shares["known, ranked"] == pytest.approx(64 / 240)  # in whole chunks, as it lies
    assert shares["known, text"] > shares["known, ranked"]
    for request in (one for prefix in prefixes for one in prefix.requests):
        some, more = (set(request.chunks[name, RANKED].tolist()) for name in (VOTING, FALLING_BACK))
        assert some <= more <= set(request.chunks[FULL, TEXT].tolist())
        assert request.falls_back < 1 or len(more) == len(request.chunks[FULL, TEXT])


def test_own_queries_count_and_the_oracle_loses_least(prefixes: list[Contested]) -> None:
    found = losses(prefixes)
    assert [bool(request.kl) for request in prefixes[0].requests] == [True, True, False, False, False]
    assert min(found, key=lambda name: found[name][0]) == "oracle"


def test_nothing_is_lost_where_all_layers_fall_back_and_less_where_some_do(
    tiny_source: Path, compile_once: CompileOnce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "floats.radixlm"
    shutil.copytree(compile_once(tiny_source, "f32", quantize="keep"), path)
    artifact = Artifact.open(path)
    Calibration.of(artifact.manifest, probe_head=0, max_dropped_attention=1.0).write(artifact.path)
    model, by_layer = PrefixModel(artifact), RowsByLayer(artifact, tiny_source)
    ids = np.random.default_rng(3).integers(0, 320, 440).tolist()
    queries = [Query(ids[start : start + 8], ids[start + 8 : start + 12]) for start in range(250, 430, 20)]
    case = Case(ids[:245], queries[:4])

    def kl(*agreement: float) -> tuple[float, float]:
        def agreed(seen: Scores, num_kv_heads: int, count: int) -> Vote:
            return replace(select_by_vote(seen, num_kv_heads, count), agreement=np.array(agreement))

        monkeypatch.setattr(contestants, "select_by_vote", agreed)
        found = losses([contested(case, queries[4:], model, by_layer)])
        return found[FALLING_BACK][0], found[VOTING][0]

    (all_layers, never), (no_layer, _) = kl(0, 0, 0), kl(1, 1, 1)
    assert abs(all_layers) < 1e-6
    assert no_layer == pytest.approx(never, rel=0.02)
    for agreement in np.eye(3):
        assert 0.01 * never < kl(*agreement)[0] < 0.99 * never, "two of three layers fall back"
    model.close()


def test_what_memory_holds_beside_chunks_is_taken_off_the_cache(
    prefixes: list[Contested], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "NUM_REQUESTS", 40)
    rows = list(rows_of(prefixes, BASELINES))
    assert len(rows) == 2 * len(CACHE_SHARES) * (len(BASELINES) + 1)
    free = {"ours": BASELINES["ours"].__class__("hybrid", "shipped", BASELINES["ours"].policy)}
    [hits] = [row["hit_ratio"] for row in rows_of(prefixes, free) if row["way"] == "ours" and _is_first(row)]
    [less] = [row["hit_ratio"] for row in rows if row["way"] == "ours" and _is_first(row)]
    assert less < hits
    computed = [row for row in rows if row["way"] == RECOMPUTE]
    assert computed[0]["p50_s_50"] == pytest.approx(240 / 2000 + 0.01)
    ablation = [row for row in rows_of(prefixes, ABLATION) if row["way"] != RECOMPUTE]
    sums = dict.fromkeys(("num_heads", "num_kv_heads", "num_prefixes", "shortest_prefix", "longest_prefix"), 1)
    origin = {"command": "c", "commit": "1", "date": "d", "machine": "m", "python": "3", "apache_tvm": "0"}
    run = {**sums, "model": "tiny", "num_own": 2, "falls_back": 0.5, "kl": losses(prefixes), "origin": origin}
    run |= {"rows": rows, "ablation": ablation}
    tables = [part for part in section({"runs": {"tiny": run}}) if part.startswith("|")]
    assert [table.count("\n") for table in tables] == [1 + len(BASELINES) + 1, 1 + len(ABLATION)]
    assert all(
        "±" in line or "| 0 |" in line or "not measured" in line for table in tables for line in table.splitlines()[2:]
    )


def _is_first(row: dict[str, object]) -> bool:
    return row["cache"] == 0.25 and not row["changes"]
