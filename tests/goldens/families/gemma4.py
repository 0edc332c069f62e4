"""Gemma 4: two head sizes, keys and values that layers share, embeddings for each layer, experts beside an MLP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..tiny_models import Part
from .family import Config, Off, TinyFamily
from .parts import NO_WINDOW, QK_NORM, SANDWICH, decoder, gain, gated_mlp, matrix, sizes

PREFIX = "model.language_model."
EXPERT_NORMS = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")


def shared(c: Config, layer: int) -> bool:
    """Whether the layer reads keys and values of an earlier one."""
    return bool(layer >= c["num_hidden_layers"] - c["num_kv_shared_layers"])


def _attention(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    """Attention is not scaled, so gains of queries and keys are small."""
    full = c["layer_types"][layer] == "full_attention"
    size = c["global_head_dim"] if full else c["head_dim"]
    one = full and c["attention_k_eq_v"]
    kv = size * (c["num_global_key_value_heads"] if one else c["num_key_value_heads"])
    query, hidden = size * c["num_attention_heads"], c["hidden_size"]
    yield matrix(f"{prefix}self_attn.q_proj", query, hidden)
    yield gain(f"{prefix}self_attn.q_norm", size, 0.55, 0.15)
    if not shared(c, layer):
        yield matrix(f"{prefix}self_attn.k_proj", kv, hidden)
        yield gain(f"{prefix}self_attn.k_norm", size, 0.55, 0.15)
        if not one:
            yield matrix(f"{prefix}self_attn.v_proj", kv, hidden)
    yield matrix(f"{prefix}self_attn.o_proj", hidden, query, 0.5)
    yield f"{prefix}layer_scalar", (1,), 0.8, 0.1


def _feed(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    hidden, each = c["hidden_size"], c.get("hidden_size_per_layer_input")
    wide = 2 if c["use_double_wide_mlp"] and shared(c, layer) else 1
    yield from gated_mlp(c, layer, prefix, inner=wide * c["intermediate_size"])
    if each:
        yield matrix(f"{prefix}per_layer_input_gate", each, hidden)
        yield matrix(f"{prefix}per_layer_projection", hidden, each)
        yield gain(f"{prefix}post_per_layer_input_norm", hidden)
    if c.get("enable_moe_block"):
        inner, experts = c["moe_intermediate_size"], c["num_experts"]
        for name in EXPERT_NORMS:
            yield gain(prefix + name, hidden)
        yield f"{prefix}router.proj.weight", (experts, hidden), 0.0, 1.0
        yield f"{prefix}router.scale", (hidden,), 1.0, 0.3
        yield f"{prefix}router.per_expert_scale", (experts,), 1.0, 0.3
        yield f"{prefix}experts.gate_up_proj", (experts, 2 * inner, hidden), 0.0, hidden**-0.5
        yield f"{prefix}experts.down_proj", (experts, hidden, inner), 0.0, inner**-0.5


def _parts(c: Config) -> Iterator[Part]:
    yield from decoder(_attention, _feed, norms=SANDWICH, prefix=PREFIX, embedding=1.2)(c)
    each = c.get("hidden_size_per_layer_input")
    if each:
        width = c["num_hidden_layers"] * each
        yield f"{PREFIX}embed_tokens_per_layer.weight", (c["vocab_size_per_layer_input"], width), 0.0, 0.2
        yield matrix(f"{PREFIX}per_layer_model_projection", width, c["hidden_size"])
        yield gain(f"{PREFIX}per_layer_projection_norm", each)


def _config(layers: str, kv_heads: int, **changes: Any) -> dict[str, Any]:
    """`layers` has S for a layer that slides and F for one that sees everything."""
    kinds = {"S": "sliding_attention", "F": "full_attention"}
    text = {
        **sizes(64, 128, len(layers), 4, kv_heads, 32),
        "model_type": "gemma4_text",
        "attention_bias": False,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "final_logit_softcapping": 10.0,
        "global_head_dim": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "layer_types": [kinds[layer] for layer in layers],
        "num_global_key_value_heads": None,
        "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 100000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 16,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": False,
        "vocab_size_per_layer_input": 320,
        **changes,
    }
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": None,
        "audio_config": None,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }


def _unified() -> dict[str, Any]:
    """A text model without embeddings for layers and without experts: its configuration does not have their keys."""
    config = _config(
        "SSFSF",
        2,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        num_kv_shared_layers=2,
        model_type="gemma4_unified_text",
        use_bidirectional_attention="vision",
    )
    absent = ("enable_moe_block", "hidden_size_per_layer_input", "vocab_size_per_layer_input")
    text = {key: value for key, value in config["text_config"].items() if key not in absent}
    names = {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified"}
    return {**config, **names, "text_config": text}


_OFFS = (
    NO_WINDOW,
    QK_NORM,
    Off("v_norm", modules=r"self_attn\.v_norm$"),
    Off("qk_gain", tensors={r"\.[qk]_norm": 0.55}),
    Off("post_norm", modules=r"post_(attention|feedforward)_layernorm$"),
    Off("layer_scalar", tensors={"layer_scalar": 1.0}),
    Off("final_soft_cap", config={"final_logit_softcapping": None}),
    Off("full_theta", config={"rope_parameters|full_attention|rope_theta": 10000.0}),
    Off("proportional", config={"rope_parameters|full_attention|partial_rotary_factor": 1.0}),
)

GEMMA4 = (
    TinyFamily(
        "gemma4",
        50,
        _config(
            "SSFSF",
            1,
            hidden_size_per_layer_input=32,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
        ),
        parts=_parts,
        offs=(
            *_OFFS,
            Off("layer_embeddings", tensors={"embed_tokens_per_layer": 0.0}),
            Off("layer_projection", tensors={"per_layer_model_projection": 0.0}),
            Off("layer_inputs", tensors={"per_layer_projection.weight": 0.0}),
            Off("layer_projection_norm", modules=r"per_layer_projection_norm$"),
            Off("layer_input_norm", modules=r"post_per_layer_input_norm$"),
        ),
    ),
    TinyFamily("gemma4-unified", 90, _unified(), parts=_parts, offs=_OFFS),
    TinyFamily(
        "gemma4-moe",
        3171,
        _config(
            "SSF",
            2,
            attention_k_eq_v=True,
            enable_moe_block=True,
            moe_intermediate_size=64,
            num_experts=8,
            num_global_key_value_heads=1,
            top_k_experts=3,
        ),
        parts=_parts,
        offs=(
            *_OFFS,
            Off("dense_beside", tensors={r"mlp\.down_proj": 0.0}),
            Off("experts", config={"top_k_experts": 2}),
            *(Off(name, modules=f"{name}$") for name in EXPERT_NORMS),
            Off("router_scale", tensors={r"router\.scale": 1.0}),
            Off("per_expert_scale", tensors={r"router\.per_expert_scale": 1.0}),
        ),
    ),
)
