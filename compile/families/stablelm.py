"""StableLM 2 (Stability AI, 2024): LayerNorm with biases, and a quarter of each head rotates."""

from __future__ import annotations

from collections.abc import Mapping

from radixlm.runtime.artifact.model_config import LayerConfig, ModelConfig, QKNorm

from ..layers.attention import SelfAttention
from ..layers.decoder import Decoder
from ..weights.view import View
from .family import Family, Format, Views
from .settings import Settings


class StableLM(Family):
    """StableLM 2: the 12B model has parallel branches, and a LayerNorm without bias for each head."""

    title = "StableLM 2"
    huggingface = {"StableLmForCausalLM": "stablelm"}
    gguf = ("stablelm",)
    defaults = {"partial_rotary_factor": 0.25}
    names = {"q_norm": "self_attn.q_layernorm.weight", "k_norm": "self_attn.k_layernorm.weight"}

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`; in a GGUF file, stored tensors decide about norms of heads and parallel branches.

        Branches are parallel if there is no second norm. llama.cpp's converter sets `use_parallel_residual` for every
        model whose config.json does not, so that its graph checks the norm, too.
        """
        has_norms = "blk.0.attn_q_norm.weight" in c.stored or bool(c("qk_layernorm"))
        attention = c.attention(
            bias=c.has_bias("attn_q", otherwise=bool(c("use_qkv_bias"))),
            qk_norm=QKNorm(over="each_head", kind="layer") if has_norms else None,
        )
        is_parallel = c("use_parallel_residual", False)
        if c.format == "gguf":
            is_parallel = "blk.0.ffn_norm.weight" not in c.stored
        return LayerConfig(mixer=attention, ffn=c.dense(), norms="parallel" if is_parallel else "pre")

    def config(self, c: Settings) -> ModelConfig:
        """Return the model, with LayerNorm."""
        return c.model(self.layer, norm="layer_bias", norm_eps=c("layer_norm_eps", 1e-5))

    def fused(self, decoder: Decoder, format_: Format) -> Mapping[str, Views]:
        """Return views of norms: a checkpoint has the gains of each head as a tensor."""
        if format_ == "gguf":
            return {}
        found: dict[str, Views] = {}
        for layer in decoder.layers:
            assert isinstance(layer.self_attn, SelfAttention)
            for norm in (layer.self_attn.spec.q_norm, layer.self_attn.spec.k_norm):
                if norm is not None:
                    stem = norm.name.removesuffix("weight")
                    num_heads = norm.size // layer.self_attn.attention.head_dim
                    found[norm.name] = tuple(View(f"{stem}norms.{head}.weight") for head in range(num_heads))
        return found
