"""Requests whose match is off: nothing is reused for them and nothing is kept of them, and the replies are the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.plan import SchedulerPolicy

from ..eager_loads import load_always
from ..fake_model import EOS, Bench, alone

ROOMY = SchedulerPolicy(max_num_seqs=8, max_num_batched_tokens=200)
PROMPT = [7] * 40
OFF = None  # the namespace of what is off
Open = Callable[..., Engine]


def drawn(seed: int, max_tokens: int = 20) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True)


def remembered(cache: PrefixCache) -> object:
    """All that a request could have changed."""
    uses = {namespace: cache.uses.ended(namespace) for namespace in cache.tree.namespaces}
    num_aliases = {namespace: cache.aliases.num_aliases(namespace) for namespace in cache.tree.namespaces}
    return sorted(cache.tree.paths()), cache.tree.version, cache.pool.num_free, uses, num_aliases


def test_an_off_request_reuses_nothing_and_leaves_the_cache_as_it_was() -> None:
    bench = Bench()
    bench.add("before", PROMPT, drawn(1))
    bench.run()
    before, num_computed = remembered(bench.cache), bench.model.num_tokens
    bench.add("off", PROMPT, drawn(2), OFF)
    bench.run()
    assert bench.tokens("off") == alone(PROMPT, drawn(2))
    assert bench.model.num_tokens - num_computed == len(PROMPT) + 20 - 1
    assert remembered(bench.cache) == before
    completion = bench.outputs["off"][-1].completion
    assert completion is not None and completion.usage.cached_tokens == 0
    why = completion.cache_match.why_not_more
    assert why is not None and (why.kind, why.position, why.cached_ids, why.wanted_ids) == ("off", 0, (), ())
    assert "off" in str(why)


def test_no_request_reuses_what_an_off_request_computed() -> None:
    bench = Bench()
    bench.add("off", PROMPT, drawn(1), OFF)
    bench.run()
    assert bench.cache.tree.namespaces == [] and bench.cache.pool.num_free == bench.num_pages
    bench.add("after", PROMPT, drawn(1))
    bench.run()
    completion = bench.outputs["after"][-1].completion
    assert completion is not None and completion.usage.cached_tokens == 0
    assert bench.tokens("after") == bench.tokens("off")


def test_off_requests_share_batches_and_nothing_else() -> None:
    """Two with one prompt run at once, as does a third whose match is on: it does not wait for what they compute."""
    bench, batches = Bench(policy=ROOMY), list[int]()
    bench.model.before = lambda batch: batches.append(batch.shape[1])
    for name, namespace in (("a", OFF), ("b", OFF), ("on", b"")):
        bench.add(name, PROMPT, drawn(1), namespace)
    bench.step()
    assert batches == [3]
    bench.run()
    assert bench.model.num_tokens == 3 * (len(PROMPT) + 20 - 1)
    assert {bench.tokens(name) for name in ("a", "b", "on")} == {alone(PROMPT, drawn(1))}
    assert max(batches) == 3


def test_an_off_request_does_not_wait_for_one_that_computes_its_prompt() -> None:
    bench, batches = Bench(policy=ROOMY), list[int]()
    bench.model.before = lambda batch: batches.append(batch.shape[1])
    for name, namespace in (("on", b""), ("off", OFF)):
        bench.add(name, PROMPT, drawn(1), namespace)
    bench.step()
    assert batches == [2]


def test_a_preempted_off_request_is_computed_again_to_the_same_tokens() -> None:
    bench, chance = Bench(num_pages=9), random.Random(3)
    asked = {}
    for number in range(12):
        ids = [*[chance.randrange(3)] * 20, *(chance.randrange(EOS) for _ in range(5))]
        asked[f"r{number}"] = ids, drawn(number, 40), OFF if number % 3 else b""
        bench.add(f"r{number}", *asked[f"r{number}"])
    bench.run()
    assert sum(request.num_preemptions for request in bench.requests.values() if request.namespace is None) > 1
    for name, (ids, params, namespace) in asked.items():
        assert bench.tokens(name) == alone(ids, params), name
        completion = bench.outputs[name][-1].completion
        assert completion is not None and (namespace is not None or completion.usage.cached_tokens == 0)
    cached = {namespace for namespace, _, _ in bench.cache.tree.paths()}
    assert cached == {b""}


def test_a_cancelled_off_request_gives_all_its_pages_back() -> None:
    bench = Bench()
    bench.add("off", PROMPT, drawn(1), OFF)
    for _ in range(6):
        bench.step()
    assert bench.cache.pool.num_in_use > 1
    bench.abort("off")
    assert bench.cache.pool.num_free == bench.num_pages


def test_forks_of_an_off_sequence_are_as_private_as_it_is() -> None:
    cache = Bench().cache
    parent = cache.open(cache.match([1] * 40, namespace=None), context_length=90)
    with cache.begin() as transaction:
        transaction.reserve(parent, 40)
        transaction.commit()
    child = cache.fork(parent, 33)
    child.append([2] * 20)
    with cache.begin() as transaction:
        transaction.reserve(child, 20)
        transaction.commit()
    cache.check()
    cache.close(parent)
    cache.preempt(child)
    assert cache.resume(child) == 0
    cache.close(child)
    cache.check()
    assert cache.pool.num_free == cache.pool.num_pages


# On a real compiled model, with a store.

LONG = [{"role": "user", "content": "he in the tree " * 20}]
LETTERS = replace(drawn(3, 40), temperature=1.0, logit_bias={ord(letter) + 3: 30.0 for letter in " hein"})


@pytest.fixture
def open_engine(tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens an engine over one store, and closes the one before it. Loads are always worth it: this model is tiny."""
    load_always(monkeypatch)
    opened: list[Engine] = []

    def open_again(**options: object) -> Engine:
        if opened:
            opened[-1].close()
        settings = {"kv_cache_bytes": 1 << 20, "max_num_seqs": 4, "num_threads": 1, **options}
        opened.append(Engine(tiny_artifact, store=tmp_path / "store", store_bytes=64 << 20, **settings))  # type: ignore[arg-type]
        return opened[-1]

    yield open_again
    opened[-1].close()


