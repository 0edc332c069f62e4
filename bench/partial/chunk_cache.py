"""Compare cache policies for ordered runs and their pages: LRU, LFU, and both with importance, and the optimum.

    python -m bench.partial.chunk_cache ARTIFACT

Requests load a quarter of the prefix that they share with others, through a cache that holds 5 to 50 % of all keys and
values; the first quarter of a trace fills it and is not counted. Their reads are those of real queries
(`bench/partial/chunk_traces.py`); the sequence of queries is drawn. The caches are the store's own, without their
bytes: disk bytes are of missing chunks and parts of pages, and of the run's header; the rest of units of 4 KiB is not
counted. Checksums and probe keys are in memory. The time to the first token is estimated: the disk's, and 20 ms for two
forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.extras.approximate.records.chunk_cache import FADING, LFU, LRU, ChunkCache, Policy
from radixlm.runtime.extras.approximate.records.ordered_record import RunHeader
from tokenizers import Tokenizer

from ..options import read_options
from ..report.page import publish
from .chunk_traces import BUDGET, Asked, Trace, asked_prefixes, zipf_trace
from .prefix import PrefixModel
from .texts import Texts

SHARES = (0.05, 0.1, 0.25, 0.5)  # of all keys and values
NUM_REQUESTS, CHANGE_AFTER = 400, 100
DISKS = (50e6, 100e6)  # bytes per second
PASSES_S = 0.02  # of a request: two forwards of 20 tokens over 256 rows take 10 ms each (bench/LOG.md)
NEVER = 1 << 30


@dataclass(frozen=True)
class Contestant:
    """A policy, and whether the importance that it uses is the share of attention; else it is the rank."""

    policy: Policy
    by_attention: bool = False


CONTESTANTS = {
    "LRU": Contestant(LRU),
    "LFU": Contestant(LFU),
    "fading": Contestant(FADING),
    "LFU x attention": Contestant(Policy(LFU.half_life, 1.0), by_attention=True),
    "LFU x attention^1/4": Contestant(Policy(LFU.half_life, 0.25), by_attention=True),
    "LFU / rank^1/4": Contestant(Policy(LFU.half_life, 0.25)),
    "fading x attention^1/4": Contestant(Policy(FADING.half_life, 0.25), by_attention=True),
}
Json = dict[str, Any]


@dataclass(frozen=True)
class Found:
    """Results for the counted requests."""

    hit_ratio: float  # of the requested bytes
    disk_bytes: float  # a request


def replay(prefixes: Sequence[Asked], trace: Trace, max_bytes: int, contestant: Contestant) -> Found:
    """Serve a trace from a chunk cache with the contestant's policy; return its hit ratio and disk reads."""
    return _summarize(prefixes, trace, *serve_trace(prefixes, trace, max_bytes, contestant))


def serve_trace(
    prefixes: Sequence[Asked], trace: Trace, max_bytes: int, contestant: Contestant
) -> tuple[list[int], list[int]]:
    """Serve a trace from a chunk cache; return the bytes that each request reads, and those missing in the cache."""
    cache, nothing = ChunkCache(max_bytes, policy=contestant.policy), np.zeros(0, np.uint8)
    wanted, missed = [], []
    for number, request in trace:
        prefix = prefixes[number]
        importance = np.maximum(prefix.attention, 1e-9) if contestant.by_attention else None
        run = cache.of_run(number, prefix.layout, importance)
        wanted.append(0)
        missed.append(0)
        for ids in prefix.requests[request]:
            checksums = np.zeros(len(ids), np.uint64)
            missing = ids[np.array([found is None for found in run.take(ids, checksums)], np.bool_)]
            run.put(missing, checksums[: len(missing)], [nothing] * len(missing))
            wanted[-1] += int(prefix.layout.piece_bytes(ids).sum())
            missed[-1] += int(prefix.layout.piece_bytes(missing).sum())
    return wanted, missed


