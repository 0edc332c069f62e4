"""Gemma 4 (Google, 2026), the language model of all sizes: layers of two shapes, some of which share KV.

E2B and E4B have embeddings for each layer; 26B-A4B has experts in parallel with dense layers. Image and audio encoders
are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from radixlm.runtime.artifact.model_config import (
    Attention,
    Dense,
    DenseAndExperts,
    LayerConfig,
    LayerInputs,
    ModelConfig,
    ProportionalScaling,
    QKNorm,
    Rope,
    Router,
)
from radixlm.runtime.errors import CorruptSource, UnsupportedArchitecture

from ..layers.decoder import Decoder
from ..layers.feed_forward import DenseAndExpertsFeedForward
from .family import Family, Format, Views, fused_expert_gate_up
from .settings import PER_LAYER, Settings

_NEVER = 1e20  # a frequency divided by this number does not rotate
_OF_KV = re.compile(r"(?:model\.layers|blk)\.(\d+)\.(?:self_attn\.[kv]_(?:proj|norm)|attn_[kv](?:_norm)?)\.weight")


class Gemma4(Family):
    """Gemma 4: scores are not scaled; queries, keys and values of each head are normalized, values without gain."""

    title = "Gemma 4"
    huggingface = {
        "Gemma4ForConditionalGeneration": "gemma4",
        "Gemma4ForCausalLM": "gemma4_text",
    }
    gguf: ClassVar[tuple[str, ...]] = ("gemma4",)
    defaults = {
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        "hidden_size": 2304,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 512,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
    }
    names = {
        "ffn_norm": "pre_feedforward_layernorm.weight",
        "router": "router.proj.weight",
        "router_scale": "router.scale",
        "expert_scale": "router.per_expert_scale",
        "expert_gate": "experts.gate_proj.weight",
        "expert_up": "experts.up_proj.weight",
        "expert_down": "experts.down_proj.weight",
    }

    def config(self, c: Settings) -> ModelConfig:
        """Return the model, whose embeddings are multiplied by the root of their width."""
        if c("use_bidirectional_attention") == "all":
            raise UnsupportedArchitecture(f"{c.label}: tokens that see what follows them are not supported")
        c.refuse("attention_bias")
        key = "hidden_size_per_layer_input" if c.format == "huggingface" else "embedding_length_per_layer_input"
        inputs = LayerInputs(
            size=c.number(key, 0),
            vocab_size=c.number("vocab_size_per_layer_input", c("vocab_size")),
            function=_function(c).removesuffix("_mul"),
        )
        if inputs.size and inputs.vocab_size < c.number("vocab_size"):
            raise CorruptSource(
                f"{c.label}: {c('vocab_size')} tokens and {inputs.vocab_size} rows of embeddings for each layer; "
                "the configuration cannot be right"
            )
        return c.model(
            self.layer,
            embedding_factor=c.number("hidden_size") ** 0.5,
            logits_soft_cap=c("final_logit_softcapping"),
            layer_inputs=inputs if inputs.size else None,
        )

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`, with norms around each branch; its output is multiplied by a number of its own."""
        dense = c.dense(intermediate_size=_intermediate_size(c, index), function=_function(c))
        ffn: Dense | DenseAndExperts = dense
        if c("enable_moe_block") or (c.format == "gguf" and c("num_experts")):
            experts = c.experts(
                num_active=c("top_k_experts", c("num_experts_per_tok")),
                intermediate_size=c("moe_intermediate_size"),
                function=_function(c),
                router=Router(expert_scale=True, input_norm=True),
            )
            ffn = DenseAndExperts(dense=dense, experts=experts)
        return LayerConfig(mixer=_attention(c, index), ffn=ffn, norms="sandwich", layer_scalar=True)

    def ignores(self, name: str, config: ModelConfig) -> bool:
        """Return whether a tensor is unneeded, such as KV matrices of layers that share KV."""
        of_kv = _OF_KV.fullmatch(name)
        index = int(of_kv[1]) if of_kv else 0
        is_shared = 0 < index < config.num_hidden_layers and config.attentions[index].shared_kv is not None
        return is_shared or super().ignores(name, config)

    def fused(self, decoder: Decoder, format_: Format) -> Mapping[str, Views]:
        """Return views of experts: llama.cpp's converter stores each expert's rows of gates, then those of `up`."""
        found: dict[str, Views] = {}
        for index, layer in enumerate(decoder.layers):
            if format_ == "gguf" and isinstance(layer.mlp, DenseAndExpertsFeedForward):
                names = (f"blk.{index}.ffn_gate_up_exps.weight", f"blk.{index}.ffn_down_exps.weight")
                found |= fused_expert_gate_up(*names, layer.mlp.experts)
        return found


