"""What clients and metrics are told of prefixes that were loaded in part, by a server over a real compiled model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.server import create_app
from starlette.testclient import TestClient

from ..eager_loads import choose_always

WAIT_S = 30.0  # only a hang takes that long
LONG = {"role": "system", "content": "he in the tree " * 12}


@pytest.fixture(autouse=True)
def read_whatever_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is worth it says `test_prefix_plan.py`."""
    choose_always(monkeypatch)


@contextmanager
def served(artifact: Path, store: Path) -> Iterator[TestClient]:
    with (
        Engine(artifact, kv_cache_bytes=1 << 20, store=store, store_bytes=64 << 20, kv_budget=1.0) as engine,
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


def test_a_part_of_a_prefix_is_labelled_and_counted(tiny_artifact: Path, tmp_path: Path) -> None:
    with served(tiny_artifact, tmp_path) as client:
        deadline = time.monotonic() + WAIT_S
        for number in itertools.count():
            if metric(client, "radixlm_store_runs_rewritten_total"):
                break
            assert time.monotonic() < deadline, "nothing is rewritten"
            assert "kv_loaded" not in asked(client, f"in the {number % 3}")
    with served(tiny_artifact, tmp_path) as client:
        part = asked(client, "the tree", kv_budget=0.5)
        assert 0.4 < part["kv_loaded"] < 0.7 and 0 < part["kv_dropped_mass"] < 1
        assert part["cached_tokens_by_tier"] == {"disk": part["cached_tokens"]}
        whole = asked(client, "the tree")
        assert "kv_loaded" not in whole and "kv_dropped_mass" not in whole, "what is exact needs no label"
        assert metric(client, 'radixlm_store_parts_total{outcome="pruned"}') == 1
        assert metric(client, 'radixlm_store_parts_total{outcome="broken"}') == 0
