"""What llama.cpp's converter does to families of which some layers have a state."""

from __future__ import annotations

import numpy as np

from .families.hybrid import lfm2_inner
from .gguf_dense import ARCH, Config, Converter, Tensors, Value, granite, rotary
from .gguf_experts import SIGMOID, counts, granitemoe_tensors

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


# Of a head, the parts around its layer.
NEXTN = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}


def of_head(c: Config, name: str) -> str:
    """The name of a tensor of a head, which is one more layer in GGUF; others keep theirs."""
    index = c["num_hidden_layers"]
    if name.startswith("mtp.layers.0."):
        return name.replace("mtp.layers.0.", f"model.layers.{index}.")
    return f"=blk.{index}.nextn.{NEXTN[name.split('.')[1]]}.weight" if name.startswith("mtp.") else name


def qwen35(c: Config) -> dict[str, Value]:
    sections = c["rope_parameters"]["mrope_section"]
    num_heads = c.get("mtp_num_hidden_layers", 0)
    return {
        "block_count": c["num_hidden_layers"] + num_heads,
        "nextn_predict_layers": num_heads,
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
    """Gains with their one, rates as they are used, value heads in another order; a head as one more layer."""
    name = of_head(c, name)
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


def qwen35_moe(c: Config) -> dict[str, Value]:
    shared = {"expert_shared_feed_forward_length": c["shared_expert_intermediate_size"]}
    return {**qwen35(c), **counts("num_experts")(c), **shared}


def qwen35_moe_tensors(c: Config, name: str, weight: np.ndarray) -> Tensors:
    """Experts' gates and `up` part."""
    name = of_head(c, name)
    if name.endswith("experts.gate_up_proj"):
        for kind, half in zip(("gate", "up"), np.split(weight, 2, axis=1), strict=True):
            yield name.replace("gate_up", kind) + ".weight", half
    elif name.endswith("experts.down_proj"):
        yield name + ".weight", weight
    else:
        yield from qwen35_tensors(c, name, weight)


def next_tensors(c: Config, name: str, weight: np.ndarray) -> Tensors:
    """What enters the delta rule is cut in two; b and a stay together, and value heads where they are."""
    heads, dim = c["linear_num_key_heads"], c["linear_key_head_dim"]
    layer = name.removeprefix("model.layers.").partition(".")[0]
    if name.endswith("in_proj_qkvz.weight"):
        wide = c["linear_num_value_heads"] // heads * c["linear_value_head_dim"]
        parts = np.split(weight.reshape(heads, -1, weight.shape[1]), [dim, 2 * dim, 2 * dim + wide], axis=1)
        q, k, v, z = (part.reshape(-1, weight.shape[1]) for part in parts)
        yield f"=blk.{layer}.attn_qkv.weight", np.concatenate([q, k, v])
        yield f"=blk.{layer}.attn_gate.weight", z
    elif name.endswith("conv1d.weight"):
        yield name, weight.squeeze(1)
    elif name.endswith("dt_bias"):
        yield f"=blk.{layer}.ssm_dt.bias", weight
    elif name.endswith("A_log"):
        yield f"=blk.{layer}.ssm_a", -np.exp(weight)
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        yield name, weight + np.float32(1)
    else:
        yield name, weight


def granite4_h(c: Config) -> dict[str, Value]:
    """Layers without attention have no KV heads; rotary positions are declared by a key of scaling."""
    kv_heads = c["num_key_value_heads"]
    found: dict[str, Value] = {
        **granite(c),
        "attention.head_count_kv": [kv_heads if kind == "full_attention" else 0 for kind in c["layer_types"]],
        "rope.scaling.finetuned": c["position_embedding_type"] == "rope",
        "ssm.conv_kernel": c["mamba_d_conv"],
        "ssm.state_size": c["mamba_d_state"],
        "ssm.group_count": c["mamba_n_groups"],
        "ssm.time_step_rank": c["mamba_n_heads"],
        "ssm.inner_size": c["mamba_n_heads"] * c["mamba_d_head"],
    }
    if c["num_local_experts"]:
        found["expert_count"], found["expert_used_count"] = c["num_local_experts"], c["num_experts_per_tok"]
        found["expert_shared_feed_forward_length"] = c["shared_intermediate_size"]
    else:
        found["feed_forward_length"] = c["shared_intermediate_size"]
    return found


def granite4_h_tensors(c: Config, name: str, weight: np.ndarray) -> Tensors:
    """Matrices of gates and `up` are cut."""
    layer = name.removeprefix("model.layers.").partition(".")[0]
    shared = "_shexp" if c["num_local_experts"] else ""
    if name.endswith("shared_mlp.input_linear.weight"):
        for kind, half in zip(("gate", "up"), np.split(weight, 2), strict=True):
            yield f"=blk.{layer}.ffn_{kind}{shared}.weight", half
    elif name.endswith("shared_mlp.output_linear.weight"):
        yield f"=blk.{layer}.ffn_down{shared}.weight", weight
    elif ".mamba." in name:
        yield from mamba_tensors(c, name, weight)
    else:
        yield from granitemoe_tensors(c, name, weight)


def mamba_tensors(c: Config, name: str, weight: np.ndarray) -> Tensors:
    """Rates are as they are used, and one number of a head is a row."""
    layer = name.removeprefix("model.layers.").partition(".")[0]
    part = name.partition("mamba.")[2].removesuffix(".weight")
    if part == "conv1d":
        yield name, weight.squeeze(1)
    elif part in ("A_log", "D"):
        ending = {"A_log": "ssm_a", "D": "ssm_d"}[part]
        yield f"=blk.{layer}.{ending}", (-np.exp(weight) if part == "A_log" else weight)[:, None]
    elif part == "dt_bias":
        yield f"=blk.{layer}.ssm_dt.bias", weight
    elif part == "norm":
        yield name, weight.reshape(c["mamba_n_groups"], -1)
    else:
        yield name, weight


def nemotron_h(c: Config) -> dict[str, Value]:
    """Layers have no MLP, no KV heads or neither of both."""
    kinds, kv_heads, inner = c["layers_block_type"], c["num_key_value_heads"], c["intermediate_size"]
    return {
        "feed_forward_length": [inner if kind == "mlp" else 0 for kind in kinds],
        "attention.head_count_kv": [kv_heads if kind == "full_attention" else 0 for kind in kinds],
        "attention.layer_norm_epsilon": c["layer_norm_epsilon"],
        "attention.key_length": c["head_dim"],
        "attention.value_length": c["head_dim"],
        "rope.dimension_count": c["head_dim"],
        "ssm.conv_kernel": c["conv_kernel"],
        "ssm.state_size": c["ssm_state_size"],
        "ssm.group_count": c["n_groups"],
        "ssm.time_step_rank": c["mamba_num_heads"],
        "ssm.inner_size": c["mamba_num_heads"] * c["mamba_head_dim"],
    }


def nemotron_h_moe(c: Config) -> dict[str, Value]:
    """Layers that have experts say so by a size, as those with an MLP do."""
    kinds, inner = c["layers_block_type"], c["moe_intermediate_size"]
    return {
        **nemotron_h(c),
        "feed_forward_length": [inner if kind == "moe" else 0 for kind in kinds],
        "expert_count": c["n_routed_experts"],
        "expert_used_count": c["num_experts_per_tok"],
        "expert_feed_forward_length": inner,
        "expert_shared_feed_forward_length": c["moe_shared_expert_intermediate_size"],
        "expert_shared_count": c["n_shared_experts"],
        "expert_group_count": c["n_group"],
        "expert_weights_norm": c["norm_topk_prob"],
        "expert_weights_scale": c["routed_scaling_factor"],
    }


NEMOTRON_PARTS = {
    **{f"mixer.{kind}_proj.weight": f"attn_{kind}.weight" for kind in "qkv"},
    "mixer.o_proj.weight": "attn_output.weight",
    "mixer.up_proj.weight": "ffn_up.weight",
    "mixer.down_proj.weight": "ffn_down.weight",
    "mixer.in_proj.weight": "ssm_in.weight",
    "mixer.out_proj.weight": "ssm_out.weight",
    "mixer.conv1d.weight": "ssm_conv1d.weight",
    "mixer.conv1d.bias": "ssm_conv1d.bias",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.norm.weight": "ssm_norm.weight",
    "norm.weight": "attn_norm.weight",
    "mixer.gate.weight": "ffn_gate_inp.weight",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"mixer.experts.{kind}_proj.weight": f"ffn_{kind}_exps.weight" for kind in ("up", "down")},
    **{f"mixer.shared_experts.{kind}_proj.weight": f"ffn_{kind}_shexp.weight" for kind in ("up", "down")},
}


