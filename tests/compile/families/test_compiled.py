"""Each tiny family, compiled in float32, computes what transformers computes, and each token has bits of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVDType
from radixlm.runtime.model.model_runner import ModelRunner

from ...goldens.tiny_outputs import GoldenPrompt, TinyOutputs
from ..ragged import Rows
from .harness import COMPILED, IN_CODES, OFTEN

NUM_PAGES = 211  # a prime, so that Rows can scatter pages
NUM_SLOTS = 64
# Of the standard deviation of a prompt's logits.
TOLERANCES: dict[KVDType, float] = {"f32": 1e-4, "f16": 2e-3, "k12v8": 3e-2}
CASES = [
    pytest.param((name, kv), id=f"{name}-{kv}", marks=[] if kv == "f16" and name in OFTEN else pytest.mark.long)
    for name in COMPILED
    for kv in TOLERANCES
    if kv != "k12v8" or name in IN_CODES
]
# Tokens of each prompt in a step, while it has any.
LARGE, SMALL = (64,) * 5, (1, 5, 37, 2, 70)


@pytest.fixture(params=CASES)
def compiled(request: pytest.FixtureRequest, artifact_of: Callable[..., Artifact]) -> tuple[str, Artifact]:
    name, kv_dtype = request.param
    return name, artifact_of(name, kv_dtype)


@pytest.fixture
def rows(compiled: tuple[str, Artifact]) -> Iterator[Rows]:
    artifact = compiled[1]
    runner = ModelRunner(artifact, num_pages=NUM_PAGES, num_state_slots=NUM_SLOTS)
    yield Rows(runner, NUM_PAGES, artifact.manifest.module.max_num_logits)
    runner.close()


def test_prefill_decode_and_ragged_batches_compute_the_same_bits_and_those_of_transformers(
    compiled: tuple[str, Artifact], rows: Rows
) -> None:
    """Cold alone, in large and small chunks beside each other, and warm over pages that another wrote."""
    name, artifact = compiled
    prompts = TinyOutputs.load(name).prompts
    tolerance = TOLERANCES[artifact.manifest.kv.dtype]
    alone = [whole(rows, prompt) for prompt in prompts]
    for prompt, logits in zip(prompts, alone, strict=True):
        assert logits.dtype == np.float32
        assert prompt.distance(logits[prompt.rows]) <= tolerance
    for others in (chunked(rows, prompts, LARGE), chunked(rows, prompts, SMALL)):
        for expected, found in zip(alone, others, strict=True):
            assert np.array_equal(found, expected)
    start, logits = warm(rows, prompts[-1])
    assert np.array_equal(logits, alone[-1][start:])


def test_decode_token_by_token_computes_the_bits_of_prefill(compiled: tuple[str, Artifact], rows: Rows) -> None:
    prompt = TinyOutputs.load(compiled[0]).prompts[-2]
    expected = whole(rows, prompt)
    number = rows.add(prompt.ids)
    found = np.concatenate([rows.step({number: 1})[number] for _ in prompt.ids])
    assert np.array_equal(found, expected)


def whole(rows: Rows, prompt: GoldenPrompt) -> np.ndarray:
    number = rows.add(prompt.ids)
    return rows.step({number: len(prompt.ids)})[number]


def chunked(rows: Rows, prompts: list[GoldenPrompt], chunks: tuple[int, ...]) -> list[np.ndarray]:
    left = {rows.add(prompt.ids): len(prompt.ids) for prompt in prompts}
    parts: dict[int, list[np.ndarray]] = {number: [] for number in left}
    while any(left.values()):
        step = {n: min(chunk, left[n]) for n, chunk in zip(left, chunks, strict=False) if left[n]}
        for number, logits in rows.step(step).items():
            parts[number].append(logits)
            left[number] -= len(logits)
    return [np.concatenate(parts[number]) for number in left]


def warm(rows: Rows, prompt: GoldenPrompt) -> tuple[int, np.ndarray]:
    """The logits from the middle of a prompt on, where the pages before it are another sequence's."""
    first, second = rows.add(prompt.ids), rows.add(prompt.ids)
    start = len(prompt.ids) // 2 // PAGE_SIZE * PAGE_SIZE
    rows.step({first: start})
    shared = rows.rows[first].page_ids[: start // PAGE_SIZE]
    rows.rows[second].page_ids[: len(shared)] = shared
    rows.rows[second].num_computed, rows.rows[second].state = start, rows.rows[first].state
    return start, rows.step({second: len(prompt.ids) - start})[second]
