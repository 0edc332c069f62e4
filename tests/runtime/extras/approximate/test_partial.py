"""What clients and metrics are told of prefixes that were loaded in part, by a server over a real compiled model."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.engine_options import EngineOptions
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.extras.approximate import promoter
from radixlm.runtime.extras.approximate.calibration.calibration import Calibration
from radixlm.runtime.extras.approximate.score_updater import ScoreUpdater
from radixlm.runtime.server import create_app
from starlette.testclient import TestClient

from ...server.real_server import real_server
from ...server.test_fingerprint import told
from .eager_parts import choose_always

WAIT_S = 30.0  # only a hang takes that long
LONG = {"role": "system", "content": "he in the tree " * 12}


@pytest.fixture(autouse=True)
def read_whatever_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is worth it says `test_prefix_plan.py`, what it teaches `test_score_updater.py`."""
    choose_always(monkeypatch)
    monkeypatch.setattr(ScoreUpdater, "used", lambda *_: None)  # else the run may be another one the next time


@contextmanager
def served(artifact: Path, store: Path, **options: Any) -> Iterator[TestClient]:
    sizes = {"kv_cache_bytes": 1 << 20, "store_bytes": 64 << 20, **options}
    with (
        Engine(artifact, store=store, kv_budget=1.0, **sizes) as engine,
        TestClient(create_app(engine), base_url="http://localhost") as client,
    ):
        yield client


def asked(client: TestClient, question: str, **body: object) -> dict[str, Any]:
    messages = [LONG, {"role": "user", "content": question}]
    chat = {"messages": messages, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **body}
    details: dict[str, Any] = client.post("/v1/chat/completions", json=chat).json()["usage"]["prompt_tokens_details"]
    return details


def metric(client: TestClient, line: str) -> float:
    [value] = [each.split()[-1] for each in client.get("/metrics").text.splitlines() if each.startswith(line)]
    return float(value)


def learn(client: TestClient) -> None:
    """Ask until the prefix is stored in the order of importance, too."""
    deadline = time.monotonic() + WAIT_S
    for number in itertools.count():
        if metric(client, "radixlm_store_runs_rewritten_total"):
            return
        assert time.monotonic() < deadline, "nothing is rewritten"
        assert "kv_loaded" not in asked(client, f"in the {number % 3}")


def test_a_part_of_a_prefix_is_labelled_and_counted(tiny_artifact: Path, tmp_path: Path) -> None:
    with served(tiny_artifact, tmp_path) as client:
        learn(client)
    with served(tiny_artifact, tmp_path) as client:
        part = asked(client, "the tree", kv_budget=0.5)
        assert 0.4 < part["kv_loaded"] < 0.7 and 0 < part["kv_dropped_mass"] < 1
        assert part["cached_tokens_by_tier"] == {"disk": part["cached_tokens"]}
        hits = 'radixlm_prefix_hit_tokens_total{kind="exact",tier="%s"}'
        assert [metric(client, hits % tier) for tier in ("disk", "memory")] == [part["cached_tokens"], 0]
        whole = asked(client, "the tree")
        assert "kv_loaded" not in whole and "kv_dropped_mass" not in whole, "what is exact needs no label"
        assert metric(client, 'radixlm_store_parts_total{outcome="pruned"}') == 1
        assert metric(client, 'radixlm_store_parts_total{outcome="broken"}') == 0


def test_what_need_not_be_read_is_counted(tiny_artifact: Path, tmp_path: Path) -> None:
    with served(tiny_artifact, tmp_path) as client:
        learn(client)
    with served(tiny_artifact, tmp_path, chunk_cache_bytes=1 << 20) as client:
        part = asked(client, "the tree", kv_budget=0.5)
        saved, read = 'radixlm_store_saved_bytes_total{by="%s"}', "radixlm_store_bytes_read_total"
        assert metric(client, saved % "chunks") == 0 and (before := metric(client, read)) > 0
        tokens = metric(client, "radixlm_store_part_tokens_total")
        token_bytes = Artifact.open(tiny_artifact).manifest.kv.page_bytes / 16
        assert tokens == part["cached_tokens"]
        assert metric(client, saved % "budget") == pytest.approx((1 - part["kv_loaded"]) * tokens * token_bytes)
        kept = metric(client, "radixlm_chunk_cache_bytes")
        assert 0 < kept < metric(client, "radixlm_chunk_cache_max_bytes") == 1 << 20
        asked(client, "the tree", kv_budget=0.5)
        assert metric(client, saved % "chunks") == kept and metric(client, read) - before < before / 4
        chunks = 'radixlm_chunk_cache_chunks_total{outcome="%s"}'
        assert metric(client, chunks % "hit") == metric(client, chunks % "miss") > 0
        evicted = "radixlm_chunk_cache_evicted_total"
        assert metric(client, evicted) == 0
    with served(tiny_artifact, tmp_path, chunk_cache_bytes=int(kept / 2)) as client:
        asked(client, "the tree", kv_budget=0.5)
        assert 0 < metric(client, evicted) < metric(client, chunks % "miss")
    with served(tiny_artifact, tmp_path, chunk_cache_bytes=0) as client:
        for _ in range(2):
            before = metric(client, read)
            asked(client, "the tree", kv_budget=0.5)
        assert metric(client, read) - before > kept
        assert "radixlm_chunk_cache" not in client.get("/metrics").text


def test_a_prefix_that_came_to_memory_whole_is_counted(
    tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promoter, "PROMOTE_AT", 2)
    with served(tiny_artifact, tmp_path) as client:
        learn(client)
    promoted = "radixlm_store_prefixes_promoted_total"
    with served(tiny_artifact, tmp_path) as client:
        for _ in range(2):
            assert metric(client, promoted) == 0
            assert "kv_loaded" in asked(client, "the tree", kv_budget=0.5)
        deadline = time.monotonic() + WAIT_S
        while metric(client, promoted) != 1:
            assert time.monotonic() < deadline, "it is never promoted"
        whole = asked(client, "the tree", kv_budget=0.5)
        assert "kv_loaded" not in whole and whole["cached_tokens_by_tier"] == {"memory": whole["cached_tokens"]}


def test_the_size_of_the_chunks_is_for_a_budget_alone() -> None:
    for budget, size in ((None, 5), (0.5, -1)):
        with pytest.raises(InvalidParameter, match="chunk_cache_bytes is "):
            EngineOptions(store="store", kv_budget=budget, chunk_cache_bytes=size)


def test_less_than_all_is_refused_where_the_server_does_not_allow_it(tmp_path: Path) -> None:
    with real_server(store=tmp_path) as server:
        refused = server.chat(messages=[LONG], kv_budget=0.5)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "kv_budget"
        assert "--kv-budget" in refused.json()["error"]["message"]
        assert server.chat(messages=[LONG], kv_budget=1.0, max_tokens=1).status_code == 200
        assert server.chat(messages=[LONG], kv_budget=1.5).status_code == 400


def test_a_budget_and_what_it_was_calibrated_to_are_in_the_fingerprint(tiny_artifact: Path, tmp_path: Path) -> None:
    path = shutil.copytree(tiny_artifact, tmp_path / "copy.radixlm")

    def said(kv_budget: float | None) -> str:
        with Engine(path, kv_cache_bytes=1 << 20, store=tmp_path / "store", kv_budget=kv_budget) as engine:
            return told(engine)

    found = [said(None), said(1.0), said(0.5)]
    Calibration.of(Artifact.open(path).manifest, probe_head=0, max_dropped_attention=0.25).write(path)
    found.append(said(0.5))
    assert len({*found}) == len(found) and said(0.5) == found[-1]
