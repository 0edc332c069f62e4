"""On compiled models with an MTP head: replies are the same bits with and without it, also after a restart."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from radixlm.compile import compile_model
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.engine.engine import Completion, Engine, SamplingParams
from radixlm.runtime.engine.engine_options import EngineOptions
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.model.batch import Batch, Float32Array
from radixlm.runtime.model.model_runner import ModelRunner
from radixlm.runtime.prefix.prefix_loader import PrefixLoader
from radixlm.runtime.prefix.prefix_plan import LoadBudget, PrefixPlan
from radixlm.runtime.prefix.rates import Rates
from radixlm.runtime.speculation.draft import MODEL, Draft
from radixlm.runtime.speculation.draft_levels import DraftRequest, DraftSource
from radixlm.runtime.speculation.draft_worth import DraftWorth

from ...goldens.families import MTP_FAMILIES

VOCAB_SIZE, NUM_FREQUENT = 1024, 512  # several of the blocks in which samplers add weights
REPLY = SamplingParams(temperature=0.0, max_tokens=40, logprobs=3, ignore_eos=True)
CASES = [
    pytest.param(("qwen3_5-mtp", "f32", "f16"), id="qwen3_5"),  # keeps states
    pytest.param(("qwen3_5-mtp", "q4", "k12v8"), id="qwen3_5-q4"),
    pytest.param(("deepseek_v3-mtp", "f32", "f16"), id="deepseek_v3"),  # keeps latent vectors
    pytest.param(("glm4_moe-mtp", "f32", "f16"), id="glm4_moe", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=CASES)
def artifact(request: pytest.FixtureRequest, family_artifact: Callable[..., Path]) -> Path:
    return family_artifact(*request.param)


@pytest.fixture(scope="module")
def frequent_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head drafts among some of its tokens."""
    folder = tmp_path_factory.mktemp("frequent")
    family = MTP_FAMILIES["qwen3_5-mtp"]
    source = replace(family, config={**family.config, "vocab_size": VOCAB_SIZE}).write(folder / "source")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("radixlm.compile.module._NUM_FREQUENT", NUM_FREQUENT)
        return compile_model(source, folder / "out.radixlm", quantize="q8", kv_dtype="f16", context_length=512).path


