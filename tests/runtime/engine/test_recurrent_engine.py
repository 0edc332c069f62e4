"""On a compiled recurrent model: a reply is the same bits from a cold cache, a warm one, in a batch, in chunks, and
with guesses; and what is not built for states is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from radixlm.compile import compile_model
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.engine.engine import Completion, Engine, SamplingParams
from radixlm.runtime.engine.step import drafts
from radixlm.runtime.errors import InvalidParameter

from ...goldens.families import FAMILIES
from ..guess_oracle import Unpaid
from ..traces import num_traces

NAMES = ("lfm2", "lfm2_moe", "qwen3_5", "qwen3_next", "granite4_h")


@pytest.fixture(scope="module", params=NAMES)
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    family = FAMILIES[request.param]
    source = family.write(folder / "source")
    return compile_model(source, folder / "tiny.radixlm", quantize="f32", context_length=family.context_length).path


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
        for engine in warm.values():
            for prompt, params, reply in talk(engine, random.Random(seed), engine.context_length):
                assert same(reply, cold.generate(prompt, params)), (seed, prompt)
                num_cached += reply.usage.cached_tokens
                num_drafted += reply.usage.drafted_tokens
    assert num_cached > 500 and num_drafted > 100, (num_cached, num_drafted)


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
    with pytest.raises(InvalidParameter, match=r"kv_budget is 0\.5, and this model needs all of its keys"):
        open_engine(store=tmp_path / "store", kv_budget=0.5)
