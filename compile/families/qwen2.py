"""Qwen2 and Qwen2.5 (Yang et al., 2024), Seed-OSS (ByteDance, 2025): biases on queries, keys and values."""

from __future__ import annotations

from radixlm.runtime.artifact.model_config import LayerConfig

from .family import Family
from .settings import Settings


class Qwen2(Family):
    """Qwen2: the bias is part of the class, without a key; `use_sliding_window` enables the window."""

    title = "Qwen2 and 2.5"
    huggingface = {"Qwen2ForCausalLM": "qwen2"}
    gguf = ("qwen2",)

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return Llama's layer, with biases."""
        c.refuse("mlp_bias", "num_local_experts")
        bias = c.has_bias("attn_q", otherwise=True)
        return LayerConfig(mixer=c.attention(window=window(c, index), bias=bias), ffn=c.dense())


def window(c: Settings, index: int) -> int | None:
    """Return a layer's window, by `layer_types`, or for all layers from `max_window_layers` on; None if it has none."""
    if c.format == "gguf":
        declared: int | None = c("sliding_window")
        return declared
    if not c("use_sliding_window", False):
        return None
    slides = c.slides(index, full_every=1) if c("layer_types") else index >= c.number("max_window_layers", 28)
    return int(c.number("sliding_window", 4096)) if slides else None


class SeedOss(Family):
    """Seed-OSS: heads are wider than the model's width divided by their number."""

    title = "Seed-OSS"
    huggingface = {"SeedOssForCausalLM": "seed_oss"}
    gguf = ("seed_oss",)
    defaults = {"head_dim": 128, "attention_bias": True}
    gguf_names = {"ffn_norm": "post_attention_norm.weight"}

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return Llama's layer, with biases if the model says so."""
        attention = c.attention(
            bias=c.has_bias("attn_q", otherwise=bool(c("attention_bias"))),
            output_bias=c.has_bias("attn_output", otherwise=bool(c("attention_out_bias"))),
        )
        return LayerConfig(mixer=attention, ffn=c.dense(bias=c.has_bias("ffn_up", otherwise=bool(c("mlp_bias")))))
