"""What llama.cpp's converter does to families of which some layers have a state."""

from __future__ import annotations

import numpy as np

from .families.hybrid import lfm2_inner
from .gguf_dense import ARCH, Config, Converter, Tensors, Value, rotary
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


def qwen35(c: Config) -> dict[str, Value]:
    sections = c["rope_parameters"]["mrope_section"]
    return {
        **rotary(0.25)({**c, **c["rope_parameters"]}),
        "rope.dimension_sections": [*sections, 0],
        "full_attention_interval": c["full_attention_interval"],
        "ssm.conv_kernel": c["linear_conv_kernel_dim"],
        "ssm.state_size": c["linear_key_head_dim"],
        "ssm.group_count": c["linear_num_key_heads"],
        "ssm.time_step_rank": c["linear_num_value_heads"],
        "ssm.inner_size": c["linear_num_value_heads"] * c["linear_value_head_dim"],
    }


def tiled(c: Config, weight: np.ndarray, axis: int = 0) -> np.ndarray:
    """Value heads that take turns with those of other key heads, where a key head's were neighbours."""
    keys, heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
    weight = np.moveaxis(weight, axis, 0)
    parts = weight.reshape(keys, heads // keys, weight.shape[0] // heads, *weight.shape[1:])
    return np.moveaxis(parts.swapaxes(0, 1).reshape(weight.shape), 0, axis)


def qwen35_tensors(c: Config, name: str, weight: np.ndarray) -> Tensors:
    """Gains with their one, rates as they are used, value heads in another order."""
    part = name.partition("linear_attn.")[2].removesuffix(".weight")
    layer = name.removeprefix("model.layers.").partition(".")[0]
    if part in ("in_proj_qkv", "conv1d"):
        weight = weight.reshape(len(weight), -1)
        keys, values = np.split(weight, [2 * c["linear_num_key_heads"] * c["linear_key_head_dim"]])
        weight = np.concatenate([keys, tiled(c, values)])
    elif part in ("in_proj_z", "in_proj_a", "in_proj_b", "dt_bias", "A_log"):
        weight = tiled(c, weight)
    elif part == "out_proj":
        weight = tiled(c, weight, axis=1)
    elif name.endswith("norm.weight") and part != "norm":
        weight = weight + np.float32(1)
    if part == "dt_bias":
        name = f"=blk.{layer}.ssm_dt.bias"
    if part == "A_log":
        name, weight = f"=blk.{layer}.ssm_a", -np.exp(weight)
    yield name, weight


HYBRID: dict[str, Converter] = {
    "qwen3_5_text": Converter(ARCH.QWEN35, qwen35, qwen35_tensors),
    "lfm2": Converter(ARCH.LFM2, lfm2, lfm2_tensors),
    "lfm2_moe": Converter(ARCH.LFM2MOE, lfm2_moe, lfm2_tensors),
}