class Gemma4Unified(Gemma4):
    """Gemma 4 without per-layer embeddings and experts; a GGUF file calls it Gemma 4, too."""

    title = "Gemma 4 (unified)"
    huggingface = {
        "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
        "Gemma4UnifiedForCausalLM": "gemma4_unified_text",
    }
    gguf = ()
    gguf_of_others = ("gemma4",)
    defaults = {
        **Gemma4.defaults,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 1024,
        "max_position_embeddings": 262144,
    }


def _attention(c: Settings, index: int) -> Attention:
    """Return the attention of layer `index`."""
    slides, shared = _slides(c, index), _shared_kv(c, index)
    head_dim = _head_dim(c, slides=slides)
    num_kv_heads = c.of_layer("num_key_value_heads", index)
    if c.format == "gguf":
        keys_are_values = f"blk.{index}.attn_v.weight" not in c.stored
    else:
        keys_are_values = bool(c("attention_k_eq_v")) and not slides
        if keys_are_values and not _is_by_layer(c):
            num_kv_heads = c("num_global_key_value_heads", num_kv_heads)
    return c.attention(
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        scale=1.0,
        rope=_rope(c, head_dim, slides=slides),
        window=c("sliding_window") if slides else None,
        qk_norm=QKNorm(),
        value_norm=shared is None,
        keys_are_values=keys_are_values and shared is None,
        shared_kv=shared,
    )


def _slides(c: Settings, index: int) -> bool:
    """Return whether a layer has a window; the last has full attention, whatever the configuration says."""
    return c.slides(index, full_every=6) and index < c.num_layers - 1


def _head_dim(c: Settings, *, slides: bool) -> int:
    """Return the head size: config.json's usual key is for layers with a window, llama.cpp's for the others.

    transformers 5 lists the differences of single layers as for all classes, without a key for layers of full
    attention.
    """
    if c.format == "gguf":
        return int(c.number("attention.key_length_swa" if slides else "head_dim"))
    return int(c.number("head_dim" if slides or _is_by_layer(c) else "global_head_dim"))


def _is_by_layer(c: Settings) -> bool:
    """Return whether the source lists the differences of each layer."""
    return PER_LAYER in c.values


def _rope(c: Settings, head_dim: int, *, slides: bool) -> Rope:
    """Return the rotary positions of a layer."""
    if c.format == "huggingface":
        return c.rope("sliding_attention" if slides else "full_attention", rotary_dim=head_dim)
    if slides:
        return c.rope(theta=c.number("rope_local_base_freq", 1e4), rotary_dim=head_dim, scaling=None)
    return c.rope(theta=c.number("rope_theta", 1e6), rotary_dim=head_dim, scaling=_turning(c))


def _turning(c: Settings) -> ProportionalScaling | None:
    """Return the pairs that rotate, from the divisors of frequencies in a GGUF file.

    They are 1, and a huge number for pairs that do not rotate.
    """
    factors = c.rope_factors.get("rope_freqs")
    if factors is None:
        return None
    num_pairs = sum(factor < _NEVER for factor in factors)
    if any(factor != 1.0 for factor in factors[:num_pairs]):
        raise UnsupportedArchitecture(f"{c.label}: rope_freqs.weight of Gemma 4 may hold 1 and huge numbers only")
    return ProportionalScaling(num_pairs=num_pairs)


def _shared_kv(c: Settings, index: int) -> int | None:
    """Return the layer whose KV is read: the last with its own KV that has the same attention type."""
    num_own = c.num_layers - int(c.number("num_kv_shared_layers", 0))
    if index < num_own:
        return None
    alike = [before for before in range(num_own) if _slides(c, before) == _slides(c, index)]
    if not alike:
        raise CorruptSource(f"{c.label}: layer {index} has no keys and values, and no layer like it has some")
    return alike[-1]


def _intermediate_size(c: Settings, index: int) -> Any:
    """Return the feed-forward size. Layers that share KV may be twice as wide; a GGUF file lists each size."""
    size = c.of_layer("intermediate_size", index)
    is_wide = c("use_double_wide_mlp") and _shared_kv(c, index) is not None
    return 2 * size if is_wide else size


def _function(c: Settings) -> Any:
    """Return the activation function."""
    return c.function("gelu_pytorch_tanh")
