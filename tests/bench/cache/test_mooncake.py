"""The engine's cache evicts as a slow LRU of leaves does, and finds no more than the order that knows the future."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from bench.cache import mooncake
from bench.cache.mooncake import Trace


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


def lru_hit_rate(trace: Trace, num_pages: int) -> float:
    """Page by page: of the leaves that the request does not need, the one used longest ago makes room."""
    last_used: dict[int, int] = {}
    parents: dict[int, int] = {}
    clock = num_found = 0
    for request in trace:
        num_found += sum(page in last_used for page in request)
        parents |= dict(zip(request[1:], request, strict=False))
        num_new = sum(page not in last_used for page in request)
        own = {page: clock + place for place, page in enumerate(request)}
        last_used |= {page: use for page, use in own.items() if page in last_used}
        while len(last_used) + num_new > num_pages:
            inner = {parents[page] for page in last_used if page in parents}
            del last_used[min((page for page in last_used.keys() - inner - own.keys()), key=last_used.__getitem__)]
        last_used |= own
        clock += len(request)
    return num_found / sum(map(len, trace))


@pytest.mark.parametrize("num_pages", [60, 200, 600, 5000])
def test_the_engine_evicts_as_lru_does_and_finds_no_more_than_belady(trace: Trace, num_pages: int) -> None:
    engine = mooncake.hit_rate(trace, num_pages)
    assert engine == lru_hit_rate(trace, num_pages)
    everything = 1 - len({page for request in trace for page in request}) / sum(map(len, trace))
    assert (engine == pytest.approx(everything)) == (num_pages == 5000)
    assert engine <= mooncake.belady_hit_rate(trace, num_pages) <= everything


def test_a_trace_is_read(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"timestamp": 0, "hash_ids": ids}) + "\n" for ids in ([0, 1], [0, 2]))
    (tmp_path / "trace.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "trace.jsonl").write_text(lines)
    assert mooncake.read(tmp_path / "trace.jsonl.gz") == mooncake.read(tmp_path / "trace.jsonl") == [[0, 1], [0, 2]]
