"""Qwen3 (Yang et al., 2025), dense and with experts: Llama's structure with a norm of each head's query and key."""

from __future__ import annotations

from msgspec.structs import replace
from radixlm.runtime.artifact.model_config import LayerConfig, QKNorm, Router

from .family import Family
from .qwen2 import window
from .settings import Settings


class Qwen3(Family):
    """Qwen3: the head size may differ from the model's width divided by the number of heads."""

    title = "Qwen3"
    huggingface = {"Qwen3ForCausalLM": "qwen3"}
    gguf = ("qwen3",)
    defaults = {"head_dim": 128, "sliding_window": 4096}

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return Llama's layer, with `q_norm` and `k_norm`."""
        c.refuse("attention_bias")
        return LayerConfig(mixer=c.attention(qk_norm=QKNorm(), window=window(c, index)), ffn=c.dense())


class Qwen3MoE(Qwen3):
    """Qwen3 with experts; some layers may be dense."""

    title = "Qwen3 MoE"
    huggingface = {"Qwen3MoeForCausalLM": "qwen3_moe"}
    gguf = ("qwen3moe",)
    defaults = {"sliding_window": 4096}

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return Qwen3's layer, with experts."""
        layer = super().layer(c, index)
        step = c("decoder_sparse_step", 1)
        if index in c("mlp_only_layers", ()) or step < 1 or (index + 1) % step:
            return layer
        # llama.cpp always does it; a configuration declares it
        renormalise = c("norm_topk_prob", c.format == "gguf")
        return replace(layer, ffn=c.experts(router=Router(renormalise=renormalise)))
