"""mlc-llm since #2295: its "LRU" takes `*begin()` of a hash map, the newest: 0-7 in a cache of 4 left 0, 1, 2 and 7.
Ours drops the conversation that was used longest ago: 4, 5, 6 and 7 are left.
"""

from __future__ import annotations

from radixlm.runtime.engine.sampling_params import SamplingParams

from ..runtime.fake_model import Bench

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


def conversation(which: int) -> list[int]:
    """Three pages that no other conversation begins with, and a token that is always computed."""
    return [which] * 48 + [30]


def serve(bench: Bench, which: int) -> int:
    """Tokens of it that were computed."""
    before = bench.model.num_tokens
    bench.add(f"{which}-{before}", conversation(which), ONE_TOKEN)
    bench.run()
    return bench.model.num_tokens - before


def cached(bench: Bench) -> list[int]:
    """Conversations that would be found whole."""
    return [which for which in range(9) if bench.cache.match(conversation(which)).num_tokens == 48]


def test_lru_evicts_the_oldest() -> None:
    bench = Bench(num_pages=4 * 4)
    for which in range(8):
        assert serve(bench, which) == 49
    assert cached(bench) == [4, 5, 6, 7]


def test_lru_evicts_the_oldest_use_not_the_oldest_conversation() -> None:
    bench = Bench(num_pages=4 * 4)
    for which in range(4):
        serve(bench, which)
    assert serve(bench, 0) == 1
    serve(bench, 4)
    assert cached(bench) == [0, 2, 3, 4]
    serve(bench, 5)
    assert cached(bench) == [0, 3, 4, 5]
