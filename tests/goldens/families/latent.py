"""Multi-head latent attention: DeepSeek V2 and V3, GLM-4.7-Flash, Mistral Small 4."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..tiny_models import Part
from .family import Config, Off, TinyFamily
from .moe import NUM_EXPERTS, SELECTION_BIAS, experts, top
from .parts import SCORE, YARN, config, decoder, gain, gated_mlp, matrix, sizes, whole


def _attention(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    """Queries, perhaps through a narrow layer; keys and values out of one latent vector; one rotated key for all."""
    hidden, heads, latent = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    plain, rotated, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    at = f"{prefix}self_attn."
    if narrow := c["q_lora_rank"]:
        yield matrix(f"{at}q_a_proj", narrow, hidden)
        yield gain(f"{at}q_a_layernorm", narrow)
        yield matrix(f"{at}q_b_proj", heads * (plain + rotated), narrow, SCORE)
    else:
        yield matrix(f"{at}q_proj", heads * (plain + rotated), hidden, SCORE)
    yield matrix(f"{at}kv_a_proj_with_mqa", latent + rotated, hidden, SCORE)
    yield gain(f"{at}kv_a_layernorm", latent)
    yield matrix(f"{at}kv_b_proj", heads * (plain + value), latent, SCORE)
    yield matrix(f"{at}o_proj", hidden, heads * value, 0.4)


def _mistral4_experts(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    hidden, inner, at = c["hidden_size"], c["moe_intermediate_size"], f"{prefix}mlp."
    yield matrix(f"{at}gate", NUM_EXPERTS, hidden)
    yield f"{at}experts.gate_up_proj", (NUM_EXPERTS, 2 * inner, hidden), 0.0, hidden**-0.5
    yield f"{at}experts.down_proj", (NUM_EXPERTS, hidden, inner), 0.0, inner**-0.5
    yield from gated_mlp(c, layer, prefix, name="mlp.shared_experts", inner=inner)


def _config(architecture: str, model_type: str, layers: int, **changes: Any) -> dict[str, Any]:
    return config(
        architecture,
        model_type,
        whole(sizes(64, 96, layers, 4, 4, 0)),
        attention_bias=False,
        first_k_dense_replace=1,
        kv_lora_rank=64,
        moe_intermediate_size=64,
        n_routed_experts=NUM_EXPERTS,
        n_shared_experts=1,
        num_experts_per_tok=3,
        q_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        **changes,
    )


DEEPSEEK_YARN = {**YARN, "type": "yarn", "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}
KV_NORM = Off("latent_norm", modules=r"kv_a_layernorm$")
Q_NORM = Off("query_norm", modules=r"q_a_layernorm$")
SHARED_EXPERT = Off("shared_expert", tensors={r"shared_experts\.down_proj": 0.0})
SCALING = Off("rope_scaling", config={"rope_scaling": None})
MSCALE = Off("mscale", config={"rope_scaling": {**DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 0.0}})
ROUTED = Off("routed_factor", config={"routed_scaling_factor": 1.0})
PAIRS = Off("pairs", config={"rope_interleave": False})
RENORMALISE = Off("renormalise", config={"norm_topk_prob": False})
V3_EXPERTS = experts(shared="shared_experts", selection_bias="gate.e_score_correction_bias", first_dense=1)


def _deepseek_v2(name: str, seed: int, q_lora_rank: int | None, no_witness: str = "") -> TinyFamily:
    """Lite has no narrow layer before its queries."""
    return TinyFamily(
        name,
        seed,
        _config(
            "DeepseekV2ForCausalLM",
            "deepseek_v2",
            3,
            moe_layer_freq=1,
            n_group=1,
            norm_topk_prob=False,
            rope_scaling=DEEPSEEK_YARN,
            routed_scaling_factor=1.0,
            scoring_func="softmax",
            topk_group=1,
            topk_method="greedy",
        )
        | {"q_lora_rank": q_lora_rank},
        parts=decoder(_attention, experts(shared="shared_experts", first_dense=1)),
        offs=(KV_NORM, SHARED_EXPERT, SCALING, MSCALE, top(), *((Q_NORM,) if q_lora_rank else ())),
        no_witness=no_witness,
    )


LATENT = (
    _deepseek_v2("deepseek_v2", 980, 64),
    _deepseek_v2("deepseek_v2-lite", 865, None, "llama.cpp takes a model for V2-Lite by its 26 or 27 layers"),
    TinyFamily(
        "deepseek_v2-groups",
        581,
        _config(
            "DeepseekV2ForCausalLM",
            "deepseek_v2",
            3,
            moe_layer_freq=1,
            n_group=4,
            norm_topk_prob=False,
            routed_scaling_factor=2.0,
            scoring_func="softmax",
            topk_group=2,
            topk_method="group_limited_greedy",
        ),
        parts=decoder(_attention, experts(shared="shared_experts", first_dense=1)),
        offs=(KV_NORM, Q_NORM, ROUTED, Off("groups", config={"topk_method": "greedy"})),
        no_witness="llama.cpp ranks groups by their two best experts, as V3 does, V2 by the best",
    ),
    TinyFamily(
        "deepseek_v3",
        222,
        _config(
            "DeepseekV3ForCausalLM",
            "deepseek_v3",
            3,
            moe_layer_freq=1,
            n_group=4,
            norm_topk_prob=True,
            num_nextn_predict_layers=0,
            rope_scaling={**DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            routed_scaling_factor=1.8,
            scoring_func="sigmoid",
            topk_group=2,
            topk_method="noaux_tc",
        ),
        parts=decoder(_attention, V3_EXPERTS, embedding=3.0),
        offs=(
            KV_NORM,
            Q_NORM,
            SELECTION_BIAS,
            SHARED_EXPERT,
            ROUTED,
            RENORMALISE,
            SCALING,
            PAIRS,
            top(),
            Off("groups", config={"topk_group": 4}),
        ),
    ),
    TinyFamily(
        "glm4_moe_lite",
        223,
        _config(
            "Glm4MoeLiteForCausalLM",
            "glm4_moe_lite",
            3,
            n_group=1,
            norm_topk_prob=True,
            num_nextn_predict_layers=0,
            partial_rotary_factor=1.0,
            rms_norm_eps=3e-4,  # shows that latent norms have another, and llama.cpp, which has none, is not far
            rope_scaling=None,
            routed_scaling_factor=1.8,
            topk_group=1,
            topk_method="noaux_tc",
        ),
        parts=decoder(_attention, V3_EXPERTS),
        offs=(KV_NORM, Q_NORM, SELECTION_BIAS, SHARED_EXPERT, ROUTED, RENORMALISE, PAIRS, top()),
    ),
    TinyFamily(
        "mistral4",
        184,
        _config(
            "Mistral4ForCausalLM",
            "mistral4",
            2,
            n_group=1,
            norm_topk_prob=True,
            rope_interleave=True,
            rope_parameters={
                **YARN,
                "type": "yarn",
                "rope_theta": 10000.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
            routed_scaling_factor=1.0,
            topk_group=1,
        )
        | {"first_k_dense_replace": 0, "head_dim": 48},
        parts=decoder(_attention, _mistral4_experts, embedding=3.0),
        offs=(
            KV_NORM,
            Q_NORM,
            SHARED_EXPERT,
            RENORMALISE,
            PAIRS,
            top(),
            Off("temperature", config={"rope_parameters|llama_4_scaling_beta": 0.0}),
            Off("rope_scaling", config={"rope_parameters|factor": 1.0}),
        ),
    ),
)
