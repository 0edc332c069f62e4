"""What llama.cpp's converter does to mixtures of experts: their metadata, and stacks of experts that it cuts."""

from __future__ import annotations

from typing import Any

import numpy as np

from .gguf_dense import ARCH, Config, Converter, Tensors, Value, granite, head_dim, hunyuan, permuted, rotary

SOFTMAX, SIGMOID, AFTER_TOP_K = 1, 2, 3  # how scores become weights, `expert_gating_func`


def counts(experts: str, used: str = "num_experts_per_tok", inner: str = "moe_intermediate_size") -> Any:
    """Metadata of all experts, by the names that config.json has for it."""

    def metadata(c: Config) -> dict[str, Value]:
        return {
            "expert_count": c[experts],
            "expert_used_count": c[used],
            "expert_feed_forward_length": c[inner],
        }

    return metadata


def qwen3_moe(c: Config) -> dict[str, Value]:
    return counts("num_experts")(c)


def gpt_oss(c: Config) -> dict[str, Value]:
    found = counts("num_local_experts", inner="intermediate_size")(c)
    return {**found, "attention.sliding_window": c["sliding_window"]}


def gpt_oss_tensors(c: Config, name: str, weight: np.ndarray) -> Tensors:
    """Experts' rows become outputs, and those of gate and up part."""
    if name.endswith("sinks"):
        name += ".weight"
    stem = name.removesuffix("_bias")
    suffix = ".bias" if stem != name else ".weight"
    if suffix == ".weight" and ".experts." in name:
        weight = weight.swapaxes(1, 2)
    if stem.endswith("gate_up_proj"):
        for part, kind in enumerate(("gate", "up")):
            yield stem.replace("gate_up", kind) + suffix, weight[:, part::2]
    elif ".experts." in name:
        yield stem + suffix, weight
    else:
        yield name, weight


def mixtral(c: Config) -> dict[str, Value]:
    found = counts("num_local_experts", inner="intermediate_size")(c)
    return {"rope.dimension_count": head_dim(c), "expert_count": found["expert_count"], "expert_used_count": 2}


def olmoe(c: Config) -> dict[str, Value]:
    return counts("num_experts", inner="intermediate_size")(c)


def granitemoe(c: Config) -> dict[str, Value]:
    return {**granite(c), "expert_count": c["num_local_experts"], "expert_used_count": c["num_experts_per_tok"]}


def granitemoe_tensors(c: Config, name: str, weight: np.ndarray) -> Tensors:
    if name.endswith("input_linear.weight"):
        layer = name.split(".")[2]
        for part, kind in enumerate(("gate", "up")):
            half = c["intermediate_size"]
            yield f"=blk.{layer}.ffn_{kind}_exps.weight", weight[:, part * half : (part + 1) * half]
    else:
        yield from permuted(c, name, weight)


def glm4_moe(c: Config) -> dict[str, Value]:
    return {
        **counts("n_routed_experts")(c),
        **rotary(0.5)(c),
        "expert_shared_count": c["n_shared_experts"],
        "leading_dense_block_count": c["first_k_dense_replace"],
        "expert_gating_func": SIGMOID,
        "expert_weights_scale": c["routed_scaling_factor"],
        "expert_weights_norm": c["norm_topk_prob"],
        "nextn_predict_layers": c["num_nextn_predict_layers"],
        "block_count": c["num_hidden_layers"] + c["num_nextn_predict_layers"],
    }


def ernie4_5_moe(c: Config) -> dict[str, Value]:
    return {
        **counts("moe_num_experts", "moe_k")(c),
        "expert_shared_count": c["moe_num_shared_experts"],
        "expert_shared_feed_forward_length": c["moe_intermediate_size"] * c["moe_num_shared_experts"],
        "leading_dense_block_count": c["moe_layer_start_index"],
        "interleave_moe_layer_step": c["moe_layer_interval"],
    }


def selection_bias(c: Config, name: str, weight: np.ndarray) -> Tensors:
    if name.endswith("e_score_correction_bias"):
        name, weight = name.replace("correction_bias", "correction.bias"), weight.reshape(-1)
    yield name, weight


def hunyuan_moe(c: Config) -> dict[str, Value]:
    return {
        **hunyuan(c),
        "expert_count": c["num_experts"],
        "expert_used_count": c["moe_topk"][0],
        "expert_feed_forward_length": c["moe_intermediate_size"][0],
        "expert_shared_count": c["num_shared_expert"][0],
        "expert_shared_feed_forward_length": c["intermediate_size"],
    }


def minimax_m2(c: Config) -> dict[str, Value]:
    return {
        **counts("num_local_experts", inner="intermediate_size")(c),
        "expert_gating_func": SIGMOID,
        "rope.dimension_count": c["rotary_dim"],
    }


EXPERTS: dict[str, Converter] = {
    "qwen3_moe": Converter(ARCH.QWEN3MOE, qwen3_moe),
    "gpt_oss": Converter(ARCH.GPT_OSS, gpt_oss, gpt_oss_tensors),
    "mixtral": Converter(ARCH.LLAMA, mixtral, permuted),
    "olmoe": Converter(ARCH.OLMOE, olmoe),
    "granitemoe": Converter(ARCH.GRANITE_MOE, granitemoe, granitemoe_tensors),
    "glm4_moe": Converter(ARCH.GLM4_MOE, glm4_moe, selection_bias),
    "ernie4_5_moe": Converter(ARCH.ERNIE4_5_MOE, ernie4_5_moe, selection_bias),
    "hunyuan_v1_moe": Converter(ARCH.HUNYUAN_MOE, hunyuan_moe),
    "minimax_m2": Converter(ARCH.MINIMAXM2, minimax_m2, selection_bias),
}
