"""Phi-3, Phi-3.5 and Phi-4 (Microsoft, 2024): Llama's structure, joined matrices, and two RoPE tables."""

from __future__ import annotations

from collections.abc import Mapping

from radixlm.runtime.artifact.model_config import LayerConfig

from ..layers.attention import SelfAttention
from ..layers.decoder import Decoder
from .family import Family, Format, Views, parts_of, split_gate_up
from .settings import Settings


class Phi3(Family):
    """Phi-3: long contexts have RoPE factors of their own; small models rotate a part of each head."""

    title = "Phi-3, 3.5 and 4"
    huggingface = {"Phi3ForCausalLM": "phi3"}
    gguf = ("phi3",)
    defaults = {"rms_norm_eps": 1e-5}

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`; all layers have the same window, if any."""
        c.refuse("attention_bias")
        return LayerConfig(mixer=c.attention(window=c("sliding_window")), ffn=c.dense())

    def fused(self, decoder: Decoder, format_: Format) -> Mapping[str, Views]:
        """Return views of gates and `up`, which llama.cpp's files join; the source splits those of checkpoints."""
        if format_ == "huggingface":
            return {}
        found = dict(split_gate_up(decoder))
        for index, layer in enumerate(decoder.layers):
            assert isinstance(layer.self_attn, SelfAttention)
            found |= dict(parts_of(f"blk.{index}.attn_qkv.weight", layer.self_attn.inputs))
        return found