@pytest.fixture
def open_engine(artifact: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def opened(**options: object) -> Engine:
        keywords = {"kv_cache_bytes": 2 << 20, "max_num_seqs": 4, "idle_work": False, **options}
        engines.append(Engine(artifact, **keywords))  # type: ignore[arg-type]
        return engines[-1]

    yield opened
    for engine in engines:
        engine.close()


class Oracle:
    """Has the head of a random model draft the tokens that are told, as often as is said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, right: float) -> None:
        self.truth: list[Sequence[int]] = []
        self.drafted: list[tuple[int, np.ndarray]] = []  # by the position of a token, the head's own logits
        self.num_frequent = 0  # drafts among frequent tokens
        self.num_again = 0  # steps that check drafts, and compute tokens of wrong ones again
        chance, draft, forward = random.Random(1), ModelRunner.draft, ModelRunner.forward

        def counted(runner: ModelRunner, batch: Batch) -> Float32Array:
            num_tokens, num_sequences, _, num_logits = batch.shape
            self.num_again += num_tokens > num_logits > num_sequences
            return forward(runner, batch)

        def told(runner: ModelRunner, batch: Batch, *, is_frequent: bool = False) -> Float32Array:
            logits, arrays = draft(runner, batch, is_frequent=is_frequent), batch.arrays
            self.num_frequent += is_frequent
            for row, place in enumerate(arrays.logit_rows):
                position = int(arrays.positions[place])
                self.drafted.append((position, logits[row].copy()))
                known = [ids for ids in self.truth if position + 1 < len(ids)]
                known = [ids for ids in known if ids[position] == arrays.token_ids[place]]
                if known and chance.random() < right:
                    logits[row] = 0
                    logits[row, known[0][position + 1]] = 50
            return logits

        monkeypatch.setattr(ModelRunner, "draft", told)
        monkeypatch.setattr(ModelRunner, "forward", counted)
        # three drafts in each step that may have some, whether they pay or not
        monkeypatch.setattr(DraftWorth, "may_draft", lambda self: True)
        monkeypatch.setattr(DraftWorth, "promise", lambda self, *_, **__: 3.0)
        monkeypatch.setattr(DraftWorth, "depth", lambda *_: 3)
        monkeypatch.setattr(DraftSource, "_select_drafts", all_of_three)

    def tell(self, prompt: Sequence[int], reply: Completion) -> None:
        self.truth.append([*prompt, *reply.token_ids])


def all_of_three(source: DraftSource, asks: Sequence[DraftRequest], *_: object) -> dict[str, Draft]:
    drafts = {ask.name: Draft(tuple(ask.draft_ids[:3]), MODEL, tuple(ask.chances[:3])) for ask in asks if ask.draft_ids}
    return drafts


def same(one: Completion, other: Completion) -> bool:
    return (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


@pytest.mark.parametrize("right", [1.0, 0.8, 0.0])
def test_replies_are_those_without(
    open_engine: Callable[..., Engine], artifact: Path, right: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, chance = Oracle(monkeypatch, right), random.Random(2)
    cold, drafting = open_engine(match="off", speculate="off"), open_engine(speculate="mtp", match="exact")
    num_drafted = num_accepted = num_cached = 0
    history = chance.choices(range(20), k=19)
    for turn in range(6):
        prompts = [[*history, *chance.choices(range(20), k=chance.randrange(1, 5))] for _ in range(2)]
        params = SamplingParams(
            temperature=float(turn % 2), seed=turn, max_tokens=20 + turn, logprobs=3, ignore_eos=True
        )
        wanted = [cold.generate(prompt, params) for prompt in prompts]
        oracle.truth.clear()
        for prompt, reply in zip(prompts, wanted, strict=True):
            oracle.tell(prompt, reply)
        streams = [drafting.stream(prompt, params) for prompt in prompts]
        for stream, reply in zip(streams, wanted, strict=True):
            found = stream.result()
            assert same(found, reply)
            num_drafted += found.usage.drafted_tokens
            num_accepted += found.usage.accepted_tokens
            num_cached += found.usage.cached_tokens
        history = [*prompts[0], *wanted[0].token_ids]
        if len(history) > drafting.context_length - 60:
            break
    assert num_drafted > 10 and num_cached > 50
    assert bool(oracle.num_again) == bool(Artifact.open(artifact).manifest.model.state_bytes and right < 1.0)
    assert num_accepted > 0.6 * num_drafted if right == 1.0 else num_accepted < num_drafted


@pytest.mark.parametrize(
    "changes",
    [{}, {"repetition_penalty": 1.5}, {"top_n_sigma": 1.0}, {"top_p": 0.9, "frequency_penalty": 1.0}],
    ids=str,
)
def test_replies_drafted_among_frequent_tokens_are_those_without(
    changes: dict[str, Any],
    frequent_artifact: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Samplers work with logits that were not computed, and do not make the head fail."""
    oracle = Oracle(monkeypatch, 0.0)
    # so hot that the largest logits do not decide, and the whole row is read
    params = SamplingParams(temperature=20.0, seed=3, max_tokens=30, ignore_eos=True, **changes)
    options: dict[str, Any] = {"kv_cache_bytes": 2 << 20, "max_num_seqs": 4, "idle_work": False}
    with (
        Engine(frequent_artifact, speculate="off", **options) as plain,
        Engine(frequent_artifact, speculate="mtp", **options) as drafting,
    ):
        prompt = random.Random(4).choices(range(NUM_FREQUENT), k=60)
        prompt += [VOCAB_SIZE - 5, VOCAB_SIZE - 300, 7, 9]  # rare tokens, which penalties change
        wanted, found = plain.generate(prompt, params), drafting.generate(prompt, params)
    assert same(found, wanted)
    assert found.usage.drafted_tokens and oracle.num_frequent
    assert "failed" not in caplog.text


def always_load(start: int, stop: int, rates: Rates, budget: LoadBudget) -> PrefixPlan:
    """So tiny a model computes as quickly as a disk reads."""
    return PrefixPlan.of((0, start, "memory"), (start, stop, "front"), deadline_s=60.0)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_head_drafts_the_same_behind_a_prefix_that_was_kept(
    where: str, open_engine: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's KV is loaded with its pages, and copied with a part of a page."""
    monkeypatch.setattr(PrefixLoader, "plan", staticmethod(always_load))
    oracle = Oracle(monkeypatch, 0.0)
    prompt = random.Random(1).choices(range(20), k=40)
    cold = open_engine(match="off", speculate="mtp", kv_cache_bytes=2 << 20)
    first = open_engine(store=tmp_path / "store", match="exact", speculate="mtp")
    reply = first.generate(prompt, REPLY)
    if where == "disk":
        first.close()
    longer = [*prompt, *reply.token_ids, 3, 4, 5]
    oracle.drafted.clear()
    wanted = cold.generate(longer, REPLY)
    of_cold = dict(reversed(oracle.drafted))
    oracle.drafted.clear()
    second = first if where == "memory" else open_engine(store=tmp_path / "store", match="exact", speculate="mtp")
    found = second.generate(longer, REPLY)
    assert same(found, wanted) and found.usage.cached_tokens >= 64
    of_second = dict(reversed(oracle.drafted))
    first_drafted = min(of_cold.keys() & of_second.keys())
    assert first_drafted <= len(longer) + 1
    assert np.array_equal(of_cold[first_drafted], of_second[first_drafted])


def test_pages_of_a_head_are_counted(open_engine: Callable[..., Engine], artifact: Path) -> None:
    manifest = Artifact.open(artifact).manifest
    assert manifest.kv.num_layers == len(manifest.model.kv_attentions) + 1
    engine = open_engine(speculate="mtp")
    for _ in range(3):
        engine.generate([1, 2, 3] * 7, REPLY)
    stats = engine.stats()
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages


def test_auto_uses_the_head_and_off_does_not(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, prompt = Oracle(monkeypatch, 1.0), [3, 1, 4, 1, 5, 9, 2, 6]
    plain = open_engine(speculate="off").generate(prompt, REPLY)
    assert not oracle.drafted and not plain.usage.drafted_tokens
    oracle.tell(prompt, plain)
    found = open_engine().generate(prompt, REPLY)
    assert same(found, plain) and oracle.drafted and found.usage.accepted_tokens > 20


def test_a_head_and_a_draft_model_are_not_both_asked_for() -> None:
    with pytest.raises(InvalidParameter, match="a draft is given and speculate is 'mtp'"):
        EngineOptions(speculate="mtp", draft="other.radixlm")


def test_a_model_without_a_head_refuses(family_artifact: Callable[..., Path]) -> None:
    path = family_artifact("qwen3_5", "f32", "f16")
    with pytest.raises(InvalidParameter, match="'mtp', and this model has no multi-token prediction head"):
        Engine(path, speculate="mtp", kv_cache_bytes=1 << 20)
