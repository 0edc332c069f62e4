"""Gemma 2 and 3: sandwich norms, gains that are added to one, windows, soft-caps."""

from __future__ import annotations

from dataclasses import replace

from .family import Off, TinyFamily
from .parts import NO_WINDOW, QK_NORM, SANDWICH, attention, config, decoder, sizes

_SHARED = {"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "attention_bias": False, "sliding_window": 16}
_ACTIVATION = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
OFFS = (
    NO_WINDOW,
    Off("gelu", config={"hidden_act": "silu", "hidden_activation": "silu"}),
    Off("post_norm", modules=r"post_\w+_layernorm$"),
    Off("pre_norm_gain", tensors={r"pre_feedforward_layernorm": 0.0}),
)

SCALE = Off("attention_scale", config={"query_pre_attn_scalar": 32})
NO_SCALE = "GGUF has no key for the scale of attention, llama.cpp knows 27B by its number of layers"


def scaled(tiny: TinyFamily) -> TinyFamily:
    """The same with a scale that is not of the head's size, as 27B has it."""
    changes: dict[str, object] = {"query_pre_attn_scalar": 48}
    return replace(
        tiny, name=f"{tiny.name}-scale", config={**tiny.config, **changes}, offs=(SCALE,), no_witness=NO_SCALE
    )


_GEMMA = (
    TinyFamily(
        "gemma2",
        20,
        config(
            "Gemma2ForCausalLM",
            "gemma2",
            sizes(64, 192, 4, 4, 2, 32),
            **_SHARED,
            **_ACTIVATION,
            query_pre_attn_scalar=32,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=10.0,
        ),
        parts=decoder(attention(score=1.7), norms=SANDWICH, neutral=0.0, embedding=0.6),
        offs=(
            *OFFS,
            Off("soft_cap", config={"attn_logit_softcapping": None}),
            Off("final_soft_cap", config={"final_logit_softcapping": None}),
        ),
    ),
    TinyFamily(
        "gemma3",
        21,
        config(
            "Gemma3ForCausalLM",
            "gemma3_text",
            sizes(64, 192, 6, 4, 1, 32),
            **_SHARED,
            **_ACTIVATION,
            query_pre_attn_scalar=32,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            rope_theta=100000.0,
            rope_local_base_freq=1000.0,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
            sliding_window_pattern=6,
            layer_types=["sliding_attention"] * 5 + ["full_attention"],
        ),
        parts=decoder(
            attention(qk_norm=("q_norm", "k_norm"), neutral=0.0, score=1.5), norms=SANDWICH, neutral=0.0, embedding=0.9
        ),
        offs=(
            *OFFS,
            QK_NORM,
            Off("qk_gain", tensors={r"\.[qk]_norm": 0.5}),
            Off("local_theta", config={"rope_local_base_freq": 100000.0}),
            Off("rope_scaling", config={"rope_scaling": None}),
        ),
    ),
)
GEMMA = (*_GEMMA, *map(scaled, _GEMMA))
