"""Compare parts of prefixes with published methods: quality, bytes, hits of a cache in memory, and the first token.

    python -m bench.partial.baselines ARTIFACT [--source MODEL.gguf] [--seconds 480]

Every way serves the same trace: Zipf over 32 prefixes of NQ-open, BFCL and BBH, 400 requests, of which the first
quarter fills a cache and is not counted. A way is a selection of a quarter of the rows (`contestants.py`), an order of
chunks of 16 rows on disk, and a policy of the cache, which is the store's own and has a share of all keys and values.
Whatever else a way keeps in memory is subtracted from that. Only chunks are counted as read: IMPRESS's probed keys are
free, and so are headers. KL is measured on a prefix's own queries, whatever is in memory. A pass uses as many rows in
each layer, so the loss when layers fall back and are loaded whole is that of the model in plain NumPy, and is measured
if the artifact's source is given.

The first token is estimated, for a quiet machine: the disk's time for the bytes read, and `PREFILL_TOKENS_PER_S` for
computed tokens, or `PASS_S` for each pass of a query over loaded rows. Prefixes' figures are kept in
`.cache/baselines`, by commit; a call that ran out of `--seconds` is continued by the next.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.extras.approximate.packed_keys import MEMORY_SHARE
from radixlm.runtime.extras.approximate.records.chunk_cache import FADING, LFU, LRU, Policy
from tokenizers import Tokenizer

from ..machine import Origin
from ..options import read_options
from ..report.page import publish
from .chunk_cache import Contestant, serve_trace
from .chunk_traces import BUDGET, Asked, zipf_trace
from .contestants import FALLING_BACK, FULL, RANKED, SHIPPED, TEXT, VOTING, Contested, cases, contested
from .prefix import PrefixModel
from .rows_by_layer import RowsByLayer
from .texts import Texts

NUM_REQUESTS, CHANGE_AFTER = 400, 100
CACHE_SHARES = (0.25,)  # of all keys and values
DISKS_MB_PER_S = (25, 50, 100)
PREFILL_TOKENS_PER_S = 2000.0  # SmolLM2, two threads: bench/LOG.md has 2,027 for a prompt of 512 (commit c7125d8)
PASS_S = 0.01  # SmolLM2: 20 tokens over 256 rows (bench/LOG.md)
Json = dict[str, Any]


@dataclass(frozen=True)
class Baseline:
    """The selection of rows, their order on disk, and the policy of the cache in memory.

    Attributes:
        num_passes: passes of a query before its first token.
        known_share: the share of keys and values that memory holds in addition to chunks.
    """

    selection: str
    order: str
    policy: Policy
    num_passes: int = 1
    known_share: float = 0.0
    by_attention: bool = False


RECOMPUTE = "recompute"
BASELINES: Mapping[str, Baseline] = {
    "full load, LRU": Baseline(FULL, TEXT, LRU),
    "heavy hitters, LRU": Baseline("heavy hitters", TEXT, LRU),
    "heavy hitters, LFU": Baseline("heavy hitters", TEXT, LFU),
    "voting, falls back": Baseline(FALLING_BACK, RANKED, Policy(LFU.half_life, 1.0), by_attention=True),
    "voting, never falls back": Baseline(VOTING, RANKED, Policy(LFU.half_life, 1.0), by_attention=True),
    "first+recent, LRU": Baseline("first+recent", TEXT, LRU),
    "ours": Baseline("hybrid", SHIPPED, FADING, 2, MEMORY_SHARE),
    "oracle, in text": Baseline("oracle", TEXT, FADING),
    "oracle, as ours lies": Baseline("oracle", SHIPPED, FADING),
}
ABLATION: Mapping[str, Baseline] = {
    "full load, LRU": BASELINES["full load, LRU"],
    "a quarter by earlier queries, in text": Baseline("known", TEXT, LRU),
    "+ order: ranked on disk": Baseline("known", RANKED, LRU),
    "+ selection: half by a probe": Baseline("hybrid", SHIPPED, LRU, 2, MEMORY_SHARE),
    "+ cache: fading uses": BASELINES["ours"],
}


def rows_of(prefixes: Sequence[Contested], baselines: Mapping[str, Baseline]) -> Iterator[Json]:
    """Yield a row for each baseline, trace and cache size: bytes wanted and read, hit ratio and seconds by disk."""
    for change_after in (None, CHANGE_AFTER):
        shapes = [_as_requested(prefix, BASELINES["full load, LRU"]) for prefix in prefixes]
        trace = zipf_trace(shapes, NUM_REQUESTS, change_after=change_after)
        for share in CACHE_SHARES:
            for name, baseline in baselines.items():
                left = share - baseline.known_share
                max_bytes = max(1, round(left * sum(map(_kv_bytes, prefixes))))
                asked = [_as_requested(prefix, baseline) for prefix in prefixes]
                contestant = Contestant(baseline.policy, by_attention=baseline.by_attention)
                wanted, missed = (
                    np.array(counts[NUM_REQUESTS // 4 :]) for counts in serve_trace(asked, trace, max_bytes, contestant)
                )
                row: Json = {"way": name, "changes": change_after is not None, "cache": share}
                row |= {"wanted_bytes": float(wanted.mean()), "disk_bytes": float(missed.mean())}
                row |= {"hit_ratio": float(1 - missed.sum() / wanted.sum())}
                passes = baseline.num_passes * PASS_S
                yield row | first_tokens({mb: missed / (mb * 1e6) + passes for mb in DISKS_MB_PER_S})
        lengths = np.array([prefixes[number].layout.num_tokens for number, _ in trace[NUM_REQUESTS // 4 :]])
        computed = lengths / PREFILL_TOKENS_PER_S + PASS_S
        for share in CACHE_SHARES:
            row = {"way": RECOMPUTE, "changes": change_after is not None, "cache": share}
            row |= {"wanted_bytes": 0.0, "disk_bytes": 0.0, "hit_ratio": 0.0}
            yield row | first_tokens(dict.fromkeys(DISKS_MB_PER_S, computed))


def first_tokens(seconds: Mapping[int, Any]) -> Json:
    """Return the median and the 99th percentile of seconds to the first token, by disk: `p50_s_DISK`, `p99_s_DISK`."""
    found: Json = {}
    for speed, some in seconds.items():
        found[f"p50_s_{speed}"], found[f"p99_s_{speed}"] = (float(one) for one in np.quantile(some, [0.5, 0.99]))
    return found


def losses(prefixes: Sequence[Contested]) -> Json:
    """Return, by selection, the mean KL to the full prefix with twice its standard error, in nats per token."""
    own = [request for prefix in prefixes for request in prefix.requests if request.kl]
    found: Json = {}
    for name in own[0].kl:
        values = np.array([request.kl[name] for request in own])
        found[name] = [float(values.mean()), 2 * float(values.std(ddof=1)) / len(values) ** 0.5]
    return found


def read_shares(prefixes: Sequence[Contested]) -> Json:
    """Return, by selection and order, the mean share of a prefix's bytes that are in chunks that a query reads."""
    found: Json = {}
    for name, order in prefixes[0].requests[0].chunks:
        shares = [
            prefix.layout.piece_bytes(request.chunks[name, order].astype(np.int64)).sum() / _kv_bytes(prefix)
            for prefix in prefixes
            for request in prefix.requests
        ]
        found[f"{name}, {order}"] = float(np.mean(shares))
    return found


