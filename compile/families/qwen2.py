"""Qwen2 and Qwen2.5 (Yang et al., 2024), Seed-OSS (ByteDance, 2025): biases on queries, keys and values."""

from __future__ import annotations

from radixlm.runtime.artifact.model_config import LayerConfig

from .family import Family
from .settings import Settings


class Qwen2(Family):
    """The bias is part of the class and no key; `use_sliding_window` switches the window."""

    title = "Qwen2"
    huggingface = {"Qwen2ForCausalLM": "qwen2"}
    gguf = ("qwen2",)

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Llama's, with biases."""
        c.refuse("mlp_bias", "num_local_experts")
        bias = c.has_bias("attn_q", otherwise=True)
        return LayerConfig(mixer=c.attention(window=window(c, index), bias=bias), ffn=c.dense())


def window(c: Settings, index: int) -> int | None:
    """What a layer sees; by `layer_types`, or all from layer `max_window_layers` on have the window."""
    if c.format == "gguf":
        declared: int | None = c("sliding_window")
        return declared
    if not c("use_sliding_window", False):
        return None
    slides = c.slides(index, full_every=1) if c("layer_types") else index >= c.number("max_window_layers", 28)
    return int(c.number("sliding_window", 4096)) if slides else None


class SeedOss(Family):
    """Its heads are wider than the model's width shared by them."""

    title = "Seed-OSS"
    huggingface = {"SeedOssForCausalLM": "seed_oss"}
    gguf = ("seed_oss",)
    defaults = {"head_dim": 128, "attention_bias": True}
    gguf_names = {"ffn_norm": "post_attention_norm.weight"}

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Llama's, with biases where the model says so."""
        attention = c.attention(
            bias=c.has_bias("attn_q", otherwise=bool(c("attention_bias"))),
            output_bias=c.has_bias("attn_output", otherwise=bool(c("attention_out_bias"))),
        )
        return LayerConfig(mixer=attention, ffn=c.dense(bias=c.has_bias("ffn_up", otherwise=bool(c("mlp_bias")))))
