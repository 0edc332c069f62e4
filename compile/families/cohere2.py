"""Command R7B and its successors (Cohere, 2024 and 2025): one LayerNorm without bias feeds both branches."""

from __future__ import annotations

from radixlm.runtime.artifact.model_config import LayerConfig, ModelConfig

from .family import Family
from .settings import Settings


class Cohere2(Family):
    """Cohere 2: three layers of four have a sliding window, the fourth no rotary positions. Neighbours rotate."""

    title = "Command R7B and A (Cohere 2)"
    huggingface = {"Cohere2ForCausalLM": "cohere2"}
    gguf = ("cohere2",)
    defaults = {"sliding_window": 4096, "tie_word_embeddings": True}
    neighbouring_pairs = ("huggingface", "gguf")

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`, whose two branches read the same norm."""
        c.refuse("use_qk_norm")
        slides = c.slides(index, full_every=4)
        bias = c.has_bias("attn_q", otherwise=bool(c("attention_bias")))
        attention = c.attention(
            window=c("sliding_window") if slides else None,
            rope=c.rope() if slides else None,
            bias=bias,
            output_bias=c.has_bias("attn_output", otherwise=bias),
        )
        return LayerConfig(mixer=attention, ffn=c.dense(), norms="parallel")

    def config(self, c: Settings) -> ModelConfig:
        """Return the model, whose logits are multiplied by `logit_scale`."""
        return c.model(
            self.layer,
            norm="layer",
            norm_eps=c("layer_norm_eps", 1e-5),
            logits_factor=c.number("logit_scale", 0.0625),
        )
