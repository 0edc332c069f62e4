"""Compiled in f32, each tiny model computes what transformers computes: prefill, decode, alone and in batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.model.model_runner import ModelRunner

from ..conftest import CompileOnce
from ..goldens.tiny_models import TINY_MODELS, TinyModel
from ..goldens.tiny_outputs import GoldenPrompt, TinyOutputs
from .ragged import Rows

NUM_PAGES = 61  # a prime, so that Rows can scatter pages


@dataclass(frozen=True)
class Compiled:
    """A tiny model's artifact, its golden, and how far from it logits may be."""

    artifact: Artifact
    golden: TinyOutputs
    tolerance: float  # largest difference over the logits' standard deviation

    def check(self, prompt: GoldenPrompt, logits: np.ndarray, rows: np.ndarray | slice = slice(None)) -> None:
        """`logits` are those of positions `prompt.rows[rows]`."""
        assert logits.dtype == np.float32
        off = np.abs(logits - prompt.logits[rows]).max() / prompt.logits.std()
        assert off <= self.tolerance


@pytest.fixture(
    scope="module",
    params=[(name, kv_dtype) for name in TINY_MODELS for kv_dtype in ("f32", "f16")],
    ids="-".join,
)
def compiled(
    request: pytest.FixtureRequest, compile_once: CompileOnce, tmp_path_factory: pytest.TempPathFactory
) -> Compiled:
    name, kv_dtype = request.param
    tiny: TinyModel = TINY_MODELS[name]
    source = tiny.write(tmp_path_factory.mktemp("sources") / name)
    artifact = Artifact.open(compile_once(source, kv_dtype, quantize="f32", context_length=tiny.context_length))
    tolerance = 1e-4 if kv_dtype == "f32" else 2e-3
    return Compiled(artifact, TinyOutputs.load(name), tolerance)


@pytest.fixture
def rows(compiled: Compiled) -> Iterator[Rows]:
    runner = ModelRunner(compiled.artifact, num_pages=NUM_PAGES)
    yield Rows(runner, NUM_PAGES, compiled.artifact.manifest.module.max_num_logits)
    runner.close()


def test_prefill_of_one_prompt(compiled: Compiled, rows: Rows) -> None:
    for prompt in compiled.golden.prompts:
        number = rows.add(prompt.ids)
        logits = rows.step({number: len(prompt.ids)})[number]
        compiled.check(prompt, logits[prompt.rows])


def test_prefill_of_all_prompts_in_one_ragged_batch(compiled: Compiled, rows: Rows) -> None:
    prompts = compiled.golden.prompts
    numbers = [rows.add(prompt.ids) for prompt in prompts]
    logits = rows.step({n: len(p.ids) for n, p in zip(numbers, prompts, strict=True)})
    for number, prompt in zip(numbers, prompts, strict=True):
        compiled.check(prompt, logits[number][prompt.rows])


def test_decode_of_one_sequence_token_by_token(compiled: Compiled, rows: Rows) -> None:
    prompt = compiled.golden.prompts[3]
    number = rows.add(prompt.ids)
    logits = np.concatenate([rows.step({number: 1})[number] for _ in prompt.ids])
    compiled.check(prompt, logits[prompt.rows])


def test_decode_and_chunked_prefill_mixed_in_ragged_batches(compiled: Compiled, rows: Rows) -> None:
    prompts = compiled.golden.prompts
    numbers = [rows.add(prompt.ids) for prompt in prompts]
    parts: dict[int, list[np.ndarray]] = {number: [] for number in numbers}
    chunks = (1, 2, 1, 5, 37)  # tokens of each prompt in a step, while it has any
    left = {number: len(prompt.ids) for number, prompt in zip(numbers, prompts, strict=True)}
    while any(left.values()):
        step = {n: min(chunk, left[n]) for n, chunk in zip(numbers, chunks, strict=True) if left[n]}
        for number, logits in rows.step(step).items():
            parts[number].append(logits)
            left[number] -= len(logits)
    for number, prompt in zip(numbers, prompts, strict=True):
        compiled.check(prompt, np.concatenate(parts[number])[prompt.rows])


def test_logits_of_a_token_are_the_same_bits_whatever_is_beside_it(compiled: Compiled, rows: Rows) -> None:
    prompts = compiled.golden.prompts[1:4]
    alone = []
    for prompt in prompts:
        number = rows.add(prompt.ids)
        alone.append(rows.step({number: len(prompt.ids)})[number])
    numbers = [rows.add(prompt.ids) for prompt in prompts]
    together = rows.step({n: len(p.ids) for n, p in zip(numbers, prompts, strict=True)})
    for number, expected in zip(numbers, alone, strict=True):
        assert np.array_equal(together[number], expected)


def test_a_greedy_chat_of_three_turns(compiled: Compiled) -> None:
    history: list[int] = []
    with Engine(compiled.artifact, kv_cache_bytes=1 << 24) as engine:
        for number, turn in enumerate(compiled.golden.turns):
            history += turn.user
            params = SamplingParams(temperature=0, max_tokens=len(turn.reply), ignore_eos=True)
            completion = engine.generate(history, params)
            assert list(completion.token_ids) == turn.reply
            assert (completion.usage.cached_tokens > 0) == (number > 0)
            history += turn.reply