def replay_optimum(prefixes: Sequence[Asked], trace: Trace, max_bytes: int) -> Found:
    """Replay a trace with the optimal policy, which evicts the pieces that are needed last (Belady), like `replay`."""
    starts = np.cumsum([0, *(len(prefix.attention) for prefix in prefixes)])
    needs = [np.concatenate(prefixes[number].requests[request]) + starts[number] for number, request in trace]
    sizes = np.concatenate([one.layout.piece_bytes(np.arange(len(one.attention))) for one in prefixes])
    next_use, next_uses = np.full(starts[-1], NEVER), []
    for i in range(len(trace) - 1, -1, -1):
        next_uses.append(next_use[needs[i]].copy())
        next_use[needs[i]] = i
    is_here, next_use, missed = np.zeros(starts[-1], np.bool_), np.full(starts[-1], NEVER), []
    for ids, uses in zip(needs, reversed(next_uses), strict=True):
        missed.append(int(sizes[ids[~is_here[ids]]].sum()))
        is_here[ids], next_use[ids] = True, uses
        here = np.flatnonzero(is_here)
        here = here[np.argsort(next_use[here], kind="stable")]
        is_here[here[sizes[here].cumsum() > max_bytes]] = False
    return _summarize(prefixes, trace, [int(sizes[ids].sum()) for ids in needs], missed)


def _summarize(prefixes: Sequence[Asked], trace: Trace, wanted: Sequence[int], missed: Sequence[int]) -> Found:
    """Return the results of the last three quarters of a trace; the first quarter fills the cache."""
    first = len(trace) // 4
    layouts = [prefixes[number].layout for number, _ in trace[first:]]
    headers = [RunHeader.num_bytes(layout.num_pages, layout.kv) for layout in layouts]
    hit_ratio = 1 - sum(missed[first:]) / sum(wanted[first:])
    return Found(hit_ratio, sum(missed[first:]) / len(headers) + float(np.mean(headers)))


def measure(prefixes: Sequence[Asked]) -> list[Json]:
    """Return a row for each trace, cache size and policy: hit ratio, disk bytes of a request, and seconds by disk."""
    all_bytes = sum(map(kv_bytes, prefixes))
    rows: list[Json] = []
    for name, change_after in (("steady", None), ("changing", CHANGE_AFTER)):
        trace = zipf_trace(prefixes, NUM_REQUESTS, change_after=change_after)
        for share in SHARES:
            max_bytes = round(share * all_bytes)
            found = {policy: replay(prefixes, trace, max_bytes, one) for policy, one in CONTESTANTS.items()}
            found["optimum"] = replay_optimum(prefixes, trace, max_bytes)
            for policy, one in found.items():
                row: Json = {"trace": name, "share": share, "policy": policy, "hit_ratio": one.hit_ratio}
                row |= {"disk_bytes": one.disk_bytes}
                row |= {f"ttft_s_{disk / 1e6:.0f}": one.disk_bytes / disk + PASSES_S for disk in DISKS}
                rows.append(row)
    return rows


def kv_bytes(prefix: Asked) -> int:
    """Return the bytes of the keys and values of a prefix."""
    return prefix.layout.num_pages * prefix.layout.kv.page_bytes


def main() -> None:
    """Compare the cache policies; print, and write `results/chunk_cache.json`."""
    artifact = Artifact.open(read_options(__doc__, "artifact").artifact)
    model = PrefixModel(artifact)
    prefixes = list(asked_prefixes(Texts(Tokenizer.from_str(artifact.tokenizer_json)), model))
    model.close()
    num_tokens = [prefix.layout.num_tokens for prefix in prefixes]
    wanted = [
        sum(int(prefix.layout.piece_bytes(ids).sum()) for ids in request)
        for prefix in prefixes
        for request in prefix.requests
    ]
    figures: Json = {
        "model": artifact.manifest.name,
        "num_prefixes": len(prefixes),
        "shortest_prefix": min(num_tokens),
        "longest_prefix": max(num_tokens),
        "budget": BUDGET,
        "kv_bytes": sum(map(kv_bytes, prefixes)),
        "wanted_bytes": float(np.mean(wanted)),
        "num_requests": NUM_REQUESTS,
        "change_after": CHANGE_AFTER,
        "passes_s": PASSES_S,
        "rows": measure(prefixes),
    }
    publish("chunk_cache", figures)


if __name__ == "__main__":
    main()
