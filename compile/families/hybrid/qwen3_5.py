"""Qwen3.5 to 3.8 (Alibaba, 2026), the language model: three layers of the gated delta rule to one of attention."""

from __future__ import annotations

from collections.abc import Mapping

from radixlm.runtime.artifact.model_config import Dense, Experts, Gate, GatedDelta, LayerConfig, Mixer, QKNorm

from ...layers.attention import SelfAttention
from ...layers.decoder import Decoder
from ...layers.gated_delta import GatedDeltaMixer
from ...weights.view import View
from ..family import Family, Format, Views
from ..settings import Settings


class Qwen35(Family):
    """A head's query and its gate are neighbours in one matrix; a checkpoint stores norms, but one, less one."""

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
    ignored = ("model.visual.*", "mtp.*")
    has_extra_layers = True
    gains_minus_one = ("huggingface",)
    plain_gains = ("linear_attn.norm.weight",)

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """The delta rule or attention, and a feed-forward layer."""
        return LayerConfig(mixer=self.mixer(c, index), ffn=self.ffn(c, index))

    def mixer(self, c: Settings, index: int) -> Mixer:
        """By declared types, or attention in each `full_attention_interval`th layer."""
        if c("layer_types"):
            has_attention = c.of_layer("layer_types", index) == "full_attention"
        else:
            has_attention = (index + 1) % int(c.number("full_attention_interval", 4)) == 0
        if has_attention:
            bias = c.has_bias("attn_q", otherwise=bool(c("attention_bias")))
            return c.attention(qk_norm=QKNorm(), gate=Gate(), bias=bias)
        return delta(c, tiled=c.format == "gguf")

    def ffn(self, c: Settings, index: int) -> Dense | Experts:
        """Llama's."""
        return c.dense()

    def fused(self, decoder: Decoder, format_: Format) -> Mapping[str, Views]:
        """Queries and gates by heads; a GGUF file has rates as they are used, a checkpoint their logarithms."""
        views: dict[str, Views] = {}
        for layer in decoder.layers:
            mixer = layer.self_attn
            if isinstance(mixer, SelfAttention):
                views |= _queries_and_gates(decoder, mixer, format_)
            if isinstance(mixer, GatedDeltaMixer) and format_ == "huggingface":
                views[mixer.spec.rate.name] = (View(mixer.spec.rate.name, minus_exp=True),)
        return views


def delta(c: Settings, *, tiled: bool) -> GatedDelta:
    """The delta rule of these sizes; `tiled` says how its heads are ordered."""
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
    """A head's rows of `q_proj` are its query's, and then its gate's."""
    assert mixer.gate_proj is not None
    pairs = [(mixer.q_proj.name, mixer.gate_proj.name), (mixer.q_proj.bias_name, mixer.gate_proj.bias_name)]
    size, views = mixer.attention.head_dim, {}
    for query, gate in pairs:
        stored = decoder.names.gguf_of[query] if format_ == "gguf" else query
        starts = range(0, 2 * size * mixer.attention.num_heads, 2 * size)
        views[query] = tuple(View(stored, start, start + size) for start in starts)
        views[gate] = tuple(View(stored, start + size, start + 2 * size) for start in starts)
    return views
