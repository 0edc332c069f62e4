"""What llama.cpp's converter does to families of which some layers have a state."""

from __future__ import annotations

import numpy as np

from .families.hybrid import lfm2_inner
from .gguf_dense import ARCH, Config, Converter, Tensors, Value
from .gguf_experts import SIGMOID, counts

EXPERTS = {"w1": "gate", "w2": "down", "w3": "up"}


def lfm2(c: Config) -> dict[str, Value]:
    """Layers without attention have no KV heads."""
    kv_heads = c["num_key_value_heads"]
    return {
        "feed_forward_length": lfm2_inner(c),
        "attention.head_count_kv": [0 if kind == "conv" else kv_heads for kind in c["layer_types"]],
        "shortconv.l_cache": c["conv_L_cache"],
    }


def lfm2_moe(c: Config) -> dict[str, Value]:
    return {
        **lfm2(c),
        **counts("num_experts")(c),
        "leading_dense_block_count": c["num_dense_layers"],
        "expert_gating_func": SIGMOID,
    }


def lfm2_tensors(c: Config, name: str, weight: np.ndarray) -> Tensors:
    if name.endswith("conv.conv.weight"):
        weight = weight.squeeze(1)
    layer = name.removeprefix("model.layers.").partition(".")[0]
    if name.endswith("expert_bias"):
        name = f"=blk.{layer}.exp_probs_b.bias"
    if ".experts." in name:
        name = f"=blk.{layer}.ffn_{EXPERTS[name.split('.')[-2]]}_exps.weight"
    yield name, weight


HYBRID: dict[str, Converter] = {
    "lfm2": Converter(ARCH.LFM2, lfm2, lfm2_tensors),
    "lfm2_moe": Converter(ARCH.LFM2MOE, lfm2_moe, lfm2_tensors),
}