def gather(directory: Path, artifact: Artifact, source: Path | None, seconds: float) -> list[Contested] | None:
    """Return all prefixes, after measuring those that are not in `directory`; None if no time is left."""
    directory.mkdir(parents=True, exist_ok=True)
    texts, begun, model = Texts(Tokenizer.from_str(artifact.tokenizer_json)), time.monotonic(), None
    by_layer = None if source is None else RowsByLayer(artifact, source)
    found = []
    for number, (case, foreign) in enumerate(cases(texts)):
        path = directory / f"{number}.pickle"
        if not path.is_file():
            if time.monotonic() - begun > seconds:
                print(f"{number} prefixes; the same command goes on", flush=True)
                return None
            model = model or PrefixModel(artifact)
            path.write_bytes(pickle.dumps(contested(case, foreign, model, by_layer)))
        found.append(pickle.loads(path.read_bytes()))
    return found


def main() -> None:
    """Measure, replay, print and write `results/partial_baselines.json`."""
    options = read_options(__doc__, "artifact", source=Path, seconds=480.0)
    artifact = Artifact.open(options.artifact)
    name = artifact.manifest.name
    kept = Path(".cache/baselines") / name / Origin.of_this_process().commit
    prefixes = gather(kept, artifact, options.source, options.seconds)
    if prefixes is None:
        return
    rows = list(rows_of(prefixes, {**BASELINES, **ABLATION}))
    own = sum(bool(request.kl) for prefix in prefixes for request in prefix.requests)
    num_tokens = [prefix.layout.num_tokens for prefix in prefixes]
    figures: Json = {
        "model": name,
        "num_heads": artifact.manifest.model.num_attention_heads,
        "num_kv_heads": artifact.manifest.kv.num_kv_heads,
        "num_prefixes": len(prefixes),
        "shortest_prefix": min(num_tokens),
        "longest_prefix": max(num_tokens),
        "num_own": own,
        "budget": BUDGET,
        "falls_back": float(np.mean([one.falls_back for prefix in prefixes for one in prefix.requests])),
        "kv_bytes": sum(map(_kv_bytes, prefixes)),
        "kl": losses(prefixes),
        "read": read_shares(prefixes),
        "rows": [row for row in rows if row["way"] in (*BASELINES, RECOMPUTE)],
        "ablation": [row for row in rows if row["way"] in ABLATION],
    }
    publish("partial_baselines", figures, name)


def _as_requested(prefix: Contested, baseline: Baseline) -> Asked:
    """Return a prefix with the chunks that its requests read by the baseline's selection and order."""
    nothing = np.zeros(0, np.int64)
    key = (baseline.selection, baseline.order)
    reads = [(request.chunks[key].astype(np.int64), nothing) for request in prefix.requests]
    return Asked(prefix.layout, prefix.attention, reads)


def _kv_bytes(prefix: Contested) -> int:
    """Return the bytes of a prefix's KV in chunks."""
    return prefix.layout.num_blocks * prefix.layout.num_groups * prefix.layout.chunk_bytes(0)


if __name__ == "__main__":
    main()
