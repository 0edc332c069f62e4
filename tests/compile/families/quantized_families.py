"""Tiny families whose matrices are quantized, as each format of the hub has them, and what their numbers are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from ...goldens.families import FAMILIES
from ..conftest import write_safetensors
from ..quantized.checkpoints import FORMATS, GROUP

# What tools that quantize leave in floats.
_IN_FLOATS = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "router", "conv", "in_proj_a.", "in_proj_b.", "gate.wg.")


def write_quantized(name: str, format_: str, folder: Path) -> dict[str, np.ndarray]:
    """Write a family with its matrices in a format of `FORMATS`; return the numbers of each, by its name there."""
    tiny, (quantize, settings) = FAMILIES[name], FORMATS[format_]
    tiny.write(folder)
    draw = np.random.default_rng(1)
    arrays: dict[str, np.ndarray] = {}
    expected: dict[str, np.ndarray] = {}
    for tensor, weight in tiny.tensors.items():
        is_matrix = weight.ndim == 2 and tensor.endswith(".weight") and weight.shape[1] % GROUP == 0
        if not is_matrix or any(part in tensor for part in _IN_FLOATS):
            arrays[tensor] = weight
            continue
        parts, expected[tensor] = quantize(draw, weight.shape)
        stem = tensor.removesuffix(".weight")
        if f"{stem}.bias" in tiny.tensors:
            parts.pop(".bias", None)
        arrays |= {stem + ending: part for ending, part in parts.items()}
    write_safetensors(folder / "model.safetensors", arrays)
    config = json.loads((folder / "config.json").read_text())
    key = "quantization" if format_ == "mlx" else "quantization_config"
    (folder / "config.json").write_text(json.dumps(config | {key: settings}))
    return expected
