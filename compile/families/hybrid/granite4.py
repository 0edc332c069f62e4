"""Granite 4-H (IBM, 2025), dense and with experts: Mamba-2, and attention in some layers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from radixlm.runtime.artifact.model_config import Dense, Experts, LayerConfig, Mamba2, Mixer, Router, SharedExpert

from ...layers.decoder import Decoder
from ...layers.feed_forward import DenseFeedForward, ExpertsFeedForward
from ...layers.recurrent import Mamba2Mixer
from ...weights.view import View
from ..family import Format, Views, fused_expert_gate_up, parts_of
from ..granite import Granite
from ..settings import Settings

# Values that mean attention: of older files, and of newer ones.
_KINDS = {"attention": True, "full_attention": True, "mamba": False, "linear_attention": False}


class Granite4H(Granite):
    """Granite 4-H: Granite's multipliers. The inputs of Mamba-2 are one matrix, gates and `up` one in a checkpoint."""

    title = "Granite 4-H"
    huggingface = {"GraniteMoeHybridForCausalLM": "granitemoehybrid"}
    gguf = ("granitehybrid",)
    defaults = {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
    }
    names = {
        "gate": "shared_mlp.gate_proj.weight",
        "up": "shared_mlp.up_proj.weight",
        "down": "shared_mlp.output_linear.weight",
        "router": "block_sparse_moe.router.layer.weight",
        "expert_gate": "block_sparse_moe.experts.gate_proj.weight",
        "expert_up": "block_sparse_moe.experts.up_proj.weight",
        "expert_down": "block_sparse_moe.experts.down_proj.weight",
        "shared_gate": "shared_mlp.gate_proj.weight",
        "shared_up": "shared_mlp.up_proj.weight",
        "shared_down": "shared_mlp.output_linear.weight",
    }

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`: Mamba-2 or attention, and a feed-forward layer."""
        return LayerConfig(mixer=self.mixer(c, index), ffn=self.ffn(c))

    def mixer(self, c: Settings, index: int) -> Mixer:
        """Return the mixer of layer `index`; a GGUF file says 0 KV heads for layers without attention."""
        kv_heads = c.of_layer("num_key_value_heads", index, c("num_attention_heads"))
        if c("layer_types"):
            has_attention = c.layer_is("layer_types", index, _KINDS)
        elif c("layers_block_type"):
            has_attention = c.layer_is("layers_block_type", index, _KINDS)
        else:
            has_attention = c.format == "gguf" and bool(kv_heads)
        if not has_attention:
            return mamba(c)
        has_rope = c("rope.scaling.finetuned") if c.format == "gguf" else c("position_embedding_type") == "rope"
        scale = c.number("attention_multiplier", 1.0 if c.format == "huggingface" else c.head_dim**-0.5)
        bias = bool(c("attention_bias"))
        return c.attention(
            num_kv_heads=kv_heads, scale=scale, rope=c.rope() if has_rope else None, bias=bias, output_bias=bias
        )

    def ffn(self, c: Settings) -> Dense | Experts:
        """Return experts with a shared one that every token passes; without experts, the shared one alone."""
        gguf_shared = c("shared_expert_intermediate_size", c("intermediate_size"))
        shared = gguf_shared if c.format == "gguf" else c.number("shared_intermediate_size")
        if not c("num_local_experts"):
            return c.dense(intermediate_size=shared)
        size = c.number("moe_intermediate_size", c.number("intermediate_size"))
        return c.experts(
            intermediate_size=size,
            router=Router(scores="softmax_of_chosen"),
            shared=SharedExpert(intermediate_size=shared),
        )

    def fused(self, decoder: Decoder, format_: Format) -> Mapping[str, Views]:
        """Split Mamba-2's stored input matrix into gates, convolved parts and steps.

        A checkpoint has the logarithms of rates, which are converted.
        """
        views: dict[str, Views] = {}
        for index, layer in enumerate(decoder.layers):
            mixer, at = layer.self_attn, f"model.layers.{index}."
            if isinstance(mixer, Mamba2Mixer):
                stored = f"blk.{index}.ssm_in.weight" if format_ == "gguf" else f"{at}mamba.in_proj.weight"
                views |= dict(parts_of(stored, mixer.stored))
                if format_ == "huggingface":
                    views[mixer.spec.rate.name] = (View(mixer.spec.rate.name, minus_exp=True),)
            if format_ == "gguf":
                continue
            mlp = layer.mlp
            shared = mlp.shared if isinstance(mlp, ExpertsFeedForward) else mlp
            if isinstance(shared, DenseFeedForward):
                views |= dict(parts_of(f"{at}shared_mlp.input_linear.weight", shared.inputs))
            if isinstance(mlp, ExpertsFeedForward):
                stem = f"{at}block_sparse_moe."
                views |= fused_expert_gate_up(f"{stem}input_linear.weight", f"{stem}output_linear.weight", mlp)
        return views


def mamba(c: Settings) -> Mamba2:
    """Return Mamba-2 of these sizes."""
    lowest, highest = c("time_step_limit") or (None, None)
    if (lowest or 0.0) > 0.0 or highest not in (None, math.inf):  # steps are a softplus, so above zero
        c.refuse("time_step_limit")
    heads = c.number("mamba_n_heads", c("ssm.time_step_rank"))
    inner = c("ssm.inner_size", c.number("mamba_expand", 2) * c.number("hidden_size"))
    declared = c("mamba_d_head", "auto")
    return Mamba2(
        num_heads=heads,
        head_dim=inner // max(1, heads) if declared == "auto" else declared,
        num_groups=c.number("mamba_n_groups", c("ssm.group_count")),
        state_dim=c.number("mamba_d_state", c("ssm.state_size")),
        kernel_size=c.number("mamba_d_conv", c("ssm.conv_kernel")),
        bias=bool(c("mamba_proj_bias")),
        convolution_bias=_has_convolution_bias(c),
    )


def _has_convolution_bias(c: Settings) -> bool:
    """Return whether Mamba-2's convolution has a bias."""
    if c.format == "gguf":
        return any(name.endswith(".ssm_conv1d.bias") for name in c.stored)
    return bool(c("mamba_conv_bias", True))
