"""Muse Glimmer (Meta, 2026): norms around each branch, gated attention, and windows beside layers without positions."""

from __future__ import annotations

from radixlm.runtime.artifact.model_config import Gate, LayerConfig, ModelConfig, QKNorm

from .family import Family
from .settings import Settings


class MuseGlimmer(Family):
    """Counted from the last, every fourth layer sees everything. The last norm's gains are stored as they are."""

    title = "Muse Glimmer"
    huggingface = {"MuseGlimmerForConditionalGeneration": "muse_glimmer"}
    defaults = {
        "rms_norm_eps": 1e-5,
        "sliding_window": 2048,
        "final_logit_softcapping": 20.0,
        "qk_scale_factor": 3.87,
        "output_multiplier": 0.19611613513818404,
        "post_norm_eps": 1e-8,
    }
    names = {"ffn_norm": "pre_feedforward_layernorm.weight"}
    ignored = tuple(f"{before}{part}.*" for before in ("", "model.") for part in ("vision_tower", "mm_projector"))
    gains_minus_one = ("huggingface",)
    plain_gains = ("model.norm.weight",)

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Heads are normalized without gain; queries are multiplied with `qk_scale_factor` then."""
        c.refuse("attention_bias")
        is_fourth = (c.num_layers - 1 - index) % 4 == 0
        types = c("layer_types")
        slides = types[index] == "sliding_attention" if types else not is_fourth
        thetas = c("layer_rope_theta")
        has_rope = bool(thetas[index]) if thetas else not is_fourth
        attention = c.attention(
            window=c("sliding_window") if slides else None,
            rope=c.rope() if has_rope else None,
            qk_norm=QKNorm(has_gain=False),
            scale=c.number("qk_scale_factor") * c.head_dim**-0.5,
            gate=Gate(),
        )
        return LayerConfig(mixer=attention, ffn=c.dense(), norms="sandwich", post_norm_eps=c("post_norm_eps"))

    def config(self, c: Settings) -> ModelConfig:
        """Embeddings are normalized, logits multiplied and soft-capped."""
        return c.model(
            lambda index: self.layer(c, index),
            embedding_norm=True,
            logits_factor=c("output_multiplier"),
            logits_soft_cap=c("final_logit_softcapping"),
        )
