"""What llama.cpp's converter does to Gemma 4, to multi-head latent attention, to Llama 4 and to Muse Glimmer."""

from __future__ import annotations

import numpy as np

from .gguf_dense import ARCH, Config, Converter, Tensors, Value, head_dim, permuted, windows
from .gguf_experts import SIGMOID, SOFTMAX, counts, selection_bias


def gemma4(c: Config) -> dict[str, Value]:
    """Sizes of full layers under the usual keys, those of sliding layers beside them."""
    rope, layers = c["rope_parameters"], range(c["num_hidden_layers"])
    own = c["num_hidden_layers"] - c["num_kv_shared_layers"]
    full, sliding = c["global_head_dim"], c["head_dim"]
    found: dict[str, Value] = {
        **windows(c),
        "attention.shared_kv_layers": c["num_kv_shared_layers"],
        "embedding_length_per_layer_input": c.get("hidden_size_per_layer_input", 0),
        "final_logit_softcapping": c["final_logit_softcapping"],
        "rope.dimension_count": full,
        "rope.dimension_count_swa": sliding,
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
    }
    for kind in ("key", "value"):
        found |= {f"attention.{kind}_length": full, f"attention.{kind}_length_swa": sliding}
    if c["use_double_wide_mlp"]:
        found["feed_forward_length"] = [c["intermediate_size"] * (1 if i < own else 2) for i in layers]
    if c["num_global_key_value_heads"]:
        heads = {"full_attention": c["num_global_key_value_heads"], "sliding_attention": c["num_key_value_heads"]}
        found["attention.head_count_kv"] = [heads[kind] for kind in c["layer_types"]]
    if c.get("enable_moe_block"):
        found |= counts("num_experts", "top_k_experts")(c)
    return found


def gemma4_tensors(c: Config, name: str, weight: np.ndarray) -> Tensors:
    name = name.replace("language_model.", "")
    layer = name.split(".")[2]
    if name.endswith("router.scale"):
        yield f"=blk.{layer}.ffn_gate_inp.scale", weight
    elif name.endswith("per_expert_scale"):
        yield f"=blk.{layer}.ffn_down_exps.scale", weight
    elif name.endswith("layer_scalar") or ".experts." in name:
        yield name + ".weight", weight
    else:
        yield name, weight


