"""Families whose matrices are quantized, each as the hub has it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from radixlm.compile.sources import open_source
from radixlm.compile.sources.safetensors_file import SafetensorsFile

from ...goldens.families import FAMILIES
from ..conftest import write_safetensors
from ..quantized.checkpoints import FORMATS
from .quantized_families import write_quantized


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


def check_experts(path: Path, expected: dict[str, np.ndarray], rtol: float = 0.0) -> None:
    """Each expert's numbers are those that were written."""
    with open_source(path) as source:
        stacks = [name for name in source.tensors() if ".experts." in name]
        assert len(stacks) == 3 * source.config.num_hidden_layers
        for name in stacks:
            found = source.read_float32(name)
            each = [expected[name.replace(".experts.", f".experts.{i}.")] for i in range(len(found))]
            np.testing.assert_allclose(found, np.stack(each), rtol=rtol)
