"""Nobody is served another conversation's keys and values from a disk.

In August and September 2026 three prefix stores did, without an error: LMCache 4385 (sessions that came back after
their KV had gone to disk answered with other requests' facts; nothing had been evicted), llama.cpp 27148 (an idle
slot's snapshot was restored into a new, unrelated request, whose usage said 0 cached tokens), and SGLang 38577 (the
keys of the storage tier left out salt and adapter, so that tenants shared it).

The model here is fake: each row of KV is a digest of all tokens before it, and each logit hangs on the exact rows that
are seen. One wrong row gives another reply.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from radixlm.runtime.cache.cache_namespace import CacheNamespaces, CacheScope, ModelIdentity
from radixlm.runtime.engine.sampling_params import SamplingParams

from ..runtime.fake_model import EOS, alone
from ..runtime.fake_tier import Served, processes

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """An engine over a directory; opened again, it is another process."""
    with processes(tmp_path / "store") as open_again:
        yield open_again


def test_sessions_that_return_from_disk_get_their_own_conversation(serve: Callable[..., Served]) -> None:
    """LMCache 4385: long sessions, short requests among them, memory for one of them, and a disk for all."""
    chance = random.Random(4385)
    stem = [7] * 20  # a system prompt that all have
    sessions = [[*stem, *(chance.randrange(EOS) for _ in range(20))] for _ in range(6)]
    served = serve(num_pages=10)
    num_loaded = 0
    for turn in range(4):
        if turn == 2:
            served = serve(num_pages=10)
        for number in chance.sample(range(len(sessions)), len(sessions)):
            names = {f"long {turn} {number}": sessions[number]}
            names |= {f"short {turn} {number} {i}": [chance.randrange(EOS) for _ in range(9)] for i in range(2)}
            for name, ids in names.items():
                served.bench.add(name, ids, GREEDY)
            served.run()
            served.settle()
            for name, ids in names.items():
                assert served.bench.tokens(name) == alone(ids, GREEDY), name
            long = f"long {turn} {number}"
            num_loaded += served.num_loaded(long)
            sessions[number] += [*served.bench.tokens(long), *(chance.randrange(EOS) for _ in range(3))]
    assert served.bench.cache.tree.eviction.num_evicted_pages > 0 and num_loaded > 6 * 32
    assert not served.tier.stats().misses_by_kind


def test_a_new_request_is_not_given_a_finished_ones_state_and_usage_says_what_it_was_given(
    serve: Callable[..., Served],
) -> None:
    """llama.cpp 27148: unrelated requests one after the other and at once, two at a time; what is counted is true."""
    served = serve(num_pages=14)
    chance = random.Random(27148)
    for number in range(12):
        lengths = [chance.randrange(17, 60) for _ in range(2)]
        pair = {
            f"{number} {i}": [2 * number + i, *(chance.randrange(EOS) for _ in range(length))]
            for i, length in enumerate(lengths)
        }
        for name, ids in pair.items():
            served.bench.add(name, ids, GREEDY)
        served.run()
        for name, ids in pair.items():
            completion = served.bench.outputs[name][-1].completion
            assert completion is not None
            assert completion.token_ids == alone(ids, GREEDY), name
            assert completion.usage.cached_tokens == 0 and completion.prompt_token_ids == tuple(ids)


def test_keys_salts_and_adapters_are_part_of_what_is_on_disk(serve: Callable[..., Served]) -> None:
    """SGLang 38577: equal tokens of two scopes are two records, and neither finds the other's."""
    prompt = list(range(33))
    scopes = [
        *(CacheScope(), CacheScope(api_key="a"), CacheScope(api_key="b"), CacheScope(cache_salt="a")),
        *(CacheScope(adapter="a"), CacheScope(api_key="a", adapter="a"), CacheScope(prompt_cache_key="a")),
    ]
    served = serve()
    for number, scope in enumerate(scopes):
        namespace = CacheNamespaces(ModelIdentity(), served.store.secret).of(scope)
        served = serve()  # nothing is in memory
        before = served.store.store.stats()
        served.bench.add(str(number), prompt, GREEDY, namespace)
        served.run()
        served.settle()
        assert served.num_loaded(str(number)) == 0 and served.tier.stats().num_loads == 0
        assert served.store.store.stats().num_pages == before.num_pages + 2
    served = serve()
    for number, scope in enumerate(scopes):
        namespace = CacheNamespaces(ModelIdentity(), served.store.secret).of(scope)
        served.bench.add(str(number), prompt, GREEDY, namespace)
        served.run()
        assert served.num_loaded(str(number)) == 32
        assert served.bench.tokens(str(number)) == alone(prompt, GREEDY)
