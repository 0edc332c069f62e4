"""On a compiled recurrent model with a store: a process goes on from the states that the one before it left on disk,
bit for bit; what is wrong there is computed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from radixlm.compile import compile_model
from radixlm.runtime.engine.engine import Completion, Engine, SamplingParams
from radixlm.runtime.prefix.prefix_loader import PrefixLoader
from radixlm.runtime.prefix.prefix_plan import LoadBudget, PrefixPlan
from radixlm.runtime.prefix.rates import Rates
from radixlm.runtime.store import OSFiles
from radixlm.runtime.store.catalogue import verify

from ...goldens.families import FAMILIES
from ..traces import num_traces

PARAMS = SamplingParams(temperature=0.0, max_tokens=20, logprobs=3, ignore_eos=True)


@pytest.fixture(scope="module", params=("lfm2", "qwen3_5"))
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    family = FAMILIES[request.param]
    source = family.write(folder / "source")
    return compile_model(source, folder / "tiny.radixlm", quantize="f32", context_length=family.context_length).path


@pytest.fixture
def open_engine(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    monkeypatch.setattr(PrefixLoader, "plan", staticmethod(always_load))
    engines: list[Engine] = []

    def opened(**options: object) -> Engine:
        keywords = {"kv_cache_bytes": 1 << 20, "max_num_seqs": 4, "idle_work": False, **options}
        engines.append(Engine(artifact, **keywords))  # type: ignore[arg-type]
        return engines[-1]

    yield opened
    for engine in engines:
        engine.close()


def always_load(start: int, stop: int, rates: Rates, budget: LoadBudget) -> PrefixPlan:
    """So tiny a model computes as quickly as a disk reads."""
    assert budget.num_tokens_ahead is None, "nothing is loaded from the back"
    return PrefixPlan.of((0, start, "memory"), (start, stop, "front"), deadline_s=60.0)


def same(one: Completion, other: Completion) -> bool:
    return (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


def test_a_restart_goes_on_from_a_state_on_disk(open_engine: Callable[..., Engine], tmp_path: Path) -> None:
    store, prompt = tmp_path / "store", random.Random(1).choices(range(20), k=40)
    first = open_engine(store=store, match="exact")
    reply = first.generate(prompt, PARAMS)
    first.close()
    longer = [*prompt, *reply.token_ids, 3, 4, 5]
    cold = open_engine(match="off")
    again = open_engine(store=store, match="exact")
    one = again.generate(longer, PARAMS)
    assert same(one, cold.generate(longer, PARAMS))
    assert one.usage.cached_tokens == 48, "59 tokens of prompt and reply are computed; three pages are full"
    branch = [*prompt[:36], 1, 2, 3]
    other = again.generate(branch, PARAMS)
    assert same(other, cold.generate(branch, PARAMS))
    assert other.usage.cached_tokens == 32, "where the prompt's last full page ends"
    again.close()
    assert not verify(store, OSFiles()).bad


def test_a_state_that_broke_on_disk_is_computed(open_engine: Callable[..., Engine], tmp_path: Path) -> None:
    store, prompt = tmp_path / "store", random.Random(2).choices(range(20), k=40)
    first = open_engine(store=store, match="exact")
    reply = first.generate(prompt, PARAMS)
    first.close()
    singles = [path for path in store.iterdir() if b"RLXRECD" in path.read_bytes() and is_state(path)]
    assert len(singles) == 2
    for path in singles:
        content = bytearray(path.read_bytes())
        content[-5000] ^= 1
        path.write_bytes(content)
    longer = [*prompt, *reply.token_ids, 3, 4, 5]
    again = open_engine(store=store, match="exact")
    one = again.generate(longer, PARAMS)
    assert same(one, open_engine(match="off").generate(longer, PARAMS)) and one.usage.cached_tokens == 0
    assert again.generate(longer, PARAMS).usage.cached_tokens == len(longer) - 1, "it works on"


def is_state(path: Path) -> bool:
    """Whether a file of a store holds a large record."""
    from radixlm.runtime.store.segment import read_segments

    segments = read_segments(path.parent, OSFiles())
    numbers = {number for number, segment in segments.items() if segment is not None and segment.is_single}
    return any(segments[number].name == path.name for number in numbers)  # type: ignore[union-attr]


def test_random_talks_over_a_small_store_give_the_bits_of_a_cold_cache(
    open_engine: Callable[..., Engine], tmp_path: Path
) -> None:
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
                if len(history) > cold.context_length - 40:
                    history = history[: chance.randrange(30)]
                history = [*history, *chance.choices(range(20), k=chance.randrange(1, 12))]
                reply = engine.generate(history, PARAMS)
                assert same(reply, cold.generate(history, PARAMS)), (seed, number, history)
                history += reply.token_ids
            tier = engine.stats().tier
            assert tier is not None
            num_loaded += tier.num_loaded_pages
            engine.close()
    assert num_loaded > 10, num_loaded
