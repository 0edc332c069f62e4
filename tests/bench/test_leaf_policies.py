"""The engine's cache and the simulation beside it find the same; no order finds more than the one that knows all."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from bench import leaf_policies, mooncake
from bench.leaf_policies import ORDERS, Trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Conversations that go on, of a few system prompts."""
    chance = random.Random(3)
    fresh = iter(range(100_000))
    talks = [[next(fresh)] for _ in range(3)]
    requests = []
    for _ in range(600):
        talk = chance.choice([talk for talk in talks[-300:] if len(talk) < 40])
        requests.append(talk + [next(fresh) for _ in range(chance.randrange(1, 6))])
        talks.append(requests[-1])
    return requests


@pytest.mark.parametrize("num_pages", [60, 200, 600, 5000])
def test_the_engine_evicts_as_lru_does(trace: Trace, num_pages: int) -> None:
    engine = mooncake.hit_rate(trace, num_pages)
    assert engine == leaf_policies.hit_rate(trace, num_pages, ORDERS["LRU"])
    everything = 1 - len({page for request in trace for page in request}) / sum(map(len, trace))
    assert (engine == pytest.approx(everything)) == (num_pages == 5000)


@pytest.mark.parametrize("num_pages", [60, 200, 600])
def test_nobody_finds_more_than_belady(trace: Trace, num_pages: int) -> None:
    rates = {name: leaf_policies.hit_rate(trace, num_pages, order) for name, order in ORDERS.items()}
    assert max(rates.values()) < leaf_policies.belady_hit_rate(trace, num_pages)
    assert len(set(rates.values())) > 3, "orders that do the same"


def test_a_trace_is_read(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"timestamp": 0, "hash_ids": ids}) + "\n" for ids in ([0, 1], [0, 2]))
    (tmp_path / "trace.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "trace.jsonl").write_text(lines)
    assert mooncake.read(tmp_path / "trace.jsonl.gz") == mooncake.read(tmp_path / "trace.jsonl") == [[0, 1], [0, 2]]
