"""OLMo, EXAONE 4 and GLM-4: norms behind attention and feed-forward, alone or beside those before."""

from __future__ import annotations

from .family import Off, TinyFamily
from .parts import (
    BETAS,
    LLLG,
    NO_WINDOW,
    POST,
    PRE,
    QK_GAIN,
    QK_NORM,
    QKV,
    QKV_BIAS,
    YARN,
    attention,
    config,
    decoder,
    fused_mlp,
    sizes,
    whole,
)


def _exaone4(name: str, seed: int, sliding: bool, deep: bool = False) -> TinyFamily:
    """32B slides on three layers of four, and the fourth has no RoPE; 1.2B sees everything, with RoPE everywhere.

    llama.cpp knows 32B by its 64 layers, so one that is `deep` has as many.
    """
    dimensions = sizes(32, 48, 64, 2, 1, 16) if deep else sizes(128, 192, 4, 4, 2, 32)
    layers = LLLG * (dimensions["num_hidden_layers"] // len(LLLG))
    window = {"sliding_window": 16, "sliding_window_pattern": "LLLG", "layer_types": layers}
    no_window = {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 4}
    llama3 = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return TinyFamily(
        name,
        seed,
        config(
            "Exaone4ForCausalLM",
            "exaone4",
            dimensions,
            tie_word_embeddings=not sliding,
            rope_scaling={**llama3, "original_max_position_embeddings": 64},
            **(window if sliding else no_window),
        ),
        parts=decoder(attention(qk_norm=("q_norm", "k_norm")), norms=POST, embedding=20.0 if deep else 6.0),
        prompt_lengths=(7, 33, 70) if deep else (7, 33, 70, 300),
        offs=(
            QK_NORM,
            QK_GAIN,
            *((NO_WINDOW,) if sliding else ()),
            *(() if deep else (Off("post_norm", modules=r"post_\w+_layernorm$"),)),
            Off("rope_scaling", config={"rope_scaling": None}),
        ),
        no_witness="llama.cpp slides in EXAONE 4 only where it has 64 layers" if sliding and not deep else "",
    )


def _olmo3(name: str, yarn: dict[str, float], offs: tuple[Off, ...], no_witness: str = "") -> TinyFamily:
    """Released models say what YaRN takes where nothing is said."""
    return TinyFamily(
        name,
        8,
        config(
            "Olmo3ForCausalLM",
            "olmo3",
            whole(sizes(128, 192, 4, 4, 2, 32)),
            attention_bias=False,
            rope_theta=500000.0,
            sliding_window=16,
            layer_types=LLLG,
            rope_scaling={**YARN, **yarn},
        ),
        parts=decoder(attention(qk_norm=("q_norm", "k_norm"), whole_width=True), norms=POST, embedding=6.0),
        offs=offs,
        no_witness=no_witness,
    )


OF_YARN = {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0}
FACTOR = Off("attention_factor", config={"rope_scaling|attention_factor": None})

POST_NORMS = (
    TinyFamily(
        "olmo2",
        7,
        config("Olmo2ForCausalLM", "olmo2", whole(sizes(128, 192, 2, 4, 2, 32)), attention_bias=False),
        parts=decoder(attention(qk_norm=("q_norm", "k_norm"), whole_width=True), norms=POST, embedding=4.0),
        offs=(QK_NORM, QK_GAIN, Off("post_norm", modules=r"post_\w+_layernorm$")),
    ),
    _olmo3("olmo3", OF_YARN, (QK_NORM, NO_WINDOW, Off("rope_scaling", config={"rope_scaling": None}))),
    _olmo3("olmo3-scale", {**BETAS, "attention_factor": 1.35}, (FACTOR,), "llama.cpp takes YaRN's own numbers for it"),
    TinyFamily(
        "glm4",
        9,
        config(
            "Glm4ForCausalLM",
            "glm4",
            sizes(64, 192, 2, 4, 2, 32),
            attention_bias=True,
            partial_rotary_factor=0.5,
        ),
        parts=decoder(
            attention(biases=QKV),
            fused_mlp,
            norms=(*PRE, "post_self_attn_layernorm", "post_mlp_layernorm"),
            embedding=3.0,
        ),
        offs=(
            QKV_BIAS,
            Off("post_norm", modules=r"post_(self_attn|mlp)_layernorm$"),
            Off("partial_rotary", config={"partial_rotary_factor": 1.0}),
            Off("pairs", functions={"rotate_half": "llama"}),
        ),
    ),
    _exaone4("exaone4", 11, sliding=True),
    _exaone4("exaone4-full", 18, sliding=False),
    _exaone4("exaone4-64", 11, sliding=True, deep=True),
)