def test_an_off_request_is_in_no_tree_store_alias_or_memory_of_texts(open_engine: Open) -> None:
    engine = open_engine()
    off = engine.chat(LONG, LETTERS, cache_match="off")
    assert off.usage.cached_tokens == 0
    picture = engine.cache_tree()
    assert (picture.num_runs, picture.num_aliases, picture.uses) == (0, 0, ())
    rendered = engine.render(LONG)
    assert engine.tokenizer.prepare_chat(rendered, seam_of=b"").num_known == 0
    tier = engine.stats().tier
    assert tier is not None and (tier.num_saved_pages, tier.num_pages) == (0, 0)
    engine = open_engine()
    on = engine.chat(LONG, LETTERS)
    assert on.usage.cached_tokens == 0 and on.token_ids == off.token_ids


def test_an_off_request_finds_nothing_in_memory_or_on_disk(open_engine: Open) -> None:
    on = open_engine().chat(LONG, LETTERS)
    engine = open_engine()
    off = engine.chat(LONG, LETTERS, cache_match="off")
    tier = engine.stats().tier
    assert tier is not None and tier.num_pages > 0 and tier.num_loads == 0
    assert (off.usage.cached_tokens, off.token_ids) == (0, on.token_ids)
    assert engine.chat(LONG, LETTERS).usage.cached_tokens > 0, "what others may have is still there"
    assert engine.chat(LONG, LETTERS, cache_match="off").usage.cached_tokens == 0


def test_an_engine_may_be_off_and_a_request_on(open_engine: Open) -> None:
    engine = open_engine(match="off")
    for _ in range(2):
        assert engine.generate("the tree in the end", LETTERS).usage.cached_tokens == 0
    for _ in range(2):
        on = engine.generate("the tree in the end", LETTERS, cache_match="text")
    assert on.usage.cached_tokens > 0
    assert engine.generate("the tree in the end", LETTERS).usage.cached_tokens == 0