def nemotron_h_tensors(c: Config, name: str, weight: np.ndarray) -> Tensors:
    """Rates are as they are used, and one number of a head is a row."""
    if not name.startswith("backbone.layers."):
        ends = {"backbone.embeddings.weight": "token_embd", "backbone.norm_f.weight": "output_norm"}
        yield f"={ends.get(name, 'output')}.weight", weight
        return
    layer, part = name.removeprefix("backbone.layers.").split(".", 1)
    if part == "mixer.conv1d.weight":
        weight = weight.squeeze(1)
    elif part in ("mixer.A_log", "mixer.D"):
        weight = (-np.exp(weight) if part == "mixer.A_log" else weight)[:, None]
    elif part == "mixer.norm.weight":
        weight = weight.reshape(c["n_groups"], -1)
    yield f"=blk.{layer}.{NEMOTRON_PARTS[part]}", weight


def falcon_h1(c: Config) -> dict[str, Value]:
    """Multipliers are in the weights."""
    return {
        "ssm.conv_kernel": c["mamba_d_conv"],
        "ssm.state_size": c["mamba_d_state"],
        "ssm.group_count": c["mamba_n_groups"],
        "ssm.time_step_rank": c["mamba_n_heads"],
        "ssm.inner_size": c["mamba_d_ssm"],
    }


