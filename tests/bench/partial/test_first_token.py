"""Requests are measured with their prefix on disk only, and tables hold a part against all of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.artifact import Artifact

from bench.partial.first_token import Asked, Json, joined, one_way, prepare
from bench.partial.texts import Case, Query
from bench.partial.ways import RECOMPUTE, WAYS
from bench.report.store import first_token

LENGTH = 400
MEASURED = (RECOMPUTE, "full", "25% always")


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    ids = np.random.default_rng(3).integers(0, 320, LENGTH).tolist()
    return [joined([Case(ids, [Query(ids[start : start + 12], []) for start in range(0, 48, 12)])])]


@pytest.fixture(scope="module")
def measured(tiny_artifact: Path, asked: list[Asked], tmp_path_factory: pytest.TempPathFactory) -> Json:
    artifact, directory = Artifact.open(tiny_artifact), tmp_path_factory.mktemp("partial")
    replies = prepare(artifact, directory, asked)
    ways = {name: one_way(artifact, directory, WAYS[name], "real", asked, replies) for name in MEASURED}
    return {name if name == RECOMPUTE else f"real {name}": way for name, way in ways.items()}


def test_half_of_the_questions_are_history(asked: list[Asked]) -> None:
    [one] = asked
    assert len(one.history) == len(one.measured) == 2
    assert all(prompt[:LENGTH] == one.prefix for prompt in [*one.history, *one.measured])


def test_a_part_is_less_than_all(measured: Json) -> None:
    [full], [part] = (measured[f"real {way}"]["groups"][1]["read_bytes"] for way in ("full", "25% always"))
    assert 0 < part < full


def test_who_always_takes_a_part_says_so_and_who_takes_all_does_not(measured: Json) -> None:
    for name, result in measured.items():
        loaded = [one for group in result["groups"] for one in group["loaded"]]
        if name.endswith("always"):
            assert len(loaded) == 2 and all(one is not None and one < 0.5 for one in loaded)
            assert result["known_bytes"] > 0
        else:
            assert loaded == [None, None]


def test_tables_have_a_line_for_each_disk_and_way(measured: Json) -> None:
    results = {"measured": measured, "num_tokens": [[1, LENGTH]], "num_history": [2], "workload": "nq", "page_bytes": 1}
    results |= {"model": "m", "origin": dict.fromkeys(("command", "commit", "date", "machine", "apache_tvm"), "x")}
    shown = first_token({"runs": {"m": results}})
    seconds, first, gains, read = (part.splitlines()[2:] for part in shown if part.startswith("|"))
    assert [[line.split(" | ")[0] for line in table] for table in (seconds, first)] == 2 * [["| the real one"]]
    assert not gains  # no quarter is measured as the engine decides
    assert len(read) == len(MEASURED) - 1
