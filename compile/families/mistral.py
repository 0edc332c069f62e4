"""Ministral 3 and Mixtral (Mistral AI, 2025 and 2024), and MiniMax M2 (2025), which uses Mixtral's names."""

from __future__ import annotations

from typing import ClassVar

from msgspec.structs import replace
from radixlm.runtime.artifact.model_config import LayerConfig, QKNorm, Rope, Router, Temperature, YarnScaling

from .family import Family
from .settings import Settings


class Mistral3(Family):
    """Ministral 3: queries at far positions get a higher temperature; llama.cpp reorders rows of q and k."""

    title = "Ministral 3 (also Mistral Small 3)"
    huggingface = {
        "Ministral3ForCausalLM": "ministral3",
        "Mistral3ForConditionalGeneration": "mistral3",
    }
    gguf = ("mistral3",)
    defaults = {"rms_norm_eps": 1e-5}
    neighbouring_pairs = ("gguf",)

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return Llama's layer, with a temperature of queries."""
        attention = c.attention(rope=_rope(c), window=c("sliding_window"), temperature=temperature(c))
        return LayerConfig(mixer=attention, ffn=c.dense())


def _rope(c: Settings) -> Rope:
    """Return the rotary positions. A GGUF file combines both `mscale`s into one, which then cancel each other."""
    rope = c.rope()
    if isinstance(rope.scaling, YarnScaling) and c("rope.scaling.yarn_log_multiplier"):
        rope = replace(rope, scaling=replace(rope.scaling, attention_factor=1.0))
    return rope


def temperature(c: Settings) -> Temperature | None:
    """Return the temperature of queries at far positions; None if the model has none."""
    declared = c.rope_parameters()
    beta = declared.get("llama_4_scaling_beta") or c("attention.temperature_scale")
    if not beta:
        return None
    length = declared.get("original_max_position_embeddings", c("max_position_embeddings"))
    return Temperature(beta=beta, original_length=length)


class Mixtral(Family):
    """Mixtral: matrices have the names of Mistral's own format. A GGUF file is read as Llama."""

    title = "Mixtral"
    huggingface = {"MixtralForCausalLM": "mixtral"}
    gguf_of_others: ClassVar[tuple[str, ...]] = ("llama",)
    defaults = {"rms_norm_eps": 1e-5, "rope_theta": 1e6}
    names = {
        "router": "block_sparse_moe.gate.weight",
        "expert_gate": "block_sparse_moe.experts.w1.weight",
        "expert_up": "block_sparse_moe.experts.w3.weight",
        "expert_down": "block_sparse_moe.experts.w2.weight",
    }

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return Mistral's layer, with experts."""
        return LayerConfig(mixer=c.attention(window=c("sliding_window")), ffn=c.experts())


class MiniMaxM2(Mixtral):
    """MiniMax M2: all heads are normalized together; a bias affects the selection of experts only."""

    title = "MiniMax M2"
    huggingface = {"MiniMaxM2ForCausalLM": "minimax_m2"}
    gguf = ("minimax-m2",)
    gguf_of_others = ()
    defaults = {"head_dim": 128, "rope_theta": 5e6, "num_experts_per_tok": 8}
    names = {**Mixtral.names, "selection_bias": "block_sparse_moe.e_score_correction_bias"}
    has_extra_layers = True

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`, which rotates `rotary_dim` elements of a head."""
        router = Router(scores="sigmoid", selection_bias=True)
        # in GGUF, feed_forward_length may be a different number
        size = c.number("moe_intermediate_size", c("intermediate_size"))
        experts = c.experts(intermediate_size=size, router=router)
        return LayerConfig(mixer=c.attention(qk_norm=QKNorm(over="width")), ffn=experts)