def falcon_h1_tensors(c: Config, name: str, weight: np.ndarray) -> Tensors:
    """All that is multiplied before or behind a matrix is so in the matrix."""
    part = name.removesuffix(".weight").rpartition(".")[2]
    before = c["attention_in_multiplier"]
    factors = {
        "q_proj": before,
        "k_proj": before * c["key_multiplier"],
        "v_proj": before,
        "o_proj": c["attention_out_multiplier"],
        "out_proj": c["ssm_out_multiplier"],
        "gate_proj": c["mlp_multipliers"][0],
        "down_proj": c["mlp_multipliers"][1],
        "embed_tokens": c["embedding_multiplier"],
        "lm_head": c["lm_head_multiplier"],
    }
    if part in factors:
        weight = weight * np.float32(factors[part])
    elif part == "in_proj":
        width, keys = c["mamba_d_ssm"], c["mamba_n_groups"] * c["mamba_d_state"]
        of_parts = np.repeat(np.float32(c["ssm_multipliers"]), (width, width, keys, keys, c["mamba_n_heads"]))
        weight = weight * (of_parts * np.float32(c["ssm_in_multiplier"]))[:, None]
    if part == "pre_ff_layernorm":  # its name has no ending there
        yield f"=blk.{name.split('.')[2]}.ffn_norm", weight
    else:
        yield from mamba_tensors(c, name, weight)


HYBRID: dict[str, Converter] = {
    "qwen3_5_text": Converter(ARCH.QWEN35, qwen35, qwen35_tensors),
    "qwen3_5_moe_text": Converter(ARCH.QWEN35MOE, qwen35_moe, qwen35_moe_tensors),
    "qwen3_next": Converter(ARCH.QWEN3NEXT, qwen35_moe, next_tensors),
    "granitemoehybrid": Converter(ARCH.GRANITE_HYBRID, granite4_h, granite4_h_tensors),
    "falcon_h1": Converter(ARCH.FALCON_H1, falcon_h1, falcon_h1_tensors),
    "nemotron_h with experts": Converter(ARCH.NEMOTRON_H_MOE, nemotron_h_moe, nemotron_h_tensors),
    "nemotron_h": Converter(ARCH.NEMOTRON_H, nemotron_h, nemotron_h_tensors),
    "lfm2": Converter(ARCH.LFM2, lfm2, lfm2_tensors),
    "lfm2_moe": Converter(ARCH.LFM2MOE, lfm2_moe, lfm2_tensors),
}
