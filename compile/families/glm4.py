"""GLM-4 (Z.ai, 2025): GLM-4-0414 is dense, GLM-4.5 to 4.7 have experts. They rotate half of each head."""

from __future__ import annotations

from collections.abc import Mapping

from radixlm.runtime.artifact.model_config import LayerConfig, QKNorm, Router, SharedExpert

from ..layers.decoder import Decoder
from .family import Family, Format, Views, split_gate_up
from .settings import Settings


class Glm4(Family):
    """GLM-4-0414: neighbours rotate; norms are around each branch; gates and `up` are one matrix."""

    title = "GLM-4"
    huggingface = {"Glm4ForCausalLM": "glm4"}
    gguf = ("glm4",)
    defaults = {"head_dim": 128, "rms_norm_eps": 1.5625e-07, "attention_bias": True, "partial_rotary_factor": 0.5}
    names = {
        "attention_post_norm": "post_self_attn_layernorm.weight",
        "ffn_post_norm": "post_mlp_layernorm.weight",
    }
    neighbouring_pairs = ("huggingface", "gguf")

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`; queries, keys and values have biases if the model says so."""
        bias = c.has_bias("attn_q", otherwise=bool(c("attention_bias")))
        return LayerConfig(mixer=c.attention(bias=bias), ffn=c.dense(), norms="sandwich")

    def fused(self, decoder: Decoder, format_: Format) -> Mapping[str, Views]:
        """Return views of gates and `up`, which llama.cpp's files join; the source splits those of checkpoints."""
        return dict(split_gate_up(decoder)) if format_ == "gguf" else {}


class Glm4MoE(Family):
    """GLM-4.5 to 4.7: the first layers are dense; layers after the last draft further tokens, and are left out."""

    title = "GLM-4.5 to 4.7 (MoE)"
    huggingface = {"Glm4MoeForCausalLM": "glm4_moe"}
    gguf = ("glm4moe",)
    defaults = {
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
    }
    names = {
        "shared_gate": "mlp.shared_experts.gate_proj.weight",
        "shared_up": "mlp.shared_experts.up_proj.weight",
        "shared_down": "mlp.shared_experts.down_proj.weight",
    }
    gguf_names = {"ffn_norm": "post_attention_norm.weight"}
    has_extra_layers = True

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`, with DeepSeek V3's router and groups of experts."""
        has_norms = "blk.0.attn_q_norm.weight" in c.stored or bool(c("use_qk_norm"))
        attention = c.attention(
            bias=c.has_bias("attn_q", otherwise=bool(c("attention_bias"))), qk_norm=QKNorm() if has_norms else None
        )
        if index < c.number("first_k_dense_replace", 0):
            return LayerConfig(mixer=attention, ffn=c.dense())
        router = Router(
            scores="sigmoid",
            selection_bias=True,
            num_groups=c("n_group", 1) or 1,
            num_active_groups=c("topk_group", 1) or 1,
            renormalise=c("norm_topk_prob", True),
            scale=c("routed_scaling_factor", 1.0),
        )
        num_shared = c("n_shared_experts", 0)
        shared = SharedExpert(intermediate_size=c.number("moe_intermediate_size") * num_shared) if num_shared else None
        return LayerConfig(mixer=attention, ffn=c.experts(router=router, shared=shared))
