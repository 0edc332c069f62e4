"""Llama (Touvron et al., 2023) and what follows its shape: Llama 2 and 3, Mistral, TinyLlama, SmolLM2."""

from __future__ import annotations

from radixlm.runtime.artifact.model_config import LayerConfig

from .family import Family
from .settings import Settings


class Llama(Family):
    """Only Mistral's `sliding_window` is used. llama.cpp's converter reorders the rows of q and k."""

    title = "Llama 1, 2 and 3 (also SmolLM2, TinyLlama, Mistral)"
    huggingface = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral"}
    gguf = ("llama",)
    neighbouring_pairs = ("gguf",)

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Biases are refused, except where a GGUF file has them. In GGUF, Mixtral is a Llama with experts."""
        has_experts = c.format == "gguf" and c("num_local_experts")
        c.refuse("attention_bias", "mlp_bias", *(() if has_experts else ("num_local_experts",)))
        has_window = c.format == "gguf" or c.class_name == "MistralForCausalLM"
        window = c("sliding_window") if has_window else None
        return LayerConfig(mixer=c.attention(window=window), ffn=c.experts() if has_experts else c.dense())
