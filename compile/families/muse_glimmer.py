"""Muse Glimmer (Meta, 2026): norms around each branch, gated attention, and windows beside layers without positions."""

from __future__ import annotations

from radixlm.runtime.artifact.model_config import Gate, LayerConfig, ModelConfig, QKNorm

from .family import Family
from .settings import Settings

# Of the released model, where a file does not say it.
_QUERY_FACTOR, _LOGITS_FACTOR, _SOFT_CAP, _POST_NORM_EPS = 3.87, 0.19611613513818404, 20.0, 1e-8


class MuseGlimmer(Family):
    """Counted from the last, every fourth layer sees everything. The last norm's gains are stored as they are.

    A GGUF file gives the norms of heads gains, those of queries with their factor; rotated layers are those that slide.
    """

    title = "Muse Glimmer"
    huggingface = {"MuseGlimmerForConditionalGeneration": "muse_glimmer"}
    gguf = ("muse-glimmer",)
    defaults = {
        "rms_norm_eps": 1e-5,
        "sliding_window": 2048,
    }
    names = {"ffn_norm": "pre_feedforward_layernorm.weight"}
    ignored = tuple(f"{before}{part}.*" for before in ("", "model.") for part in ("vision_tower", "mm_projector"))
    neighbouring_pairs = ("gguf",)
    gains_minus_one = ("huggingface",)
    plain_gains = ("model.norm.weight",)

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Heads are normalized without gain; queries are multiplied with `qk_scale_factor` then."""
        c.refuse("attention_bias")
        is_fourth = (c.num_layers - 1 - index) % 4 == 0
        is_declared = c("layer_types") or c("sliding_window_pattern") is not None
        slides = c.slides(index, full_every=4) if is_declared else not is_fourth
        thetas = c("layer_rope_theta")
        has_rope = bool(thetas[index]) if thetas else slides if c.format == "gguf" else not is_fourth
        has_gain = "blk.0.attn_q_norm.weight" in c.stored
        attention = c.attention(
            window=c("sliding_window") if slides else None,
            rope=c.rope() if has_rope else None,
            qk_norm=QKNorm(has_gain=has_gain),
            scale=(1.0 if has_gain else c.number("qk_scale_factor", _QUERY_FACTOR)) * c.head_dim**-0.5,
            gate=Gate(),
        )
        return LayerConfig(
            mixer=attention, ffn=c.dense(), norms="sandwich", post_norm_eps=c("post_norm_eps", _POST_NORM_EPS)
        )

    def config(self, c: Settings) -> ModelConfig:
        """Embeddings are normalized, logits multiplied and soft-capped."""
        return c.model(
            lambda index: self.layer(c, index),
            embedding_norm=True,
            logits_factor=c("output_multiplier", c("logits_scaling", _LOGITS_FACTOR)),
            logits_soft_cap=c("final_logit_softcapping", _SOFT_CAP),
        )
