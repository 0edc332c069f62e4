"""Load a real server with many impatient clients and a far too small KV pool, and check whether each reply is right.

    python -m bench.load ARTIFACT --streams 50 --seconds 600 --seed 1

The server has a separate process, and so have the clients, which send random prompts with random sampling, continue
conversations, disconnect in the middle, and send requests that must be refused. Afterwards `--survivors` replies, drawn
at random, are computed again, alone on a fresh engine, and must be bit-identical; the server's pages are counted; its
memory must not have grown. `--pages` is the size of the KV pool, in pages of 16 tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixlm.runtime.artifact import Artifact
from radixlm.runtime.engine.engine import Engine

from ..options import read_options
from ..processes import MemoryWatch
from ..report.page import publish
from ..worker import Worker
from .server import kv_cache_bytes
from .survivors import Survivor, differences

NUM_PAGES = 64  # 1,024 tokens: a few of the fifty clients' requests
MAX_TOLD = 10
MOST_GROWTH = 8 << 20  # bytes from warm to end that count as no growth


def main() -> None:
    """Run the load test, print its results, write `results/load.json`: last run of each model and number of streams."""
    options = read_options(__doc__, "artifact", streams=50, seconds=600.0, seed=1, pages=NUM_PAGES, survivors=200)
    result = run(**vars(options))
    publish("load", result, run=f"{result['model']} {options.streams}")
    print(*result["faults"], *result["differences"], sep="\n")
    sys.exit(0 if result["is_met"] else "a law is broken, or too little was preempted or evicted: see above")


def run(artifact: Path, *, streams: int, seconds: float, seed: int, pages: int, survivors: int) -> dict[str, Any]:
    """Load a server, compare a sample of its replies with those computed alone, and return the counts and times."""
    with Worker("bench.load.server", artifact, pages) as server, Worker("bench.load.clients") as clients:
        opened = server.call("open")
        with MemoryWatch(server.pid) as memory:
            found = clients.call(
                "run",
                facts=opened["facts"],
                port=opened["port"],
                num_streams=streams,
                seconds=seconds,
                seed=seed,
                num_kept=survivors,
            )
        books, leaks = server.call("books"), server.call("leaks")
    kept = [Survivor.read(fields) for fields in found.pop("survivors")]
    opened_artifact = Artifact.open(artifact)
    with Engine(opened_artifact, kv_cache_bytes=kv_cache_bytes(opened_artifact, pages), max_num_seqs=1) as engine:
        wrong = [found for found in (differences(survivor, engine) for survivor in kept) if found]
    result = {
        "model": opened["facts"]["model_id"],
        "num_streams": streams,
        "seed": seed,
        "num_pages": pages,
        "context_length": opened["facts"]["context_length"],
        **found,
        "tokens_per_s": books["num_generated_tokens"] / found["seconds"],
        "num_preemptions": books["num_preemptions"],
        "num_evicted_pages": books["num_evicted_pages"],
        "num_failed": books["num_failed"],
        "cached_share": books["num_cached_tokens"] / max(1, books["num_prompt_tokens"]),
        "leaks": leaks,
        "memory": memory.figures(),
        "num_compared": len(kept),
        "num_greedy_compared": sum(one.params["temperature"] == 0.0 for one in kept),
        "num_different_survivors": len(wrong),
        "differences": wrong[:MAX_TOLD],
    }
    return {**result, "is_met": _has_passed(result)}


def _has_passed(result: Mapping[str, Any]) -> bool:
    """Return whether the load test passed: no fault, no leaked page, no changed reply and little growth of memory.

    It must also have put the server under pressure: requests were preempted and pages evicted.
    """
    memory = result["memory"]
    return (
        not result["num_faults"]
        and not result["num_hung"]
        and not result["num_failed"]
        and not result["num_different_survivors"]
        and not any(result["leaks"].values())
        and result["num_compared"] > 0
        and result["num_preemptions"] > 0
        and result["num_evicted_pages"] > 0
        and memory["end_bytes"] - memory["warm_bytes"] <= MOST_GROWTH
    )


if __name__ == "__main__":
    main()
