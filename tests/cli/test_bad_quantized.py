"""Quantized checkpoints that cannot be used, by the real command: exit code 2, one line, nothing written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ..compile.conftest import write_safetensors
from .test_bad_input import _refuses_to_compile

K, N = 64, 64
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}


@pytest.fixture
def source(tiny_source: Path, tmp_path: Path) -> Path:
    """A model to break."""
    return Path(shutil.copytree(tiny_source, tmp_path / "model"))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Where to compile to; nothing else is in its folder."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "model.radixlm"


def configure(source: Path, **changes: Any) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changes))


def with_gptq(source: Path, **changes: np.ndarray) -> None:
    """One matrix of GPTQ's, with parts replaced."""
    parts = {
        "qweight": np.zeros((K // 8, N), np.int32),
        "qzeros": np.zeros((K // 32, N // 8), np.int32),
        "scales": np.ones((K // 32, N), np.float16),
    }
    named = {f"model.layers.0.self_attn.q_proj.{part}": array for part, array in (parts | changes).items()}
    write_safetensors(source / "model.safetensors", named)


def to_mlc(source: Path, quantization: str) -> None:
    """MLC's directory of the same model, with one array and its shard."""
    config = json.loads((source / "config.json").read_text())
    architecture = {"model_type": config["model_type"], "quantization": quantization}
    model = config | {"context_window_size": config["max_position_embeddings"]}
    (source / "mlc-chat-config.json").write_text(json.dumps(architecture | {"model_config": model}))
    (source / "config.json").unlink()
    (source / "params_shard_0.bin").write_bytes(bytes(64))
    record = {"name": "a", "shape": [16], "dtype": "float32", "format": "raw", "nbytes": 64, "byteOffset": 0}
    shard = {"dataPath": "params_shard_0.bin", "format": "raw-shard", "nbytes": 64, "records": [record]}
    (source / "tensor-cache.json").write_text(json.dumps({"records": [shard]}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "quip"}, "weights quantized by quip are not read; read are gptq, awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "the original model with --quantize q4 or q8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "AWQ's layout gemv is not read"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not read"),
        (GPTQ | {"bits": 7}, "bits of the quantization is 7"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24' is not read"),
        ("gptq", "a quantization of 'gptq' is not read"),
    ],
)
def test_a_quantization_that_is_not_read(settings: object, said: str, source: Path, output: Path) -> None:
    configure(source, quantization_config=settings)
    assert said in _refuses_to_compile(source, output)


@pytest.mark.parametrize(
    ("file", "settings", "said"),
    [
        ("quantize_config.json", {"bits": 5, "group_size": 32}, "bits of the quantization is 5"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "version": "GEMV"}, "AWQ's layout gemv is not read"),
        ("quant_config.json", {"w_bit": 3, "q_group_size": 128, "version": "GEMM"}, "bits of the quantization is 3"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "W4A8"}}, "ModelOpt's quant_algo 'W4A8' is not read"),
    ],
)
def test_a_quantization_that_is_not_read_in_a_file_of_its_own(
    file: str, settings: object, said: str, source: Path, output: Path
) -> None:
    (source / file).write_text(json.dumps(settings))
    assert said in _refuses_to_compile(source, output)


@pytest.mark.parametrize(
    ("group", "changes", "said"),
    [
        (48, {}, "64 inputs cannot be cut into groups of 48"),
        (64, {}, "scales for 2 groups, 64 inputs in groups of 64 ask for 1"),
        (32, {"qzeros": np.zeros((2, 7), np.int32)}, "qzeros has shape [2, 7]"),
        (32, {"scales": np.ones((2, N, 1), np.float16)}, "2 axes are expected"),
        (32, {"qweight": np.zeros((K // 8, N), np.float32)}, "qweight is stored as F32, not as I32 or U32"),
        (32, {"qweight": np.zeros((0, N), np.int32)}, "qweight has shape [0, 64]"),
    ],
)
def test_gptq_whose_numbers_disagree(
    group: int, changes: dict[str, np.ndarray], said: str, source: Path, output: Path
) -> None:
    configure(source, quantization_config=GPTQ | {"group_size": group})
    with_gptq(source, **changes)
    assert said in _refuses_to_compile(source, output)


def test_a_quantized_matrix_of_another_size_than_the_configuration_says(source: Path, output: Path) -> None:
    configure(source, quantization_config=GPTQ)
    arrays = load_file(source / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    del arrays[f"{name}.weight"]
    arrays[f"{name}.qweight"] = np.zeros((K // 8, 32), np.int32)
    arrays[f"{name}.qzeros"] = np.zeros((K // 32, 4), np.int32)
    arrays[f"{name}.scales"] = np.ones((K // 32, 32), np.float16)
    write_safetensors(source / "model.safetensors", arrays)
    line = _refuses_to_compile(source, output)
    assert "q_proj.weight has shape [32, 64], the configuration asks for [128, 128]" in line


def without_its_shard(source: Path) -> None:
    (source / "params_shard_0.bin").unlink()


def with_half_a_shard(source: Path) -> None:
    os.truncate(source / "params_shard_0.bin", 32)


def without_an_index(source: Path) -> None:
    (source / "tensor-cache.json").unlink()


def with_half_an_index(source: Path) -> None:
    os.truncate(source / "tensor-cache.json", 40)


def without_a_model(source: Path) -> None:
    (source / "mlc-chat-config.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without_its_shard, "params_shard_0.bin is missing"),
        (with_half_a_shard, "params_shard_0.bin has 32 bytes, tensor-cache.json says 64"),
        (without_an_index, "has no tensor-cache.json and no ndarray-cache.json"),
        (with_half_an_index, "tensor-cache.json is no JSON"),
        (without_a_model, "has no model_config"),
    ],
)
def test_an_mlc_directory_that_is_damaged(
    damage: Callable[[Path], None], said: str, source: Path, output: Path
) -> None:
    to_mlc(source, "q4f16_1")
    damage(source)
    assert said in _refuses_to_compile(source, output)


def test_mlc_with_three_bits_says_what_to_take(source: Path, output: Path) -> None:
    to_mlc(source, "q3f16_1")
    line = _refuses_to_compile(source, output)
    assert "q3f16_1 is not read" in line
    assert "take the same model as q4f16_1" in line


def test_mlc_of_an_unknown_rope(source: Path, output: Path) -> None:
    to_mlc(source, "q0f32")
    path = source / "mlc-chat-config.json"
    chat = json.loads(path.read_text())
    chat["model_config"]["rope_scaling"] = {"rope_type": "spiral", "factor": 2.0}
    path.write_text(json.dumps(chat))
    assert "'spiral'" in _refuses_to_compile(source, output)
