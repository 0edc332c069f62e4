"""Qwen3-Next (Alibaba, 2025), and the language models of Qwen3.5 to 3.8 (2026), dense and with experts.

There are three layers of the gated delta rule for each layer of attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from radixlm.runtime.artifact.model_config import (
    Attention,
    Dense,
    Experts,
    Gate,
    GatedDelta,
    LayerConfig,
    Mixer,
    QKNorm,
    Router,
    SharedExpert,
)

from ...layers.attention import SelfAttention
from ...layers.decoder import Decoder
from ...layers.recurrent import GatedDeltaMixer
from ...weights.view import View
from ..family import Family, Format, Views
from ..settings import Settings


class Qwen35(Family):
    """Qwen3.5: rows of a head's query and its gate are adjacent in one matrix.

    A checkpoint stores the gains of all norms but one minus one.
    """

    title = "Qwen3.5, 3.6 and 3.8"
    huggingface = {"Qwen3_5ForCausalLM": "qwen3_5_text", "Qwen3_5ForConditionalGeneration": "qwen3_5"}
    gguf = ("qwen35",)
    defaults = {
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
    gguf_names = {"ffn_norm": "post_attention_norm.weight"}
    ignored = ("mtp.*",)
    has_extra_layers = True
    mtp_names = {
        "": "mtp.layers.0.",
        "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "eh_proj.weight": "mtp.fc.weight",
        "shared_head.norm.weight": "mtp.norm.weight",
    }
    gains_minus_one = ("huggingface",)
    plain_gains = ("linear_attn.norm.weight",)
    is_tiled: ClassVar[bool] = True  # true for GGUF files, in which llama.cpp's converter reorders value heads

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`: the delta rule or attention, and a feed-forward layer."""
        return LayerConfig(mixer=self.mixer(c, index), ffn=self.ffn(c, index))

    def mixer(self, c: Settings, index: int) -> Mixer:
        """Return the mixer: by declared type, or attention in each `full_attention_interval`th layer."""
        if c("layer_types"):
            has_attention = c.layer_is("layer_types", index, {"full_attention": True, "linear_attention": False})
        else:
            has_attention = (index + 1) % int(c.number("full_attention_interval", 4)) == 0
        return self.attention(c) if has_attention else delta(c, tiled=self.is_tiled and c.format == "gguf")

    def attention(self, c: Settings) -> Attention:
        """Return attention with an elementwise output gate."""
        bias = c.has_bias("attn_q", otherwise=bool(c("attention_bias")))
        output_bias = c.has_bias("attn_output", otherwise=bias)
        return c.attention(qk_norm=QKNorm(), gate=Gate(bias=bias), bias=bias, output_bias=output_bias)

    def mtp_layer(self, c: Settings, index: int) -> LayerConfig:
        """Return the layer of the MTP head, which always has attention."""
        return LayerConfig(mixer=self.attention(c), ffn=self.ffn(c, index))

    def ffn(self, c: Settings, index: int) -> Dense | Experts:
        """Return Llama's feed-forward layer."""
        return c.dense()

    def fused(self, decoder: Decoder, format_: Format) -> Mapping[str, Views]:
        """Return views of queries and gates by head, and of rates.

        A GGUF file has rates as they are used, a checkpoint their logarithms.
        """
        views: dict[str, Views] = {}
        for layer in decoder.all_layers:
            mixer = layer.self_attn
            if isinstance(mixer, SelfAttention):
                views |= _queries_and_gates(decoder, mixer, format_)
            if isinstance(mixer, GatedDeltaMixer) and format_ == "huggingface":
                views[mixer.spec.rate.name] = (View(mixer.spec.rate.name, minus_exp=True),)
        return views


