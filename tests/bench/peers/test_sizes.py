"""Shapes of real models: their files are what published ones are, but for what the numbers are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from radixlm.compile.sources.gguf_file import GGUFFile

from bench.peers.random_blocks import BLOCKS
from bench.peers.scenarios import SIZE_FIGURES, SIZES
from bench.peers.shapes import SHAPES, write_shape
from bench.peers.sizes import DEFAULT_SHAPES, fitting_layers, select_scenarios

PUBLISHED_GB = {"qwen3-1.7b": 1.10, "qwen3-4b": 2.50, "qwen3-8b": 5.03, "qwen3-30b-a3b": 18.6, "gpt-oss-20b": 12.1}
PUBLISHED_GB |= {"qwen3-embedding-0.6b": 0.639, "qwen3-reranker-0.6b": 0.639}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_as_many_bytes_as_the_published_file(name: str) -> None:
    """To 4 %: of Qwen3-8B's embedding llama.cpp's tool makes less."""
    assert SHAPES[name].num_bytes / 1e9 == pytest.approx(PUBLISHED_GB[name], rel=0.04)


@pytest.mark.parametrize("type", BLOCKS, ids=lambda type: type.name)
def test_weights_have_the_spread_that_is_asked_for(type: Type) -> None:
    deviation = 0.02
    blocks = BLOCKS[type](np.random.default_rng(0), 2000, deviation)
    values = gguf.quants.dequantize(np.ascontiguousarray(blocks), type) if type is not Type.F32 else blocks.view("<f4")
    assert values.std() == pytest.approx(deviation, rel=0.5)
    assert abs(values.mean()) < 0.15 * deviation


@pytest.mark.parametrize("name", ["qwen3-4b", "qwen3-30b-a3b", "gpt-oss-20b", "qwen3-reranker-0.6b"])
def test_a_file_is_read_as_its_architecture(name: str, tmp_path: Path) -> None:
    narrow = {"hidden_size": 256, "intermediate_size": 256, "num_heads": 4, "num_kv_heads": 2}
    shape = dataclasses.replace(SHAPES[name], num_layers=1, **narrow)
    write_shape(shape, tmp_path / "model.gguf")
    file = GGUFFile(tmp_path / "model.gguf")
    assert {tensor.name for tensor in shape.tensors()} == set(file.tensors)
    assert file.metadata["general.architecture"] == shape.architecture
    assert len(file.metadata["tokenizer.ggml.tokens"]) == shape.vocab_size
    file.close()


def test_decode_reads_active_experts_alone() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    dense = dataclasses.replace(shape, num_active=shape.num_experts)
    assert shape.bytes_per_token < dense.bytes_per_token / 5
    outer = shape.with_layers(0).bytes_per_token
    assert outer < shape.num_bytes / 50  # one of both tables
    one, two = (shape.with_layers(num).bytes_per_token - outer for num in (24, 48))
    assert two == pytest.approx(2 * one, rel=0.02)


def test_models_are_whole_where_memory_holds_them() -> None:
    layers = [fitting_layers(SHAPES[name], 24 << 30) for name in DEFAULT_SHAPES]
    assert layers[0] == 36 and 12 < layers[1] < 48 and 12 < layers[2] <= 24
    assert fitting_layers(SHAPES["qwen3-4b"], 1 << 30) == 1


def test_the_longest_prompts_are_asked_for() -> None:
    every = {each.name for each in SIZES.scenarios}
    assert {each.name for each in select_scenarios([], is_long=False).scenarios} == every - {"prefill_32000"}
    assert {each.name for each in select_scenarios([], is_long=True).scenarios} == every
    assert [each.name for each in select_scenarios(["requests_8", "prefill_512"], is_long=False).scenarios] == [
        "prefill_512",
        "requests_8",
    ]


def test_every_scenario_has_a_row() -> None:
    assert {each.name for each in SIZES.scenarios} <= {figure.name for figure in SIZE_FIGURES}