def gemma4_factors(c: Config) -> Tensors:
    """Frequencies of full layers are divided by these: those that do not turn, by a huge number."""
    pairs = c["global_head_dim"] // 2
    turning = int(pairs * c["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    yield "=rope_freqs.weight", np.array([1.0] * turning + [1e30] * (pairs - turning), np.float32)


def latent(c: Config) -> dict[str, Value]:
    """One KV head, as wide as the latent vector and the rotated key."""
    wide, rotated = c["kv_lora_rank"], c["qk_rope_head_dim"]
    found: dict[str, Value] = {
        **counts("n_routed_experts")(c),
        "attention.head_count_kv": 1,
        "attention.key_length": wide + rotated,
        "attention.value_length": wide,
        "attention.key_length_mla": c["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": c["v_head_dim"],
        "attention.kv_lora_rank": wide,
        "rope.dimension_count": rotated,
        "leading_dense_block_count": c["first_k_dense_replace"],
        "expert_shared_count": c["n_shared_experts"],
        "expert_weights_scale": c["routed_scaling_factor"],
        "expert_gating_func": SOFTMAX if c.get("scoring_func", "sigmoid") == "softmax" else SIGMOID,
        "expert_group_count": c["n_group"],
        "expert_group_used_count": c["topk_group"],
    }
    if c["q_lora_rank"]:
        found["attention.q_lora_rank"] = c["q_lora_rank"]
    if c["norm_topk_prob"]:
        found["expert_weights_norm"] = True
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    if "mscale_all_dim" in rope:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return found


def latent_tensors(c: Config, name: str, weight: np.ndarray) -> Tensors:
    """What makes keys and values of the latent vector is two stacks of heads, that of keys transposed."""
    if name.endswith("kv_b_proj.weight"):
        heads = weight.reshape(c["num_attention_heads"], -1, weight.shape[-1])
        keys, values = np.split(heads, [c["qk_nope_head_dim"]], axis=1)
        yield name.replace("kv_b", "k_b"), keys.swapaxes(1, 2)
        yield name.replace("kv_b", "v_b"), values
    elif ".experts." in name and not name.endswith(".weight"):
        yield name + ".weight", weight
    else:
        yield from selection_bias(c, name, weight)


def older_latent(c: Config) -> dict[str, Value]:
    """As before April 2025: as many KV heads as heads, which have keys and values of their own."""
    found = latent(c)
    plain, rotated = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    for name in ("key", "value"):
        del found[f"attention.{name}_length_mla"]
    return found | {
        "attention.head_count_kv": c["num_attention_heads"],
        "attention.key_length": plain + rotated,
        "attention.value_length": c["v_head_dim"],
    }


def mistral4(c: Config) -> dict[str, Value]:
    rope = c["rope_parameters"]
    return {
        **latent(c),
        "expert_gating_func": SOFTMAX,
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
        "attention.temperature_length": rope["original_max_position_embeddings"],
    }


def llama4(c: Config) -> dict[str, Value]:
    return {
        **counts("num_local_experts", inner="intermediate_size")(c),
        "feed_forward_length": c["intermediate_size_mlp"],
        "interleave_moe_layer_step": c["interleave_moe_layer_step"],
        "rope.dimension_count": head_dim(c),
    }


def llama4_tensors(c: Config, name: str, weight: np.ndarray) -> Tensors:
    """Experts' rows become outputs, and those of gate and up part."""
    if name.endswith("experts.gate_up_proj"):
        for kind, half in zip(("gate", "up"), np.split(weight.swapaxes(1, 2), 2, axis=1), strict=True):
            yield name.replace("gate_up", kind) + ".weight", half
    elif name.endswith("experts.down_proj"):
        yield name + ".weight", weight.swapaxes(1, 2)
    else:
        yield name, weight


def muse_glimmer(c: Config) -> dict[str, Value]:
    return {
        **windows(c),
        "final_logit_softcapping": c["final_logit_softcapping"],
        "logit_scale": c["output_multiplier"],
        "rope.dimension_count": head_dim(c),
    }


def muse_glimmer_tensors(c: Config, name: str, weight: np.ndarray) -> Tensors:
    """Gains of layers with their one; norms of queries and keys are given gains, queries' with their factor."""
    name = name.replace("language_model.", "")
    if name.endswith("layernorm.weight"):
        weight = weight + np.float32(1)
    yield from permuted(c, name, weight)
    for kind, factor in (("q", c["qk_scale_factor"]), ("k", 1.0)):
        if name.endswith(f"{kind}_proj.weight"):
            yield f"=blk.{name.split('.')[2]}.attn_{kind}_norm.weight", np.full(head_dim(c), factor, np.float32)


OLDER_LATENT = Converter(ARCH.DEEPSEEK2, older_latent, selection_bias)
LATEST: dict[str, Converter] = {
    "gemma4_text": Converter(ARCH.GEMMA4, gemma4, gemma4_tensors, gemma4_factors),
    "gemma4_unified_text": Converter(ARCH.GEMMA4, gemma4, gemma4_tensors, gemma4_factors),
    "deepseek_v2": Converter(ARCH.DEEPSEEK2, latent, latent_tensors),
    "deepseek_v3": Converter(ARCH.DEEPSEEK2, latent, latent_tensors),
    "glm4_moe_lite": Converter(ARCH.DEEPSEEK2, latent, latent_tensors),
    "mistral4": Converter(ARCH.MISTRAL4, mistral4, latent_tensors),
    "llama4_text": Converter(ARCH.LLAMA4, llama4, llama4_tensors),
    "muse_glimmer_text": Converter(ARCH.AFMOE, muse_glimmer, muse_glimmer_tensors, name="muse-glimmer"),
}
