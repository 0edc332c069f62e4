"""StableLM and Cohere 2: LayerNorm, and blocks where attention and feed-forward stand side by side."""

from __future__ import annotations

from collections.abc import Iterator

from ..tiny_models import Part
from .family import Config, Off, TinyFamily
from .parts import NO_WINDOW, PRE, QKV, QKV_BIAS, attention, config, decoder, gain, head_dim, sizes, whole


def _stablelm_norms(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    """StableLM 2 12B: a LayerNorm without bias for each head of queries and of keys."""
    yield from attention()(c, layer, prefix)
    for name, heads in (("q", c["num_attention_heads"]), ("k", c["num_key_value_heads"])):
        for head in range(heads):
            yield gain(f"{prefix}self_attn.{name}_layernorm.norms.{head}", head_dim(c), 1.5)


def _stablelm(name: str, seed: int, parallel: bool) -> TinyFamily:
    layer_norm = {"rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5}
    off_bias = Off("norm_bias", tensors={r"norm\.bias": 0.0})
    return TinyFamily(
        name,
        seed,
        config(
            "StableLmForCausalLM",
            "stablelm",
            whole(sizes(128, 192, 2, 4, 2, 32)),
            **layer_norm,
            partial_rotary_factor=0.25,
            use_qkv_bias=not parallel,
            qk_layernorm=parallel,
            use_parallel_residual=parallel,
        ),
        parts=decoder(
            _stablelm_norms if parallel else attention(biases=QKV),
            norms=PRE[:1] if parallel else PRE,
            norm_bias=True,
        ),
        offs=(
            off_bias,
            Off("partial_rotary", config={"partial_rotary_factor": 1.0}),
            *(
                (Off("qk_norm", modules=r"[qk]_layernorm$"), Off("qk_gain", tensors={"k_layernorm": 1.5}))
                if parallel
                else (QKV_BIAS,)
            ),
        ),
    )


LAYER_NORMS = (
    _stablelm("stablelm", 15, parallel=False),
    _stablelm("stablelm-parallel", 16, parallel=True),
    TinyFamily(
        "cohere2",
        17,
        config(
            "Cohere2ForCausalLM",
            "cohere2",
            whole(sizes(128, 192, 4, 4, 2, 32)),
            tie_word_embeddings=True,
            attention_bias=False,
            layer_norm_eps=1e-5,
            layer_switch=4,
            logit_scale=0.25,
            sliding_window=16,
            sliding_window_pattern=4,
            position_embedding_type="rope_gptj",
            rotary_pct=1.0,
            use_qk_norm=False,
        ),
        parts=decoder(attention(), norms=PRE[:1]),
        offs=(
            NO_WINDOW,
            Off("logits_factor", config={"logit_scale": 1.0}),
            Off("pairs", functions={"rotate_half": "llama"}),
        ),
    ),
)
