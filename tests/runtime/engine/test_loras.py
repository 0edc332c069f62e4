"""LoRA adapters of requests: no request gets another adapter's KV, from memory, from disk, or computed ahead.

A reply is a function of its prompt and its adapter: alone, batched with other adapters, from the cache and after a
restart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from radixlm.runtime.cache.cache_namespace import CacheNamespaces, CacheScope, ModelIdentity, adapted_namespace
from radixlm.runtime.engine.completion import Completion
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.request_options import RequestOptions
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.errors import InvalidAdapter, InvalidParameter
from radixlm.runtime.prefix.prefix_loader import PrefixLoader
from radixlm.runtime.prefix.prefix_plan import LoadBudget, PrefixPlan
from radixlm.runtime.prefix.rates import Rates
from radixlm.runtime.store import PageStore, StoreIdentity

from ...conftest import CompileOnce
from ...goldens.tiny_adapters import TinyAdapter

REPLY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)
PROMPTS = [list(range(20 + number, 90 + number)) for number in range(2)]
LORAS = (None, "a", "b")
Open = Callable[..., Engine]


@pytest.fixture(scope="module")
def artifact(compile_once: CompileOnce, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = TinyAdapter("llama").tiny
    source = tiny.write(tmp_path_factory.mktemp("sources") / "llama")
    return compile_once(source, "f32", quantize="q8", context_length=tiny.context_length, max_loras=4)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: TinyAdapter("llama", seed).write_peft(folder / name) for seed, name in enumerate("abc")}


@pytest.fixture
def open_engine(artifact: Path, files: dict[str, Path]) -> Iterator[Open]:
    engines: list[Engine] = []

    def opened(**options: object) -> Engine:
        keywords = {"kv_cache_bytes": 4 << 20, "max_num_seqs": 8, "loras": {name: files[name] for name in "ab"}}
        engines.append(Engine(artifact, **keywords | options))  # type: ignore[arg-type]
        return engines[-1]

    yield opened
    for engine in engines:
        engine.close()


def bits(completion: Completion) -> object:
    return completion.token_ids, completion.logprobs


@pytest.fixture(scope="module")
def alone(artifact: Path, files: dict[str, Path]) -> dict[tuple[str | None, int], object]:
    """The reply to each prompt with each adapter, each computed alone with nothing cached."""
    with Engine(artifact, kv_cache_bytes=4 << 20, loras={name: files[name] for name in "ab"}, match="off") as engine:
        found = {
            (lora, number): bits(engine.generate(prompt, REPLY, lora=lora))
            for lora in LORAS
            for number, prompt in enumerate(PROMPTS)
        }
    assert len({str(reply) for reply in found.values()}) == len(found)
    return found


def test_adapters_are_mixed_in_one_batch(open_engine: Open, alone: dict[tuple[str | None, int], object]) -> None:
    engine = open_engine()
    asked = [(lora, number) for _ in range(2) for lora in LORAS for number in range(2)]
    streams = [engine.stream(PROMPTS[number], REPLY, lora=lora) for lora, number in asked]
    for key, stream in zip(asked, streams, strict=True):
        assert bits(stream.result()) == alone[key], key


def test_the_cache_of_one_adapter_is_no_others(open_engine: Open, alone: dict[tuple[str | None, int], object]) -> None:
    engine = open_engine()
    for is_cached in (False, True):
        for key in alone:
            reply = engine.generate(PROMPTS[key[1]], REPLY, lora=key[0])
            assert bits(reply) == alone[key]
            assert (reply.usage.cached_tokens >= 48) == is_cached, key
    assert engine.clear_cache().num_freed_pages > 0  # all adapters' pages, too
    for key in alone:
        assert engine.generate(PROMPTS[key[1]], REPLY, lora=key[0]).usage.cached_tokens == 0


def always_load(start: int, stop: int, rates: Rates, budget: LoadBudget) -> PrefixPlan:
    """So tiny a model computes as quickly as a disk reads."""
    return PrefixPlan.of((0, start, "memory"), (start, stop, "front"), deadline_s=60.0)


def test_the_disk_of_one_adapter_is_no_others(
    open_engine: Open,
    alone: dict[tuple[str | None, int], object],
    files: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PrefixLoader, "plan", staticmethod(always_load))
    engine = open_engine(store=tmp_path / "store")
    assert bits(engine.generate(PROMPTS[0], REPLY, lora="a")) == alone["a", 0]
    engine.close()
    # the same name with other bytes, the same bytes under another name, and the model itself
    engine = open_engine(store=tmp_path / "store", loras={"a": files["b"], "other": files["a"]})
    for lora, of, is_cached in (("a", "b", False), (None, None, False), ("other", "a", True)):
        reply = engine.generate(PROMPTS[0], REPLY, lora=lora)
        assert bits(reply) == alone[of, 0]
        assert (reply.usage.cached_tokens > 0) == is_cached, lora


def test_a_cleared_cache_has_no_pages_of_adapters_that_are_not_loaded(open_engine: Open, tmp_path: Path) -> None:
    for lora, namespace in (("a", b"one"), ("b", b"one"), ("a", b"two")):
        engine = open_engine(store=tmp_path / "store")
        engine.generate(PROMPTS[0], REPLY, options=RequestOptions(namespace=namespace, lora=lora))
        engine.close()
    engine = open_engine(store=tmp_path / "store", loras={})
    assert engine.clear_cache(b"one").num_discarded_pages == 10
    engine.close()
    with PageStore.open(tmp_path / "store", StoreIdentity.of(engine.manifest), max_bytes=1 << 30) as store:
        digest = open_engine().adapters.named("a").digest
        assert {page.namespace for page in store.page_keys()} == {adapted_namespace(b"two", digest)}


def test_a_client_is_apart_from_others_with_an_adapter_too(open_engine: Open) -> None:
    engine = open_engine()
    for name in (b"one", b"two"):
        options = RequestOptions(namespace=name, lora="a")
        assert engine.generate(PROMPTS[0], REPLY, options=options).usage.cached_tokens == 0
    assert engine.clear_cache(b"one").num_freed_pages > 0
    assert engine.generate(PROMPTS[0], REPLY, options=RequestOptions(namespace=b"two", lora="a")).usage.cached_tokens
    assert not engine.generate(
        PROMPTS[0], REPLY, options=RequestOptions(namespace=b"one", lora="a")
    ).usage.cached_tokens


def test_a_scope_names_the_part_of_an_adapter(open_engine: Open) -> None:
    engine = open_engine()
    digest = engine.adapters.named("a").digest
    plain = engine.namespaces.of(CacheScope(api_key="k"))
    assert engine.namespaces.of(CacheScope(api_key="k", adapter=digest)) == adapted_namespace(plain, digest)
    engine.generate(PROMPTS[0], REPLY, options=RequestOptions(namespace=plain, lora="a"))
    assert engine.cache_tree(adapted_namespace(plain, digest)).num_runs and not engine.cache_tree(plain).num_runs
    assert CacheNamespaces(ModelIdentity()).of(CacheScope()) != plain


def test_a_request_for_an_unknown_adapter_fails_alone(
    open_engine: Open, alone: dict[tuple[str | None, int], object]
) -> None:
    engine = open_engine()
    stream = engine.stream(PROMPTS[0], REPLY, lora="a")
    with pytest.raises(InvalidParameter, match="lora is 'c', and there are 'a', 'b'"):
        engine.generate(PROMPTS[0], REPLY, lora="c")
    assert bits(stream.result()) == alone["a", 0]


def test_one_bad_adapter_stops_the_start(open_engine: Open, files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapter, match=re.escape(str(tmp_path))):
        open_engine(loras={"a": files["a"], "bad": tmp_path})
    with pytest.raises(InvalidParameter, match="loras are given and a kv_budget"):
        open_engine(store=tmp_path / "store", kv_budget=0.5)


def test_memory_is_left_for_the_adapters(open_engine: Open) -> None:
    """The default size of the KV cache is a quarter of what the adapters leave."""
    plain, adapted = (
        open_engine(kv_cache_bytes=None, memory_bytes=4 << 20, **options) for options in ({"loras": None}, {})
    )
    manifest = adapted.manifest
    assert manifest.lora is not None
    lost = (plain._core.cache.pool.num_pages - adapted._core.cache.pool.num_pages) * manifest.kv.page_bytes
    assert abs(lost - 2 * manifest.lora.adapter_bytes / 4) <= manifest.kv.page_bytes


def test_the_next_prompt_is_computed_ahead_with_the_adapter(
    open_engine: Open, alone: dict[tuple[str | None, int], object]
) -> None:
    """What the engine computes while idle must be the adapter's, because it is kept in its part of the cache."""
    from radixlm.runtime.prefix.expected_prompts import ExpectedPrompt

    engine = open_engine()
    adapter = engine.adapters.named("a")
    expected = ExpectedPrompt(adapted_namespace(b"", adapter.digest), lambda: PROMPTS[1], None, adapter.index)
    engine._loop.call(lambda core: core.expected.add(expected))  # type: ignore[union-attr]
    while engine._loop.call(lambda core: not core.expected.is_done):  # type: ignore[union-attr]
        pass
    reply = engine.generate(PROMPTS[1], REPLY, lora="a")
    assert reply.usage.cached_tokens >= 48 and bits(reply) == alone["a", 1]
