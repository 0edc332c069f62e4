"""Replay Mooncake's conversation trace (FAST'25), and measure the hit rate by the size of the pool.

    python -m bench.cache.mooncake mooncake_conversation_trace.jsonl.gz

The trace has 12,031 requests as lists of hash ids, one for each 512 tokens with an equal beginning. Scaled by 32: a
hash id is one page of 16 unique tokens. Requests come one after the other through the engine's own cache and its
eviction, without a model. The hit rate is the share of hash ids whose page is found; with room for all of them it is
36.6 %. For comparison there is Belady's choice, which knows the future.
"""

from __future__ import annotations

import gzip
import heapq
import json
from collections.abc import Sequence
from pathlib import Path

from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache

from ..options import read_options
from ..report.page import publish

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0)  # of the trace's distinct hash ids, that the pool holds
Trace = list[list[int]]  # the hash ids of each request, those of its prefix first
NEVER = 2**31
END = 2**32 - 1  # a token after each prompt, because its last one is always computed


def main() -> None:
    """Replay Mooncake's trace for each size of the pool; print and write the hit rates."""
    trace = read(read_options(__doc__, "trace").trace)
    num_hash_ids, num_distinct = sum(map(len, trace)), len({hash_id for request in trace for hash_id in request})
    pools = []
    for share in SHARES:
        num_pages = round(share * num_distinct)
        rates = {"the engine": hit_rate(trace, num_pages)}
        rates["Belady"] = belady_hit_rate(trace, num_pages)
        pools.append({"share": share, "pages": num_pages, "hit_rates": rates})
    counts = {"requests": len(trace), "hash_ids": num_hash_ids, "distinct": num_distinct}
    publish("mooncake", {**counts, "pools": pools})


def read(path: Path) -> Trace:
    """Read the hash ids of a trace file, request by request."""
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()
    return [json.loads(line)["hash_ids"] for line in lines]


def hit_rate(trace: Trace, num_pages: int) -> float:
    """Return the share of hash ids that the engine's cache finds."""
    cache = PrefixCache(PagePool(num_pages + 1))  # one for the token after a prompt
    num_found = 0
    for request in trace:
        prompt = [*page_tokens(request), END]
        sequence = cache.open(cache.match(prompt), context_length=len(prompt))
        num_found += sequence.num_computed // PAGE_SIZE
        with cache.begin() as transaction:
            transaction.reserve(sequence, sequence.num_uncomputed)
            transaction.commit()
        cache.close(sequence, keep=False)  # whole pages stay
    return num_found / sum(map(len, trace))


def page_tokens(hash_ids: Sequence[int]) -> list[int]:
    """Return sixteen unique tokens for each hash id."""
    return [hash_id * PAGE_SIZE + row for hash_id in hash_ids for row in range(PAGE_SIZE)]


def belady_hit_rate(trace: Trace, num_pages: int) -> float:
    """Return the hit rate if the page needed last is evicted; leaves go first: they need all pages before."""
    next_uses = _next_uses(trace)
    cached: dict[int, int] = {}  # by page: the request that needs it next
    queue: list[tuple[int, int]] = []
    num_found = 0
    for request, uses in zip(trace, next_uses, strict=True):
        num_found += sum(page_id in cached for page_id in request)
        for page_id, use in zip(request, uses, strict=True):
            cached[page_id] = use
            heapq.heappush(queue, (-use, page_id))
        while len(cached) > num_pages:  # the request's own pages can be evicted as soon as it has ended
            use, page_id = heapq.heappop(queue)
            if cached.get(page_id) == -use:
                del cached[page_id]
    return num_found / sum(map(len, trace))


def _next_uses(trace: Trace) -> list[list[int]]:
    """Return, for each page of each request, the number of the next request with it; `NEVER` if there is none."""
    seen: dict[int, int] = {}
    uses: list[list[int]] = []
    for number in range(len(trace) - 1, -1, -1):
        uses.append([seen.get(page_id, NEVER) for page_id in trace[number]])
        seen.update(dict.fromkeys(trace[number], number))
    return uses[::-1]


if __name__ == "__main__":
    main()
