"""SmolLM3 (Hugging Face, 2025): Llama's shape, where every fourth layer knows no positions."""

from __future__ import annotations

from radixlm.runtime.artifact.model_config import LayerConfig

from .family import Family
from .settings import Settings


class SmolLM3(Family):
    """GGUF has no key for the layers without positions."""

    title = "SmolLM3"
    huggingface = {"SmolLM3ForCausalLM": "smollm3"}
    gguf = ("smollm3",)
    defaults = {"rope_theta": 2e6, "tie_word_embeddings": True, "num_attention_heads": 16, "num_key_value_heads": 4}
    neighbouring_pairs = ("gguf",)

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Only layers without positions may slide."""
        c.refuse("attention_bias", "mlp_bias")
        has_rope = bool((index + 1) % c.number("no_rope_layer_interval", 4))
        if c("no_rope_layers"):
            has_rope = bool(c.of_layer("no_rope_layers", index))
        slides = c("use_sliding_window", False) and (
            c.slides(index, full_every=1) if c("layer_types") else not has_rope
        )
        window = c("sliding_window") if slides else None
        return LayerConfig(mixer=c.attention(rope=c.rope() if has_rope else None, window=window), ffn=c.dense())
