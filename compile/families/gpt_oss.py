"""gpt-oss (OpenAI, 2025): experts with biases, a window in every other layer, and a sink for each head."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace
from radixlm.runtime.artifact.model_config import LayerConfig, Rope, Router, YarnScaling
from radixlm.runtime.errors import UnsupportedArchitecture

from ..layers.decoder import Decoder
from ..layers.feed_forward import ExpertsFeedForward
from ..weights.view import View
from .family import Family, Format, Views
from .settings import Settings

_LIMIT, _SLOPE = 7.0, 1.702  # limit and slope of `swiglu_clamped`


class GptOss(Family):
    """gpt-oss: a checkpoint interleaves gates and `up`; rows are outputs in MXFP4, and inputs in bfloat16."""

    title = "gpt-oss"
    huggingface = {"GptOssForCausalLM": "gpt_oss"}
    gguf = ("gpt-oss",)
    defaults = {
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128,
    }
    names = {"router": "mlp.router.weight"}
    gguf_names = {"ffn_norm": "post_attention_norm.weight"}
    transposed = ("*.experts.gate_up_proj", "*.experts.down_proj")
    flat = ("*.experts.gate_up_proj_bias",)

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`; weights of experts are a softmax of the selected logits."""
        if (c("swiglu_limit", _LIMIT), c("swiglu_alpha", _SLOPE)) != (_LIMIT, _SLOPE):
            raise UnsupportedArchitecture(
                f"{c.label}: swiglu_limit {c('swiglu_limit')} and swiglu_alpha {c('swiglu_alpha')} are not supported, "
                f"only gpt-oss's {_LIMIT} and {_SLOPE}"
            )
        attention = c.attention(
            rope=_rope(c),
            window=c("sliding_window") if c.slides(index, full_every=2) else None,
            bias=True,
            output_bias=True,
            sinks=True,
        )
        experts = c.experts(
            intermediate_size=c.number("moe_intermediate_size", c("intermediate_size")),
            function="swiglu_clamped",
            bias=True,
            router=Router(scores="softmax_of_chosen", bias=True),
        )
        return LayerConfig(mixer=attention, ffn=experts)

    def fused(self, decoder: Decoder, format_: Format) -> Mapping[str, Views]:
        """Return views of gates and `up`, which are every other row."""
        found: dict[str, Views] = {}
        for index, layer in enumerate(decoder.layers):
            assert isinstance(layer.mlp, ExpertsFeedForward) and layer.mlp.spec.gate is not None
            stem, spec = f"model.layers.{index}.mlp.experts.", layer.mlp.spec
            found |= {
                layer.mlp.spec.gate.name: (View(f"{stem}gate_up_proj.weight", step=2),),
                layer.mlp.spec.gate.bias_name: (View(f"{stem}gate_up_proj_bias", step=2),),
                spec.up.name: (View(f"{stem}gate_up_proj.weight", start=1, step=2),),
                spec.up.bias_name: (View(f"{stem}gate_up_proj_bias", start=1, step=2),),
                spec.down.name: (View(f"{stem}down_proj.weight"),),
                spec.down.bias_name: (View(f"{stem}down_proj_bias"),),
            }
        return found if format_ == "huggingface" else {}


def _rope(c: Settings) -> Rope:
    """Return the rotary positions. A GGUF file does not say that YaRN's limits are not rounded."""
    rope = c.rope()
    if c.format == "gguf" and isinstance(rope.scaling, YarnScaling):
        rope = replace(rope, scaling=replace(rope.scaling, truncate=False))
    return rope
