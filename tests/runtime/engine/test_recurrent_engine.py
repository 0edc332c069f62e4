"""On a compiled recurrent model: a reply is the same bits from a cold cache, a warm one, in a batch, in chunks, with
guesses, and from states that an earlier process left on disk; and what is not built for states is refused."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.engine.engine import Completion, Engine, SamplingParams
from radixlm.runtime.engine.engine_core import EngineCore
from radixlm.runtime.engine.step import drafts
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.prefix.prefix_loader import PrefixLoader
from radixlm.runtime.prefix.prefix_plan import LoadBudget, PrefixPlan
from radixlm.runtime.prefix.rates import Rates
from radixlm.runtime.store import OSFiles
from radixlm.runtime.store.catalogue import verify
from radixlm.runtime.store.segment import read_segments

from ..guess_oracle import Unpaid
from ..traces import num_traces

REPLY_20 = SamplingParams(temperature=0.0, max_tokens=20, logprobs=3, ignore_eos=True)
OFTEN = ("lfm2", "lfm2_moe", "qwen3_5", "granite4_h", "nemotron_h", "falcon_h1")  # others' tests compile them, too
LONG = ("qwen3_5_moe", "qwen3_next", "granite4_h-moe")  # which have nothing that none of those have
IN_FLOATS = [pytest.param((name, "f32", "f16"), id=name) for name in OFTEN]
IN_FLOATS += [pytest.param((name, "f32", "f16"), id=name, marks=pytest.mark.long) for name in LONG]
IN_INTEGERS = [pytest.param(("qwen3_5", "q4", "k12v8"), id="qwen3_5-q4")]  # weights, keys and values


@pytest.fixture(scope="module", params=[*IN_FLOATS, *IN_INTEGERS])
def artifact(request: pytest.FixtureRequest, family_artifact: Callable[..., Path]) -> Path:
    return family_artifact(*request.param)


@pytest.fixture
def open_engine(artifact: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def opened(**options: object) -> Engine:
        keywords = {"kv_cache_bytes": 1 << 20, "max_num_seqs": 4, "idle_work": False, **options}
        engines.append(Engine(artifact, **keywords))  # type: ignore[arg-type]
        return engines[-1]

    yield opened
    for engine in engines:
        engine.close()


def same(one: Completion, other: Completion) -> bool:
    return (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


def talk(engine: Engine, chance: random.Random, length: int) -> Iterator[tuple[list[int], SamplingParams, Completion]]:
    """Prompts that go on from one another, two at a time, and their replies."""
    history = chance.choices(range(20), k=chance.randrange(3, 12))
    for _ in range(8):
        if len(history) > length - 24:
            return
        prompts = [[*history, *chance.choices(range(20), k=chance.randrange(1, 5))] for _ in range(2)]
        params = [
            SamplingParams(
                temperature=chance.choice((0.0, 1.0)),
                seed=chance.randrange(99),
                max_tokens=chance.randrange(1, 17),
                logprobs=3,
                ignore_eos=True,
            )
            for _ in prompts
        ]
        streams = [engine.stream(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        replies = [stream.result() for stream in streams]
        yield from zip(prompts, params, replies, strict=True)
        history = [*prompts[0], *replies[0].token_ids]
        history = history[: chance.choice((len(history), len(history), chance.randrange(3, len(history))))]


def test_a_warm_cache_gives_the_bits_of_a_cold_one(
    open_engine: Callable[..., Engine], artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state_bytes = Artifact.open(artifact).manifest.model.state_bytes
    cold = open_engine(match="off", speculate="off")
    warm = {
        "chunks": open_engine(max_num_batched_tokens=5, match="exact"),
        "few states": open_engine(state_cache_bytes=4 * state_bytes, match="exact"),
        "guesses": open_engine(speculate="lookup", match="exact"),
    }
    monkeypatch.setattr(drafts, "Drafter", Unpaid)  # most guesses are wrong
    num_cached = num_drafted = 0
    for seed in range(num_traces(6)):
        wanted = dict[str, Completion]()  # as long as all is right, a seed's prompts are the same for every engine
        for engine in warm.values():
            for prompt, params, reply in talk(engine, random.Random(seed), engine.context_length):
                asked = f"{prompt} {params}"
                if asked not in wanted:
                    wanted[asked] = cold.generate(prompt, params)
                assert same(reply, wanted[asked]), (seed, prompt)
                num_cached += reply.usage.cached_tokens
                num_drafted += reply.usage.drafted_tokens
    assert num_cached > 500 and num_drafted > 100, (num_cached, num_drafted)


def test_two_threads_give_the_bits_of_one(open_engine: Callable[..., Engine]) -> None:
    one = open_engine(match="off", num_threads=1)
    one.generate([1], REPLY_20)  # it takes its threads with the first step
    two = open_engine(match="off", num_threads=2)
    for prompt, params, reply in talk(two, random.Random(0), two.context_length):
        assert same(reply, one.generate(prompt, params)), prompt


def test_states_are_told_of(open_engine: Callable[..., Engine]) -> None:
    engine = open_engine(match="exact")
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    reply = engine.generate([1, 2, 3, 4] * 6, params)
    states = engine.stats().states
    assert states is not None and states.num_snapshots == 2 and states.num_free + 2 == states.num_slots
    assert engine.cache_tree(b"").num_states == 2
    again = engine.generate([*[1, 2, 3, 4] * 6, *reply.token_ids, 5], params)
    assert again.usage.cached_tokens == 24 + 2
    other = engine.generate([1, 2, 3, 4] * 5, params)
    assert other.usage.cached_tokens == 0
    assert other.cache_match.why_not_more is not None and other.cache_match.why_not_more.kind == "no_state"


def test_what_is_not_built_for_states_is_refused(open_engine: Callable[..., Engine], tmp_path: Path) -> None:
    pytest.importorskip("radixlm.runtime.extras.approximate", reason="the option belongs to an extra that was removed")
    with pytest.raises(InvalidParameter, match=r"kv_budget is 0\.5, and this model needs all of its keys"):
        open_engine(store=tmp_path / "store", kv_budget=0.5)


def always_load(start: int, stop: int, rates: Rates, budget: LoadBudget) -> PrefixPlan:
    """So tiny a model computes as quickly as a disk reads."""
    assert budget.num_tokens_ahead is None, "nothing is loaded from the back"
    return PrefixPlan.of((0, start, "memory"), (start, stop, "front"), deadline_s=60.0)


def test_a_restart_goes_on_from_a_state_on_disk(
    open_engine: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefixLoader, "plan", staticmethod(always_load))
    store, prompt = tmp_path / "store", random.Random(1).choices(range(20), k=40)
    first = open_engine(store=store, match="exact")
    reply = first.generate(prompt, REPLY_20)
    first.close()
    longer = [*prompt, *reply.token_ids, 3, 4, 5]
    cold = open_engine(match="off")
    again = open_engine(store=store, match="exact")
    one = again.generate(longer, REPLY_20)
    assert same(one, cold.generate(longer, REPLY_20))
    tier = again.stats().tier
    assert tier is not None and tier.num_states >= 2 and tier.num_dropped_states == 0
    assert one.usage.cached_tokens == 48, "59 tokens of prompt and reply are computed; three pages are full"
    branch = [*prompt[:36], 1, 2, 3]
    other = again.generate(branch, REPLY_20)
    assert same(other, cold.generate(branch, REPLY_20))
    assert other.usage.cached_tokens == 32, "where the prompt's last full page ends"
    again.close()
    assert not verify(store, OSFiles()).bad


def test_a_state_that_broke_on_disk_is_computed(
    open_engine: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefixLoader, "plan", staticmethod(always_load))
    store, prompt = tmp_path / "store", random.Random(2).choices(range(20), k=40)
    first = open_engine(store=store, match="exact")
    reply = first.generate(prompt, REPLY_20)
    first.close()
    singles = [path for path in store.iterdir() if b"RLXRECD" in path.read_bytes() and is_state(path)]
    assert len(singles) == 2
    for path in singles:
        content = bytearray(path.read_bytes())
        content[-5000] ^= 1
        path.write_bytes(content)
    longer = [*prompt, *reply.token_ids, 3, 4, 5]
    again = open_engine(store=store, match="exact")
    one = again.generate(longer, REPLY_20)
    assert same(one, open_engine(match="off").generate(longer, REPLY_20)) and one.usage.cached_tokens == 0
    assert again.generate(longer, REPLY_20).usage.cached_tokens == len(longer) - 1, "it works on"


def is_state(path: Path) -> bool:
    """Whether a file of a store holds a large record."""
    segments = read_segments(path.parent, OSFiles())
    numbers = {number for number, segment in segments.items() if segment is not None and segment.is_single}
    return any(segments[number].name == path.name for number in numbers)  # type: ignore[union-attr]


def indexed_states(core: EngineCore) -> set[bytes]:
    """The keys of pages behind which the index has a state."""
    assert core.tier is not None
    index = core.tier.index
    return {key for key in index._record_of if index.has_state(key)}


def test_random_talks_over_a_small_store_give_the_bits_of_a_cold_cache(
    open_engine: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefixLoader, "plan", staticmethod(always_load))
    cold = open_engine(match="off")
    num_loaded = 0
    for seed in range(num_traces(4)):
        chance, history = random.Random(seed), list[int]()
        for number in range(4):
            engine = open_engine(
                store=tmp_path / f"{seed % 2}",
                match="exact",
                store_bytes=chance.choice((400_000, 4_000_000)),
                kv_cache_bytes=chance.choice((1 << 18, 1 << 20)),
            )
            for _ in range(3):
                if len(history) > engine.context_length - 40:
                    history = history[: chance.randrange(30)]
                history = [*history, *chance.choices(range(20), k=chance.randrange(1, 12))]
                reply = engine.generate(history, REPLY_20)
                assert same(reply, cold.generate(history, REPLY_20)), (seed, number, history)
                history += reply.token_ids
            tier = engine._core.tier
            assert tier is not None
            while not engine._loop.call(lambda core: core.tier.writer.is_idle and not core.tier.saver.has_pending):
                time.sleep(0.001)
            assert engine._loop.call(indexed_states) <= set(tier.store.pages_with_state()), (seed, number)
            num_loaded += tier.stats().num_loaded_pages
            engine.close()
    assert num_loaded > 10, num_loaded
