"""The language model of Llama 4, and Muse Glimmer (Meta, 2025 and 2026): local layers, and layers without RoPE.

Local layers of Llama 4 see chunks, and have experts. Those of Muse Glimmer see windows, with norms around each branch,
and gate attention.
"""

from __future__ import annotations

from radixlm.runtime.artifact.model_config import (
    Attention,
    Gate,
    LayerConfig,
    ModelConfig,
    QKNorm,
    Router,
    SharedExpert,
    Temperature,
)
from radixlm.runtime.errors import CorruptSource, UnsupportedArchitecture

from .family import Family
from .settings import Settings

_MOST_POSITIONS = 1 << 22  # limit of manifests
_PARTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


class Llama4(Family):
    """Llama 4: neighbours rotate. An expert's score multiplies its input; every token passes a shared expert, too.

    Rows of a checkpoint's stacks of experts are inputs. A GGUF file has no keys for chunks, temperatures and layers
    without positions; those of the released models are assumed.
    """

    title = "Llama 4 (text)"
    huggingface = {"Llama4ForCausalLM": "llama4_text", "Llama4ForConditionalGeneration": "llama4"}
    gguf = ("llama4",)
    defaults = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "head_dim": 128}
    names = {
        "router": "feed_forward.router.weight",
        **{role: f"feed_forward.{part}.weight" for role, part in _PARTS.items()},
        **{f"expert_{role}": f"feed_forward.experts.{part}.weight" for role, part in _PARTS.items()},
        **{f"shared_{role}": f"feed_forward.shared_expert.{part}.weight" for role, part in _PARTS.items()},
    }
    transposed = ("*.experts.gate_up_proj", "*.experts.down_proj")
    neighbouring_pairs = ("huggingface", "gguf")

    def config(self, c: Settings) -> ModelConfig:
        """Return the model. Scout declares 10,485,760 positions; at most 4,194,304 are compiled."""
        length = min(c.number("max_position_embeddings"), _MOST_POSITIONS)
        return c.model(self.layer, max_position_embeddings=length)

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`; every `interleave_moe_layer_step`th has experts, unless `moe_layers` lists them."""
        of_experts = c("moe_layers")
        has_experts = not (index + 1) % _step(c) if of_experts is None else index in of_experts
        if not has_experts:
            return LayerConfig(
                mixer=_attention(c, index),
                ffn=c.dense(intermediate_size=c("intermediate_size_mlp", c("intermediate_size"))),
            )
        size = c.number("moe_intermediate_size", c("intermediate_size"))
        experts = c.experts(
            intermediate_size=size,
            num_active=c.number("num_experts_per_tok", 1),
            router=Router(scores="sigmoid_of_chosen"),
            shared=SharedExpert(intermediate_size=size),
            input_scaled=True,
        )
        return LayerConfig(mixer=_attention(c, index), ffn=experts)


def _step(c: Settings) -> int:
    """Return the interval of layers with experts. Raises CorruptSource if it is below 1."""
    step = c.number("interleave_moe_layer_step", 1)
    if step < 1:
        raise CorruptSource(f"{c.label}: interleave_moe_layer_step is {step}, must be 1 or more")
    return int(step)


def _attention(c: Settings, index: int) -> Attention:
    """Return the attention of layer `index`, with heads normalized after the rotation.

    Queries without positions get a temperature that grows with their position.
    """
    if c("attention.sliding_window") == 0:
        raise UnsupportedArchitecture(f"{c.label}: a llama4 without chunks is not supported; take another model")
    has_rope = bool((index + 1) % c.number("no_rope_layer_interval", 4))
    if c("no_rope_layers"):
        has_rope = bool(c.of_layer("no_rope_layers", index))
    sees_chunk = has_rope
    if c("layer_types"):
        sees_chunk = c.layer_is("layer_types", index, {"chunked_attention": True, "full_attention": False})
    # llama.cpp detects by the number of experts that Maverick has no such norms
    has_norm = c("use_qk_norm", not (c.format == "gguf" and c("num_local_experts") == 128))
    temperature = None
    if not has_rope and c("attn_temperature_tuning", True):
        beta, length = c.number("attn_scale", 0.1), c.number("floor_scale", 8192)
        temperature = Temperature(beta=beta, original_length=length, shift=1)
    return c.attention(
        rope=c.rope() if has_rope else None,
        chunk=c.number("attention_chunk_size", 8192) if sees_chunk else None,
        qk_norm=QKNorm(has_gain=False, after_rope=True) if has_rope and has_norm else None,
        temperature=temperature,
        bias=c.has_bias("attn_q", otherwise=bool(c("attention_bias"))),
        output_bias=c.has_bias("attn_output", otherwise=bool(c("attention_bias"))),
    )


# values of the released Muse Glimmer, for files that lack them
_QUERY_FACTOR, _LOGITS_FACTOR, _SOFT_CAP, _POST_NORM_EPS = 3.87, 0.19611613513818404, 20.0, 1e-8


class MuseGlimmer(Family):
    """Muse Glimmer: counted from the last, every fourth layer has full attention.

    The last norm's gains are stored unchanged. In a GGUF file, the norms of heads have gains, and those of queries
    include their factor; rotated layers are those with a window.
    """

    title = "Muse Glimmer"
    huggingface = {"MuseGlimmerForConditionalGeneration": "muse_glimmer"}
    gguf = ("muse-glimmer",)
    defaults = {
        "rms_norm_eps": 1e-5,
        "sliding_window": 2048,
    }
    names = {"ffn_norm": "pre_feedforward_layernorm.weight"}
    neighbouring_pairs = ("gguf",)
    gains_minus_one = ("huggingface",)
    plain_gains = ("model.norm.weight",)

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`: heads are normalized without gain, then queries are multiplied by `qk_scale_factor`."""
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
        """Return the model: embeddings are normalized, logits multiplied and soft-capped."""
        return c.model(
            self.layer,
            embedding_norm=True,
            logits_factor=c("output_multiplier", c("logits_scaling", _LOGITS_FACTOR)),
            logits_soft_cap=c("final_logit_softcapping", _SOFT_CAP),
        )
