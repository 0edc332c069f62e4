"""Llama (Touvron et al., 2023) and models of its structure: Llama 2 and 3, Mistral, TinyLlama, SmolLM2, SmolLM3."""

from __future__ import annotations

from radixlm.runtime.artifact.model_config import LayerConfig

from .family import Family
from .settings import Settings


class Llama(Family):
    """Llama. Only Mistral's `sliding_window` is used. llama.cpp's converter reorders the rows of q and k."""

    title = "Llama 1, 2 and 3 (also SmolLM2, TinyLlama, Mistral)"
    huggingface = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral"}
    gguf = ("llama",)
    neighbouring_pairs = ("gguf",)

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`.

        Biases are refused, except in a GGUF file that stores them. In GGUF, Mixtral is a Llama with experts.
        """
        has_experts = c.format == "gguf" and c("num_local_experts")
        c.refuse("attention_bias", "mlp_bias", *(() if has_experts else ("num_local_experts",)))
        has_window = c.format == "gguf" or c.class_name == "MistralForCausalLM"
        window = c("sliding_window") if has_window else None
        return LayerConfig(mixer=c.attention(window=window), ffn=c.experts() if has_experts else c.dense())


class SmolLM3(Family):
    """SmolLM3 (Hugging Face, 2025): every fourth layer has no positions; GGUF has no key for that."""

    title = "SmolLM3"
    huggingface = {"SmolLM3ForCausalLM": "smollm3"}
    gguf = ("smollm3",)
    defaults = {"rope_theta": 2e6, "tie_word_embeddings": True, "num_attention_heads": 16, "num_key_value_heads": 4}
    neighbouring_pairs = ("gguf",)

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`; only layers without positions may have a window."""
        c.refuse("attention_bias", "mlp_bias")
        has_rope = bool((index + 1) % c.number("no_rope_layer_interval", 4))
        if c("no_rope_layers"):
            has_rope = bool(c.of_layer("no_rope_layers", index))
        slides = c("use_sliding_window", False) and (
            c.slides(index, full_every=1) if c("layer_types") else not has_rope
        )
        window = c("sliding_window") if slides else None
        return LayerConfig(mixer=c.attention(rope=c.rope() if has_rope else None, window=window), ffn=c.dense())
