"""Granite 3 and 4.1 (IBM, 2024 to 2026), dense and with experts: Llama's structure with four multipliers."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace
from radixlm.runtime.artifact.model_config import LayerConfig, ModelConfig, Router

from ..layers.decoder import Decoder
from .family import Family, Format, Views, fused_expert_gate_up
from .settings import Settings


class Granite(Family):
    """Granite, with multipliers of embeddings, scores and branches; logits are divided by theirs."""

    title = "Granite (dense)"
    huggingface = {"GraniteForCausalLM": "granite"}
    gguf = ("granite",)
    neighbouring_pairs = ("gguf",)

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return Llama's layer; a GGUF file may say that there are no rotary positions."""
        c.refuse("mlp_bias")
        scale = c.number("attention_multiplier", 1.0 if c.format == "huggingface" else c.head_dim**-0.5)
        rope = None if c("rope.scaling.finetuned", True) is False else c.rope()
        attention = c.attention(
            rope=rope,
            scale=scale,
            bias=c.has_bias("attn_q", otherwise=bool(c("attention_bias"))),
            output_bias=c.has_bias("attn_output", otherwise=bool(c("attention_bias"))),
        )
        return LayerConfig(mixer=attention, ffn=c.dense())

    def config(self, c: Settings) -> ModelConfig:
        """Return the model, with multipliers of embeddings, branches and logits."""
        return c.model(
            self.layer,
            embedding_factor=c.number("embedding_multiplier", 1.0),
            residual_factor=c.number("residual_multiplier", 1.0),
            logits_factor=1 / (c.number("logits_scaling", 1.0) or 1.0),
        )


class GraniteMoE(Granite):
    """Granite with experts in all layers. A checkpoint stores a layer's experts as one, gates before `up`."""

    title = "Granite MoE"
    huggingface = {"GraniteMoeForCausalLM": "granitemoe"}
    gguf = ("granitemoe",)
    names = {
        "router": "block_sparse_moe.router.layer.weight",
        "expert_gate": "block_sparse_moe.experts.gate_proj.weight",
        "expert_up": "block_sparse_moe.experts.up_proj.weight",
        "expert_down": "block_sparse_moe.experts.down_proj.weight",
    }

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`; weights of experts are a softmax of the selected logits."""
        router = Router(scores="softmax_of_chosen")
        experts = c.experts(intermediate_size=c.number("intermediate_size"), router=router)
        return replace(super().layer(c, index), ffn=experts)

    def fused(self, decoder: Decoder, format_: Format) -> Mapping[str, Views]:
        """Return views of experts: each has its rows of gates, then those of `up`."""
        if format_ == "gguf":
            return {}
        found: dict[str, Views] = {}
        for index, layer in enumerate(decoder.layers):
            stem = f"model.layers.{index}.block_sparse_moe."
            found |= fused_expert_gate_up(f"{stem}input_linear.weight", f"{stem}output_linear.weight", layer.mlp)
        return found
