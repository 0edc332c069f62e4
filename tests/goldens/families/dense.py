"""Dense families: tiny checkpoints as their hub repositories have them."""

from __future__ import annotations

from collections.abc import Iterator

from ..tiny_models import Part
from .family import Config, Off, TinyFamily
from .parts import (
    BETAS,
    QK_GAIN,
    QK_NORM,
    QKV,
    QKV_BIAS,
    SCORE,
    YARN,
    attention,
    config,
    decoder,
    fused_mlp,
    head_dim,
    matrix,
    sizes,
    whole,
)


def _fused_attention(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    query, kv = (c[f"num_{kind}_heads"] * head_dim(c) for kind in ("attention", "key_value"))
    yield matrix(f"{prefix}self_attn.qkv_proj", query + 2 * kv, c["hidden_size"], SCORE)
    yield matrix(f"{prefix}self_attn.o_proj", c["hidden_size"], query, 0.4)


def _phi3(name: str, context_length: int, prompt_lengths: tuple[int, ...]) -> TinyFamily:
    """LongRoPE has two tables, and the context that is compiled for decides: so a checkpoint is two goldens."""
    offs = [
        Off("partial_rotary", config={"partial_rotary_factor": 1.0, "rope_scaling": None}),
        Off("rope_scaling", config={"rope_scaling": None}),
    ]
    if context_length > 256:
        same = {"type": "longrope", "short_factor": SHORT, "long_factor": SHORT}
        offs.append(Off("long_factor", config={"rope_scaling": same}))
    return TinyFamily(
        name,
        4,
        config(
            "Phi3ForCausalLM",
            "phi3",
            {**whole(sizes(128, 192, 2, 4, 2, 32)), "max_position_embeddings": 2048},
            tie_word_embeddings=True,
            partial_rotary_factor=0.75,
            original_max_position_embeddings=256,
            rope_scaling={"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
            attention_bias=False,
            sliding_window=262144,
        ),
        context_length=context_length,
        prompt_lengths=prompt_lengths,
        parts=decoder(_fused_attention, fused_mlp),
        offs=tuple(offs),
    )


SHORT = [1.0 + 0.05 * i for i in range(12)]
LONG = [1.0 + 0.4 * i for i in range(12)]


DENSE = (
    TinyFamily(
        "qwen3",
        1,
        config("Qwen3ForCausalLM", "qwen3", sizes(64, 192, 3, 4, 2, 32), rms_norm_eps=1e-6, attention_bias=False),
        parts=decoder(attention(qk_norm=("q_norm", "k_norm"))),
        offs=(QK_NORM, QK_GAIN),
    ),
    TinyFamily(
        "qwen3-yarn",
        2,
        config(
            "Qwen3ForCausalLM",
            "qwen3",
            sizes(64, 192, 2, 4, 1, 32),
            tie_word_embeddings=True,
            rope_scaling=YARN,
            attention_bias=False,
        ),
        parts=decoder(attention(qk_norm=("q_norm", "k_norm"))),
        offs=(
            QK_NORM,
            Off("rope_scaling", config={"rope_scaling": None}),
            Off("attention_factor", config={"rope_scaling": YARN | {"attention_factor": 1.0}}),
        ),
    ),
    _phi3("phi3", 512, (260, 300)),
    _phi3("phi3-short", 256, (7, 33, 70, 250)),
    TinyFamily(
        "granite",
        5,
        config(
            "GraniteForCausalLM",
            "granite",
            whole(sizes(128, 192, 2, 4, 2, 32)),
            tie_word_embeddings=True,
            attention_bias=False,
            mlp_bias=False,
            attention_multiplier=0.25,
            embedding_multiplier=3.0,
            residual_multiplier=0.5,
            logits_scaling=4.0,
        ),
        parts=decoder(attention()),
        offs=(
            Off("attention_scale", config={"attention_multiplier": 32**-0.5}),
            Off("embedding_factor", config={"embedding_multiplier": 1.0}),
            Off("residual_factor", config={"residual_multiplier": 1.0}),
            Off("logits_factor", config={"logits_scaling": 1.0}),
        ),
    ),
    TinyFamily(
        "smollm3",
        6,
        config(
            "SmolLM3ForCausalLM",
            "smollm3",
            whole(sizes(128, 192, 4, 4, 2, 32)),
            tie_word_embeddings=True,
            attention_bias=False,
            mlp_bias=False,
            no_rope_layers=[1, 1, 1, 0],
            no_rope_layer_interval=4,
            use_sliding_window=False,
            sliding_window=None,
        ),
        parts=decoder(attention()),
        offs=(Off("no_rope", config={"no_rope_layers": [1, 1, 1, 1]}),),
    ),
    TinyFamily(
        "ministral3",
        10,
        config(
            "Ministral3ForCausalLM",
            "ministral3",
            sizes(64, 192, 2, 4, 2, 32),
            sliding_window=None,
            rope_parameters={
                **YARN,
                "type": "yarn",
                "rope_theta": 10000.0,
                **BETAS,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        ),
        parts=decoder(attention()),
        offs=(
            Off("temperature", config={"rope_parameters|llama_4_scaling_beta": 0.0}),
            Off("rope_scaling", config={"rope_parameters|factor": 1.0}),
        ),
    ),
    TinyFamily(
        "hunyuan_v1_dense",
        12,
        config(
            "HunYuanDenseV1ForCausalLM",
            "hunyuan_v1_dense",
            sizes(64, 192, 2, 4, 2, 32),
            tie_word_embeddings=True,
            attention_bias=False,
            use_qk_norm=True,
            rope_scaling={
                "type": "dynamic",
                "alpha": 1000.0,
                "factor": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        ),
        parts=decoder(attention(qk_norm=("query_layernorm", "key_layernorm"))),
        offs=(
            Off("qk_norm", modules=r"(query|key)_layernorm$"),
            Off("qk_gain", tensors={"(query|key)_layernorm": 1.5}),
            Off("rope_scaling", config={"rope_scaling": None}),
        ),
    ),
    TinyFamily(
        "seed_oss",
        13,
        config(
            "SeedOssForCausalLM",
            "seed_oss",
            sizes(64, 192, 2, 4, 2, 32),
            attention_bias=True,
            attention_out_bias=False,
            mlp_bias=False,
            attention_dropout=0.1,
            residual_dropout=0.1,
            rope_scaling={"rope_type": "default"},
        ),
        parts=decoder(attention(biases=QKV)),
        offs=(QKV_BIAS,),
    ),
    TinyFamily(
        "ernie4_5",
        14,
        config(
            "Ernie4_5ForCausalLM",
            "ernie4_5",
            sizes(64, 192, 2, 4, 2, 32),
            tie_word_embeddings=True,
            use_bias=False,
            compression_ratio=1.0,
        ),
        parts=decoder(attention()),
        offs=(Off("pairs", functions={"rotate_half": "llama"}),),
    ),
)
