"""stories260K, a real 260K-parameter Llama (head_dim 8, intermediate 172), tells the story it is known for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from radixlm.compile.reference import reference_logits
from radixlm.compile.sources import open_source
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.sampling_params import SamplingParams

from ..conftest import CompileOnce


@pytest.fixture(scope="module")
def stories(data_dir: Path) -> Path:
    return data_dir / "models" / "stories260K-hf"


@pytest.fixture(scope="module")
def golden(stories: Path) -> dict[str, list[int]]:
    return json.loads((stories / "golden_greedy.json").read_text())


@pytest.fixture(scope="module", params=["f32", "f16"])
def engine(request: pytest.FixtureRequest, stories: Path, compile_once: CompileOnce) -> Iterator[Engine]:
    with Engine(compile_once(stories, request.param, quantize="f32"), kv_cache_bytes=1 << 24) as engine:
        yield engine


def test_the_numpy_evaluation_tells_the_story(stories: Path, golden: dict[str, list[int]]) -> None:
    ids = golden["prompt_ids"] + golden["greedy_ids"]
    with open_source(stories) as source:
        logits = reference_logits(source.config, lambda name: source.read(name).dequantize(), ids[:-1])
    assert logits.argmax(axis=-1).tolist()[len(golden["prompt_ids"]) - 1 :] == golden["greedy_ids"]


def test_the_artifact_tells_the_story(engine: Engine, golden: dict[str, list[int]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=len(golden["greedy_ids"]), ignore_eos=True)
    completion = engine.generate(golden["prompt_ids"], params)
    assert list(completion.token_ids) == golden["greedy_ids"]
    assert np.all(np.array(completion.prompt_token_ids) == golden["prompt_ids"])


def test_the_story_goes_on_from_any_cut_of_it(engine: Engine, golden: dict[str, list[int]]) -> None:
    ids = golden["prompt_ids"] + golden["greedy_ids"]
    for cut in (2, 16, 17, 60, 110):
        params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        assert list(engine.generate(ids[:cut], params).token_ids) == ids[cut : cut + 10]
