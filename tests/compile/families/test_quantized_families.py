"""Families whose matrices are quantized, each as the hub has it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from radixlm.compile.sources import open_source

from .quantized_families import write_quantized


@pytest.mark.parametrize("name", ["phi3-short", "glm4"])
def test_idle_biases_of_matrices_that_are_kept_as_one_are_left_out(name: str, tmp_path: Path) -> None:
    """AutoGPTQ writes zeros as a bias of each matrix, whether the model has biases or not."""
    expected = write_quantized(name, "gptq", tmp_path)
    with open_source(tmp_path) as source:
        gate, up = (source.read_float32(f"model.layers.1.mlp.{part}_proj.weight") for part in ("gate", "up"))
    np.testing.assert_array_equal(np.concatenate([gate, up]), expected["model.layers.1.mlp.gate_up_proj.weight"])
