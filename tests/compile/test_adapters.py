"""LoRA adapters in compiled models: what transformers computes of them, and the same bits however rows are batched.

A row's logits are a function of its sequence and its adapter. A row without an adapter has the bits of an artifact
that has no room for any, whatever its neighbours have.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.compile.compiler import CompileOptions
from radixlm.compile.families.registry import model_config
from radixlm.compile.lora_layout import lora_layout
from radixlm.compile.sources.huggingface import huggingface_settings
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.errors import EngineError, InvalidParameter
from radixlm.runtime.lora.adapters import Adapters
from radixlm.runtime.model.batch import NO_ADAPTER, Batch
from radixlm.runtime.model.model_runner import ModelRunner

from ..conftest import CompileOnce
from ..goldens.adapter_outputs import load_adapter_golden
from ..goldens.families import FAMILIES
from ..goldens.tiny_adapters import ADAPTERS, TinyAdapter
from .ragged import Rows

NUM_PAGES, MAX_LORAS = 61, 4
TOLERANCE = 1e-4  # of the standard deviation of the golden's logits
Open = Callable[..., ModelRunner]


@pytest.fixture(scope="module")
def open_runner(compile_once: CompileOnce, tmp_path_factory: pytest.TempPathFactory) -> Open:
    """`open_runner(model, quantize, max_loras)`: a runner of a tiny model that is compiled once."""

    @cache
    def artifact(model: str, quantize: str, max_loras: int) -> Artifact:
        tiny = TinyAdapter(model).tiny
        source = tiny.write(tmp_path_factory.mktemp("sources") / model)
        length = tiny.context_length
        return Artifact.open(compile_once(source, "f32", quantize=quantize, context_length=length, max_loras=max_loras))

    def opened(model: str, quantize: str = "f32", max_loras: int = MAX_LORAS) -> ModelRunner:
        return ModelRunner(artifact(model, quantize, max_loras), num_pages=NUM_PAGES, num_threads=1)

    return opened


def load(runner: ModelRunner, files: dict[str, Path]) -> Adapters:
    assert runner.adapters is not None
    return Adapters(files, runner.adapters)


# a GGUF adapter has one alpha, and no square roots of ranks
IN_GGUF = [name for name, adapter in ADAPTERS.items() if not adapter.ranks and not adapter.rslora]


@pytest.mark.parametrize(
    ("name", "format_"), [*((name, "peft") for name in ADAPTERS), *((name, "gguf") for name in IN_GGUF)]
)
def test_an_adapted_model_computes_what_transformers_computes(
    name: str, format_: str, open_runner: Open, tmp_path: Path
) -> None:
    adapter = ADAPTERS[name]
    digest, golden = load_adapter_golden(name)
    assert digest == adapter.tiny.digest()
    runner = open_runner(adapter.model)
    file = adapter.write_peft(tmp_path / "a") if format_ == "peft" else adapter.write_gguf(tmp_path / "a.gguf")
    index = load(runner, {"a": file}).named("a").index
    rows = Rows(runner, NUM_PAGES)
    adapted, plain = rows.add(golden.ids, index), rows.add(golden.ids)
    count = len(golden.ids)
    found = rows.step({plain: count, adapted: count})
    assert golden.distance(found[adapted][golden.rows]) < TOLERANCE
    assert golden.distance(found[plain][golden.rows]) > 100 * TOLERANCE  # the golden sees the adapter
    runner.close()


@pytest.mark.parametrize(("model", "quantize"), [("llama", "q8"), ("gemma3", "f32"), ("qwen2", "q4")])
def test_a_row_depends_on_its_sequence_and_its_adapter_alone(
    model: str, quantize: str, open_runner: Open, tmp_path: Path
) -> None:
    runner, plain = open_runner(model, quantize), open_runner(model, quantize, 0)
    files = {str(seed): TinyAdapter(model, seed).write_peft(tmp_path / str(seed)) for seed in range(3)}
    load(runner, files)
    vocab_size = TinyAdapter(model).tiny.vocab_size
    draw = np.random.default_rng(0)
    ids = [draw.integers(3, vocab_size, 40).tolist() for _ in range(2)]
    alone = {}
    for adapter in (NO_ADAPTER, 0, 1, 2):
        for sequence, tokens in enumerate(ids):
            rows = Rows(plain if adapter == NO_ADAPTER else runner, NUM_PAGES)
            alone[adapter, sequence] = rows.step({rows.add(tokens, adapter): len(tokens)})[0]
    assert not np.array_equal(alone[0, 0], alone[1, 0])

    @settings(max_examples=12, deadline=None)
    @given(
        st.lists(st.tuples(st.sampled_from([NO_ADAPTER, 0, 1, 2]), st.integers(0, 1)), min_size=1, max_size=9),
        st.lists(st.lists(st.integers(0, 20), min_size=9, max_size=9), min_size=1, max_size=4),
    )
    def check(sequences: list[tuple[int, int]], steps: list[list[int]]) -> None:
        rows = Rows(runner, NUM_PAGES)
        numbers = [rows.add(ids[sequence], adapter) for adapter, sequence in sequences]
        for counts in steps:
            taken = {}
            for number, count in zip(numbers, counts, strict=False):
                left = len(ids[0]) - rows.rows[number].num_computed
                if min(count, left):
                    taken[number] = min(count, left)
            starts = {number: rows.rows[number].num_computed for number in taken}
            for number, logits in (rows.step(taken) if taken else {}).items():
                expected = alone[sequences[number]][starts[number] : starts[number] + taken[number]]
                assert np.array_equal(logits, expected)

    check()
    runner.close()
    plain.close()


def test_a_batch_with_adapters_needs_room_and_adapters_that_are_there(open_runner: Open) -> None:
    plain, runner = open_runner("llama", "f32", 0), open_runner("llama")
    batch = Batch.of_zeros(0, 4, [0])
    for index, of in ((0, plain), (MAX_LORAS, runner), (-2, runner)):
        batch.adapters = np.full(4, index, np.int32)
        with pytest.raises(EngineError, match="adapters"):
            of.forward(batch)
    batch.adapters = np.zeros(3, np.int32)
    with pytest.raises(EngineError, match=r"adapters are int32 \(3,\); int32 \(4,\) is needed"):
        runner.forward(batch)
    runner.close()
    plain.close()


@pytest.mark.parametrize(
    ("name", "why"), [("mixtral", "experts"), ("qwen3_5", "layers without plain attention"), ("lfm2", "layers without")]
)
def test_models_whose_layers_adapters_cannot_change_are_refused(name: str, why: str) -> None:
    config = model_config(huggingface_settings(name, FAMILIES[name].config))
    with pytest.raises(InvalidParameter, match=f"max_loras is 2, and LoRA adapters are for .*; .* has {why}"):
        lora_layout(config, 2, 16)


@pytest.mark.parametrize("options", [{"max_loras": -1}, {"max_loras": 257}, {"max_lora_rank": 0}])
def test_room_is_limited(options: dict[str, int]) -> None:
    with pytest.raises(InvalidParameter, match=f"{next(iter(options))} is "):
        CompileOptions(**options).check()  # type: ignore[arg-type]
