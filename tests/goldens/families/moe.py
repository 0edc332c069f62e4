"""Mixtures of experts: tiny checkpoints as their hub repositories have them, one tensor an expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..tiny_models import Part
from .family import Config, Off, TinyFamily
from .parts import (
    QK_GAIN,
    QK_NORM,
    QKV,
    QKV_BIAS,
    attention,
    config,
    decoder,
    gated_mlp,
    matrix,
    sizes,
    whole,
)

Feed = Callable[[Config, int, str], Iterator[Part]]
GATED = ("gate_proj", "up_proj", "down_proj")
NORMS = ("q_norm", "k_norm")
NUM_EXPERTS = 8
SELECTION_BIAS = Off("selection_bias", tensors={"e_score_correction_bias": 0.0})


def experts(
    *,
    at: str = "mlp.",
    router: str = "gate",
    names: tuple[str, str, str] = GATED,
    inner: str = "moe_intermediate_size",
    shared: str = "",
    selection_bias: str = "",
    bias_shape: tuple[int, ...] = (NUM_EXPERTS,),
    bias_std: float = 0.3,
    first_dense: int = 0,
) -> Feed:
    """A router and NUM_EXPERTS gated MLPs under `at`; the first layers may be dense. Router scores have a std of 1."""

    def parts(c: Config, layer: int, prefix: str) -> Iterator[Part]:
        if layer < first_dense:
            yield from gated_mlp(c, layer, prefix)
            return
        hidden, width = c["hidden_size"], c[inner]
        yield matrix(f"{prefix}{at}{router}", NUM_EXPERTS, hidden)
        if selection_bias:
            yield f"{prefix}{at}{selection_bias}", bias_shape, 0.0, bias_std
        for expert in range(NUM_EXPERTS):
            for name, rows, columns in zip(names, (width, width, hidden), (hidden, hidden, width), strict=True):
                yield matrix(f"{prefix}{at}experts.{expert}.{name}", rows, columns)
        if shared:
            yield from gated_mlp(c, layer, prefix, name=at + shared, inner=width)

    return parts


def _granite_experts(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    hidden, inner, at = c["hidden_size"], c["intermediate_size"], f"{prefix}block_sparse_moe."
    yield matrix(f"{at}router.layer", NUM_EXPERTS, hidden)
    yield f"{at}input_linear.weight", (NUM_EXPERTS, 2 * inner, hidden), 0.0, hidden**-0.5
    yield f"{at}output_linear.weight", (NUM_EXPERTS, hidden, inner), 0.0, inner**-0.5


def _hidden(num_layers: int = 2, kv_heads: int = 2) -> dict[str, Any]:
    return sizes(64, 96, num_layers, 4, kv_heads, 32)


def top(key: str = "num_experts_per_tok") -> Off:
    """One expert less."""
    return Off("experts", config={key: 2})


MOE = (
    TinyFamily(
        "qwen3_moe",
        710,
        config(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            _hidden(),
            attention_bias=False,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            moe_intermediate_size=64,
            norm_topk_prob=True,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=3,
        ),
        parts=decoder(attention(qk_norm=NORMS), experts()),
        offs=(QK_NORM, QK_GAIN, top(), Off("renormalise", config={"norm_topk_prob": False})),
    ),
    TinyFamily(
        "mixtral",
        32,
        config(
            "MixtralForCausalLM",
            "mixtral",
            _hidden(),
            num_local_experts=NUM_EXPERTS,
            num_experts_per_tok=2,
            sliding_window=None,
        ),
        parts=decoder(
            attention(), experts(at="block_sparse_moe.", names=("w1", "w3", "w2"), inner="intermediate_size")
        ),
        offs=(Off("experts", config={"num_experts_per_tok": 3}),),
    ),
    TinyFamily(
        "olmoe",
        33,
        config(
            "OlmoeForCausalLM",
            "olmoe",
            whole(sizes(128, 64, 2, 4, 4, 32)),
            attention_bias=False,
            clip_qkv=None,
            norm_topk_prob=False,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=3,
        ),
        parts=decoder(attention(qk_norm=NORMS, whole_width=True), experts(inner="intermediate_size")),
        offs=(QK_NORM, QK_GAIN, top(), Off("renormalise", config={"norm_topk_prob": True})),
    ),
    TinyFamily(
        "granitemoe",
        1514,
        config(
            "GraniteMoeForCausalLM",
            "granitemoe",
            whole(sizes(128, 64, 2, 4, 2, 32)),
            tie_word_embeddings=True,
            attention_bias=False,
            attention_multiplier=0.25,
            embedding_multiplier=3.0,
            residual_multiplier=0.5,
            logits_scaling=4.0,
            num_local_experts=NUM_EXPERTS,
            num_experts_per_tok=3,
        ),
        parts=decoder(attention(), _granite_experts),
        offs=(
            top(),
            Off("attention_scale", config={"attention_multiplier": 32**-0.5}),
            Off("embedding_factor", config={"embedding_multiplier": 1.0}),
            Off("residual_factor", config={"residual_multiplier": 1.0}),
            Off("logits_factor", config={"logits_scaling": 1.0}),
        ),
    ),
    TinyFamily(
        "glm4_moe",
        155,
        config(
            "Glm4MoeForCausalLM",
            "glm4_moe",
            _hidden(3),
            attention_bias=True,
            first_k_dense_replace=1,
            moe_intermediate_size=64,
            n_group=1,
            n_routed_experts=NUM_EXPERTS,
            n_shared_experts=1,
            norm_topk_prob=True,
            num_experts_per_tok=3,
            num_nextn_predict_layers=0,
            partial_rotary_factor=0.5,
            routed_scaling_factor=1.8,
            topk_group=1,
            use_qk_norm=True,
        ),
        parts=decoder(
            attention(qk_norm=NORMS, biases=QKV),
            experts(shared="shared_experts", selection_bias="gate.e_score_correction_bias", first_dense=1),
        ),
        offs=(
            QK_NORM,
            QKV_BIAS,
            SELECTION_BIAS,
            top(),
            Off("renormalise", config={"norm_topk_prob": False}),
            Off("routed_factor", config={"routed_scaling_factor": 1.0}),
            Off("shared_expert", tensors={r"shared_experts\.down_proj": 0.0}),
            Off("partial_rotary", config={"partial_rotary_factor": 1.0}),
        ),
    ),
    TinyFamily(
        "ernie4_5_moe",
        36,
        config(
            "Ernie4_5_MoeForCausalLM",
            "ernie4_5_moe",
            _hidden(3),
            tie_word_embeddings=True,
            moe_capacity=[64, 64, 64],
            moe_gate="topk",
            moe_intermediate_size=64,
            moe_k=3,
            moe_layer_end_index=2,
            moe_layer_interval=1,
            moe_layer_start_index=1,
            moe_num_experts=NUM_EXPERTS,
            moe_num_shared_experts=1,
            moe_use_aux_free=True,
            use_bias=False,
        ),
        parts=decoder(
            attention(),
            experts(
                shared="shared_experts",
                selection_bias="moe_statics.e_score_correction_bias",
                bias_shape=(1, NUM_EXPERTS),
                bias_std=0.1,
                first_dense=1,
            ),
        ),
        offs=(
            SELECTION_BIAS,
            top("moe_k"),
            Off("pairs", functions={"rotate_half": "llama"}),
            Off("shared_expert", tensors={r"shared_experts\.down_proj": 0.0}),
        ),
    ),
    TinyFamily(
        "hunyuan_v1_moe",
        437,
        config(
            "HunYuanMoEV1ForCausalLM",
            "hunyuan_v1_moe",
            _hidden(),
            tie_word_embeddings=True,
            attention_bias=False,
            moe_intermediate_size=[96, 96],
            moe_topk=[3, 3],
            num_experts=NUM_EXPERTS,
            num_shared_expert=[1, 1],
            use_mixed_mlp_moe=True,
            use_qk_norm=True,
            rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        parts=decoder(
            attention(qk_norm=("query_layernorm", "key_layernorm")),
            experts(router="gate.wg", inner="intermediate_size", shared="shared_mlp"),
        ),
        offs=(
            Off("qk_norm", modules=r"(query|key)_layernorm$"),
            Off("experts", config={"moe_topk": [2, 2]}),
            Off("rope_scaling", config={"rope_scaling": None}),
            Off("shared_expert", tensors={r"shared_mlp\.down_proj": 0.0}),
        ),
    ),
    TinyFamily(
        "minimax_m2",
        798,
        config(
            "MiniMaxM2ForCausalLM",
            "minimax_m2",
            sizes(64, 64, 2, 4, 2, 32),
            num_local_experts=NUM_EXPERTS,
            num_experts_per_tok=3,
            qk_norm_type="per_layer",
            rotary_dim=16,
            scoring_func="sigmoid",
            shared_intermediate_size=0,
            use_qk_norm=True,
            use_routing_bias=True,
        ),
        parts=decoder(
            attention(qk_norm=NORMS, whole_width=True),
            experts(
                at="block_sparse_moe.",
                names=("w1", "w3", "w2"),
                inner="intermediate_size",
                selection_bias="e_score_correction_bias",
            ),
        ),
        offs=(QK_NORM, QK_GAIN, SELECTION_BIAS, top(), Off("partial_rotary", config={"rotary_dim": 32})),
    ),
)
