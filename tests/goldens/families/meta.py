"""Llama 4 and Muse Glimmer: layers without RoPE, norms of queries and keys without gains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..tiny_models import Part
from .family import Config, Off, TinyFamily
from .moe import NUM_EXPERTS
from .parts import NO_WINDOW, SANDWICH, attention, config, decoder, gain, gated_mlp, matrix, sizes


def _llama4_feed(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    """Every second layer has experts, whose rows are inputs; gate and up stand behind each other."""
    if (layer + 1) % c["interleave_moe_layer_step"]:
        yield from gated_mlp(c, layer, prefix, name="feed_forward", inner=c["intermediate_size_mlp"])
        return
    hidden, inner, at = c["hidden_size"], c["intermediate_size"], f"{prefix}feed_forward."
    yield matrix(f"{at}router", NUM_EXPERTS, hidden)
    yield f"{at}experts.gate_up_proj", (NUM_EXPERTS, hidden, 2 * inner), 0.0, 2 * hidden**-0.5
    yield f"{at}experts.down_proj", (NUM_EXPERTS, inner, hidden), 0.0, inner**-0.5
    yield from gated_mlp(c, layer, prefix, name="feed_forward.shared_expert", inner=inner)


def _llama4(name: str, seed: int, chunk: int, floor: int, offs: tuple[Off, ...], no_witness: str = "") -> TinyFamily:
    return TinyFamily(
        name,
        seed,
        config(
            "Llama4ForCausalLM",
            "llama4_text",
            sizes(64, 64, 4, 4, 2, 32),
            attention_bias=False,
            attention_chunk_size=chunk,
            attn_scale=0.3,
            attn_temperature_tuning=True,
            floor_scale=floor,
            interleave_moe_layer_step=2,
            intermediate_size_mlp=96,
            no_rope_layers=[1, 1, 1, 0],
            num_experts_per_tok=1,
            num_local_experts=NUM_EXPERTS,
            rope_scaling=None,
            use_qk_norm=True,
        ),
        parts=decoder(attention(), _llama4_feed),
        offs=(
            Off("no_rope", config={"no_rope_layers": [1, 1, 1, 1]}),
            Off("qk_norm", modules=r"self_attn\.(qk_norm|[qk]_norm)$"),
            Off("shared_expert", tensors={r"shared_expert\.down_proj": 0.0}),
            Off("experts", tensors={r"experts\.down_proj": 0.0}),
            *offs,
        ),
        no_witness=no_witness,
    )


def _glimmer_attention(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    yield from attention(score=1.0)(c, layer, prefix)
    width = c["num_attention_heads"] * c["head_dim"]
    yield matrix(f"{prefix}self_attn.gate_proj", width, c["hidden_size"], 1.5)


def _glimmer_parts(c: Config) -> Iterator[Part]:
    """The last norm alone has a plain gain. The embedding is normed, so gains behind layers are small."""
    plain = decoder(_glimmer_attention, norms=SANDWICH, neutral=0.0, prefix="model.language_model.")
    last = "model.language_model.norm"
    for name, shape, mean, std in plain(c):
        if name == f"{last}.weight":
            yield gain(last, c["hidden_size"])
        elif ".post_" in name and "layernorm" in name:
            yield name, shape, -0.82, 0.06
        else:
            yield name, shape, mean, std


def _glimmer_config(**changes: Any) -> dict[str, Any]:
    text = {
        **sizes(64, 192, 4, 4, 2, 32),
        "model_type": "muse_glimmer_text",
        "attention_bias": False,
        "final_logit_softcapping": 5.0,
        "hidden_activation": "silu",
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "layer_rope_theta": [10000.0, 10000.0, 10000.0, 0],
        "output_multiplier": 0.5,
        "post_norm_eps": 1e-8,
        "qk_scale_factor": 2.0,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": 16,
        "tie_word_embeddings": False,
        **changes,
    }
    return {
        "architectures": ["MuseGlimmerForConditionalGeneration"],
        "model_type": "muse_glimmer",
        "text_config": text,
        "vision_config": {
            "model_type": "muse_glimmer_vision",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
        },
        "out_hidden_size": 128,
        "projector_hidden_size": 32,
        "tie_word_embeddings": False,
        "image_token_id": 1000,
        "video_token_id": 1001,
    }


META = (
    TinyFamily(
        "muse_glimmer",
        70,
        _glimmer_config(),
        parts=_glimmer_parts,
        absent=r"^model\.vision_",
        offs=(
            NO_WINDOW,
            Off("qk_norm", modules=r"self_attn\.(qk_norm|[qk]_norm)$"),
            Off("query_factor", config={"qk_scale_factor": 1.0}),
            Off("no_rope", config={"layer_rope_theta": [10000.0] * 4}),
            Off("gate", tensors={r"self_attn\.gate_proj": 0.0}),
            Off("post_norm", modules=r"post_\w+_layernorm$"),
            Off("logits_factor", config={"output_multiplier": 1.0}),
            Off("final_soft_cap", config={"final_logit_softcapping": 1e4}),
        ),
    ),
    _llama4(
        "llama4",
        271,
        16,
        60,  # so that it begins anew at the last token of the longest prompt
        (
            Off("chunk", config={"attention_chunk_size": 4096}),
            Off("temperature", config={"attn_temperature_tuning": False}),
        ),
        "llama.cpp knows chunks of 8,192 only, and temperatures that begin there",
    ),
    _llama4("llama4-short", 152, 8192, 8192, ()),
)