class Qwen35MoE(Qwen35):
    """Qwen3.5 with experts in every layer, and one that every token passes through a gate."""

    title = "Qwen3.5 and 3.6 MoE"
    huggingface = {
        "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
        "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    }
    gguf = ("qwen35moe",)

    def ffn(self, c: Settings, index: int) -> Dense | Experts:
        """Return Qwen2 MoE's experts."""
        return experts(c, renormalise=True)


class Qwen3Next(Qwen35):
    """Qwen3-Next: a checkpoint stores inputs of the delta rule by key head; a GGUF file does so for b and a."""

    title = "Qwen3-Next (also Qwen3-Coder-Next)"
    huggingface = {"Qwen3NextForCausalLM": "qwen3_next"}
    gguf = ("qwen3next",)
    is_tiled = False

    def ffn(self, c: Settings, index: int) -> Dense | Experts:
        """Return the feed-forward layer of layer `index`; some may be dense."""
        step = c("decoder_sparse_step", 1)
        if index in c("mlp_only_layers", ()) or step < 1 or (index + 1) % step:
            return c.dense()
        return experts(c, renormalise=c("norm_topk_prob", True))

    def fused(self, decoder: Decoder, format_: Format) -> Mapping[str, Views]:
        """Split stored matrices of the delta rule, which have one key head after the other, into the model's own.

        A checkpoint has one matrix of queries, keys, values and gates. All files have one of `b` and `a`, the inputs of
        beta and of the decay.
        """
        views = dict(super().fused(decoder, format_))
        for index, layer in enumerate(decoder.layers):
            mixer = layer.self_attn
            if not isinstance(mixer, GatedDeltaMixer):
                continue
            delta = mixer.delta
            shared = delta.num_value_heads // delta.num_key_heads
            at, joined = f"model.layers.{index}.linear_attn.", f"blk.{index}.ssm_ba.weight"
            joined = joined if format_ == "gguf" else f"{at}in_proj_ba.weight"
            b, a = _by_key_head(joined, delta.num_key_heads, (shared, shared))
            views |= {mixer.b_proj.name: b, mixer.a_proj.name: a}
            if format_ == "huggingface":
                wide = shared * delta.value_dim
                sizes = (delta.key_dim, delta.key_dim, wide, wide)
                q, k, v, z = _by_key_head(f"{at}in_proj_qkvz.weight", delta.num_key_heads, sizes)
                views |= {mixer.qkv_proj.name: (*q, *k, *v), mixer.gate_proj.name: z}
        return views


def _by_key_head(stored: str, num_heads: int, sizes: tuple[int, ...]) -> Iterator[Views]:
    """Yield the views of each part, whose rows are interleaved by head; `sizes` are the rows of each part of a head."""
    for part, size in enumerate(sizes):
        starts = range(sum(sizes[:part]), num_heads * sum(sizes), sum(sizes))
        yield tuple(View(stored, start, start + size) for start in starts)


def experts(c: Settings, *, renormalise: bool) -> Experts:
    """Return experts, with one that every token passes through a gate."""
    size = c("shared_expert_intermediate_size")
    shared = SharedExpert(intermediate_size=size, gate=True) if size else None
    return c.experts(router=Router(renormalise=renormalise), shared=shared)


def delta(c: Settings, *, tiled: bool) -> GatedDelta:
    """Return the delta rule of these sizes; `tiled` is the order of its heads."""
    num_keys = c.number("linear_num_key_heads", c("ssm.group_count"))
    num_values = c.number("linear_num_value_heads", c("ssm.time_step_rank"))
    inner = c("ssm.inner_size")
    return GatedDelta(
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_dim=c.number("linear_key_head_dim", c("ssm.state_size")),
        value_dim=c.number("linear_value_head_dim", None if inner is None else inner // max(1, num_values)),
        kernel_size=c.number("linear_conv_kernel_dim", c("ssm.conv_kernel")),
        tiled=tiled and num_keys != num_values,
    )


def _queries_and_gates(decoder: Decoder, mixer: SelfAttention, format_: Format) -> Mapping[str, Views]:
    """Return views of queries and gates: a head's rows of `q_proj` are its query's, then its gate's."""
    assert mixer.gate_proj is not None
    pairs = [(mixer.q_proj.name, mixer.gate_proj.name), (mixer.q_proj.bias_name, mixer.gate_proj.bias_name)]
    size, views = mixer.attention.head_dim, {}
    for query, gate in pairs:
        stored = decoder.names.gguf_of[query] if format_ == "gguf" else query
        starts = range(0, 2 * size * mixer.attention.num_heads, 2 * size)
        views[query] = tuple(View(stored, start, start + size) for start in starts)
        views[gate] = tuple(View(stored, start + size, start + 2 * size) for start in starts)
    return views
