"""Families whose matrices are quantized, each as the hub has it: what is read of them, and the law of the row."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from radixlm.compile import compile_model
from radixlm.compile.sources import open_source
from radixlm.compile.sources.tensor_files import SafetensorsFile
from radixlm.compile.stored_weights import Quantize
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.model.model_runner import ModelRunner

from ...goldens.families import FAMILIES
from ...goldens.tiny_outputs import TinyOutputs
from ..conftest import write_safetensors
from ..quantized.checkpoints import FORMATS
from ..ragged import Rows
from .conversions import write_mlc
from .quantized_families import write_k_quants, write_quantized
from .test_compiled import LARGE, NUM_PAGES, NUM_SLOTS, SMALL, chunked, warm, whole

# Those whose kinds of weights, or whose ways of putting matrices together, no other has.
LAW: tuple[tuple[str, str, Quantize], ...] = (
    ("qwen3", "gptq sorted", "keep"),
    ("qwen3", "awq", "keep"),
    ("gemma3", "mlx", "keep"),
    ("phi3-short", "gptq sorted", "keep"),
    ("glm4", "gptq sorted", "keep"),
    ("deepseek_v3", "mlx", "keep"),
    ("qwen3_5", "gptq sorted", "keep"),
    ("qwen3_moe", "gptq", "keep"),
    ("qwen3_moe", "gptq sorted", "q8"),
    ("qwen3_moe", "awq", "keep"),
    ("qwen3_moe", "fp8", "keep"),
    ("qwen3_moe", "modelopt nvfp4", "keep"),
    ("qwen3_moe", "compressed-tensors", "keep"),
    ("qwen3_moe", "mlc", "keep"),
    ("qwen3_moe", "Q4_K_M", "keep"),
)


@pytest.mark.parametrize("name", ["phi3-short", "glm4"])
def test_idle_biases_of_matrices_that_are_kept_as_one_are_left_out(name: str, tmp_path: Path) -> None:
    """AutoGPTQ writes zeros as a bias of each matrix, whether the model has biases or not."""
    expected = write_quantized(name, "gptq", tmp_path)
    with open_source(tmp_path) as source:
        gate, up = (source.read_float32(f"model.layers.1.mlp.{part}_proj.weight") for part in ("gate", "up"))
    np.testing.assert_array_equal(np.concatenate([gate, up]), expected["model.layers.1.mlp.gate_up_proj.weight"])


@pytest.mark.parametrize("format_", list(FORMATS))
def test_experts_are_read_in_every_format(format_: str, tmp_path: Path) -> None:
    check_experts(tmp_path, write_quantized("qwen3_moe", format_, tmp_path), rtol=1e-6 if "nvfp4" in format_ else 0)


def test_quantized_experts_are_read_as_mlx_stacks_them(tmp_path: Path) -> None:
    expected = write_quantized("qwen3_moe", "mlx", tmp_path)
    path = tmp_path / "model.safetensors"
    arrays = {name: array[:] for name, array in SafetensorsFile(path).tensors.items()}
    first = [name for name in arrays if ".experts.0." in name]
    count = int(FAMILIES["qwen3_moe"].config["num_experts"])  # type: ignore[call-overload]
    stacks = {
        name.replace(".experts.0.", ".switch_mlp."): np.stack(
            [arrays[name.replace(".experts.0.", f".experts.{i}.")] for i in range(count)]
        )
        for name in first
    }
    write_safetensors(path, {name: array for name, array in arrays.items() if ".experts." not in name} | stacks)
    check_experts(tmp_path, expected)


def test_experts_of_k_quants_are_read(tmp_path: Path) -> None:
    """The file that most people have of such a model: stacks in Q4_K and Q6_K."""
    expected = write_k_quants("qwen3_moe", tmp_path / "x.gguf")
    with open_source(tmp_path / "x.gguf") as source:
        for part in ("gate", "up", "down"):
            name = f"model.layers.1.mlp.experts.{part}_proj.weight"
            stored = expected[f"blk.1.ffn_{part}_exps.weight"]
            assert source.tensors()[name].type == ("Q6_K" if part == "down" else "Q4_K")
            np.testing.assert_allclose(source.read_float32(name), stored, rtol=1e-6, atol=1e-7)


def written(name: str, format_: str, folder: Path) -> Path:
    """A family in a format of `LAW`."""
    if format_ == "mlc":
        return write_mlc(name, folder, "q4f16_1")
    if format_ == "Q4_K_M":
        write_k_quants(name, folder.with_suffix(".gguf"))
        return folder.with_suffix(".gguf")
    write_quantized(name, format_, folder)
    return folder


def check_experts(path: Path, expected: dict[str, np.ndarray], rtol: float = 0.0) -> None:
    """Each expert's numbers are those that were written."""
    with open_source(path) as source:
        stacks = [name for name in source.tensors() if ".experts." in name]
        assert len(stacks) == 3 * source.config.num_hidden_layers
        for name in stacks:
            found = source.read_float32(name)
            each = [expected[name.replace(".experts.", f".experts.{i}.")] for i in range(len(found))]
            np.testing.assert_allclose(found, np.stack(each), rtol=rtol)


@pytest.mark.long
@pytest.mark.parametrize(("name", "format_", "quantize"), LAW, ids=[re.sub(" ", "_", "-".join(each)) for each in LAW])
def test_each_token_has_bits_of_its_own(name: str, format_: str, quantize: Quantize, tmp_path: Path) -> None:
    """Alone, in large and small chunks beside each other, and warm; compilation compares the artifact with NumPy."""
    source = written(name, format_, tmp_path / "source")
    context = FAMILIES[name].context_length
    report = compile_model(source, tmp_path / "x.radixlm", quantize=quantize, context_length=context)
    artifact, prompts = Artifact.open(report.path), TinyOutputs.load(name).prompts
    runner = ModelRunner(artifact, num_pages=NUM_PAGES, num_state_slots=NUM_SLOTS)
    rows = Rows(runner, NUM_PAGES, artifact.manifest.module.max_num_logits)
    alone = [whole(rows, prompt) for prompt in prompts]
    for others in (chunked(rows, prompts, LARGE), chunked(rows, prompts, SMALL)):
        assert all(np.array_equal(found, expected) for found, expected in zip(others, alone, strict=True))
    start, logits = warm(rows, prompts[-1])
    assert np.array_equal(logits, alone[-1][start:])
    runner.close()
