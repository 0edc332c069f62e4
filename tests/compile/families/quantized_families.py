"""Tiny families whose matrices are quantized, as each format of the hub has them, and what their numbers are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from ...goldens import tiny_gguf
from ...goldens.families import FAMILIES
from ..conftest import write_safetensors
from ..quantized.checkpoints import FORMATS, GROUP
from ..random_blocks import random_tensor

# What tools that quantize leave in floats.
_IN_FLOATS = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "router", "conv", "in_proj_a.", "in_proj_b.", "gate.wg.")


# How llama.cpp's mixture Q4_K_M stores a model of experts.
Q4_K_M = {
    **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "attn_q.", "attn_k."), Type.Q4_K),
    **dict.fromkeys(("ffn_down_exps", "attn_v.", "token_embd"), Type.Q6_K),
}


def write_k_quants(name: str, path: Path) -> dict[str, np.ndarray]:
    """Write a family of experts, with rows of 256, as Q4_K_M; return the numbers of its tensors, by GGUF's names."""
    tiny = FAMILIES[name]
    tiny = replace(tiny, config={**tiny.config, "hidden_size": 256, "moe_intermediate_size": 256})
    draw = np.random.default_rng(2)

    def drawn(weight: np.ndarray, type_: Type) -> np.ndarray:
        rows = random_tensor(type_.name, draw, (weight.size // weight.shape[-1], weight.shape[-1]), float(weight.std()))
        return rows.reshape(*weight.shape[:-1], -1)

    tiny_gguf.write(tiny, path, Q4_K_M, drawn)
    file = gguf.GGUFReader(path)
    return {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in file.tensors}


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
