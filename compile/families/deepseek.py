"""DeepSeek V2 and V3 (2024), GLM-4.7-Flash (Z.ai) and Mistral Small 4 (2026): latent attention and experts.

llama.cpp calls all but Mistral's `deepseek2`; the scoring function of the experts tells them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from msgspec.structs import replace
from radixlm.runtime.artifact.model_config import (
    LatentAttention,
    LayerConfig,
    Rope,
    Router,
    SharedExpert,
    YarnScaling,
)
from radixlm.runtime.errors import UnsupportedArchitecture

from ..layers.decoder import Decoder
from ..layers.feed_forward import ExpertsFeedForward
from ..ops.rope_frequencies import MAGNITUDE, yarn_magnitude
from .family import Family, Format, Views, fused_expert_gate_up
from .mistral import temperature
from .settings import Settings

_SIGMOID = 2  # `expert_gating_func` of GGUF


class DeepSeekV3(Family):
    """DeepSeek V3: expert scores are sigmoids, and a bias affects the selection only.

    Groups of experts are selected first, by the sum of their best two scores.
    """

    title = "DeepSeek V3"
    huggingface = {"DeepseekV3ForCausalLM": "deepseek_v3"}
    gguf = ("deepseek2",)
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_attention_heads": 128,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
    }
    names = {
        "shared_gate": "mlp.shared_experts.gate_proj.weight",
        "shared_up": "mlp.shared_experts.up_proj.weight",
        "shared_down": "mlp.shared_experts.down_proj.weight",
    }
    neighbouring_pairs = ("huggingface", "gguf")
    has_extra_layers = True

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`; the first layers are dense."""
        mixer = latent_attention(c)
        if self.is_dense(c, index):
            return LayerConfig(mixer=mixer, ffn=c.dense())
        num_shared = c("n_shared_experts", 0)
        shared = SharedExpert(intermediate_size=c.number("moe_intermediate_size") * num_shared) if num_shared else None
        return LayerConfig(mixer=mixer, ffn=c.experts(router=self.router(c), shared=shared))

    def is_dense(self, c: Settings, index: int) -> bool:
        """Return whether a layer has no experts."""
        return bool(index < c.number("first_k_dense_replace", 0))

    def router(self, c: Settings) -> Router:
        """Return the router. In GGUF, a V2 file has the same architecture name and another scoring function."""
        if c.format == "gguf" and not _has_sigmoid(c):
            return _softmax_router(c)
        _expect(c, "scoring_func", "sigmoid")
        _expect(c, "topk_method", "noaux_tc")
        return grouped_router(c, scores="sigmoid", selection_bias=True)


class DeepSeekV2(DeepSeekV3):
    """DeepSeek V2: expert scores are a softmax, and weights are not normalized.

    Groups of experts are ranked by their best score.
    """

    title = "DeepSeek V2 (also Lite)"
    huggingface = {"DeepseekV2ForCausalLM": "deepseek_v2"}
    defaults = {
        "num_attention_heads": 32,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "topk_method": "greedy",
    }

    def router(self, c: Settings) -> Router:
        """Return V2's router; groups are selected only with `topk_method` "group_limited_greedy"."""
        if c.format == "gguf":
            return super().router(c)
        _expect(c, "scoring_func", "softmax")
        return _softmax_router(c)


class Glm4MoELite(DeepSeekV3):
    """GLM-4.7-Flash: V3 with other sizes; a checkpoint may list the layers that have experts."""

    title = "GLM-4.7-Flash"
    huggingface = {"Glm4MoeLiteForCausalLM": "glm4_moe_lite"}
    defaults = {
        "num_attention_heads": 20,
        "rms_norm_eps": 1e-5,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.8,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    }

    def is_dense(self, c: Settings, index: int) -> bool:
        """Return whether a layer has no experts: the first ones, unless the checkpoint lists them."""
        if c("mlp_layer_types"):
            return c.layer_is("mlp_layer_types", index, {"dense": True, "sparse": False})
        return super().is_dense(c, index)


class Mistral4(DeepSeekV3):
    """Mistral Small 4: expert scores are a softmax; queries at far positions get a higher temperature."""

    title = "Mistral Small 4"
    huggingface = {"Mistral4ForCausalLM": "mistral4"}
    nested = ("mistral4",)
    gguf = ("mistral4",)
    defaults = {
        "num_attention_heads": 32,
        "n_shared_experts": 1,
        "kv_lora_rank": 256,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    }
    has_extra_layers = False

    def router(self, c: Settings) -> Router:
        """Return the router, which ranks groups by the sum of their best two scores."""
        return grouped_router(c, scores="softmax")

    def fused(self, decoder: Decoder, format_: Format) -> Mapping[str, Views]:
        """Return views of experts: llama.cpp's converter stores each expert's rows of gates, then those of `up`."""
        found: dict[str, Views] = {}
        for index, layer in enumerate(decoder.layers):
            if format_ == "gguf" and isinstance(layer.mlp, ExpertsFeedForward):
                stem = f"blk.{index}.ffn_"
                found |= fused_expert_gate_up(f"{stem}gate_up_exps.weight", f"{stem}down_exps.weight", layer.mlp)
        return found


def latent_attention(c: Settings) -> LatentAttention:
    """Return the latent attention of all these families. Older GGUF files store head sizes under the usual keys."""
    rope = _rope(c)
    plain, value_dim = c("qk_nope_head_dim"), c("v_head_dim")
    if c.format == "gguf":
        plain = c.number("attention.key_length_mla", c("head_dim")) - rope.rotary_dim
        value_dim = c("attention.value_length_mla", c("attention.value_length"))
    size = plain + rope.rotary_dim
    scaling, scale = rope.scaling, size**-0.5 if size > 0 else 1.0
    if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
        scale *= yarn_magnitude(scaling.factor, scaling.mscale_all_dim) ** 2
    bias = bool(c("attention_bias"))
    return LatentAttention(
        num_heads=c.number("num_attention_heads"),
        latent_dim=c.number("kv_lora_rank"),
        plain_dim=plain,
        value_dim=value_dim,
        scale=scale,
        rope=rope,
        query_dim=c("q_lora_rank"),
        neighbours=bool(c.values.get("rope_interleave", True)),
        bias=bias,
        output_bias=bias,
        temperature=temperature(c),
    )


def _rope(c: Settings) -> Rope:
    """Return the rotary positions. A GGUF file combines both `mscale`s into one number."""
    rope = c.rope(rotary_dim=c.number("qk_rope_head_dim"))
    magnitude = c("rope.scaling.yarn_log_multiplier")
    if isinstance(rope.scaling, YarnScaling) and magnitude:
        mscale = magnitude / MAGNITUDE
        rope = replace(rope, scaling=replace(rope.scaling, mscale=mscale, mscale_all_dim=mscale))
    return rope


def grouped_router(c: Settings, **changes: Any) -> Router:
    """Return a router of experts in groups; keyword arguments replace its fields."""
    groups = {"num_groups": c("n_group", 1), "num_active_groups": c("topk_group", 1)}
    numbers = {"renormalise": bool(c("norm_topk_prob")), "scale": c("routed_scaling_factor", 1.0)}
    return Router(**(groups | numbers | changes))


def _softmax_router(c: Settings) -> Router:
    """Return V2's router. Raises UnsupportedArchitecture for another kind."""
    c.refuse("norm_topk_prob")
    router = grouped_router(c, scores="softmax", group_score="best", renormalise=False)
    if c.format == "gguf" or c("topk_method") == "group_limited_greedy":
        return router
    _expect(c, "topk_method", "greedy")
    return replace(router, num_groups=1, num_active_groups=1)


def _has_sigmoid(c: Settings) -> bool:
    """Return whether experts are scored by sigmoid: as a GGUF file says, else if there is a selection bias."""
    said = c("expert_gating_func")
    return bool(said == _SIGMOID) if said else any(name.endswith("exp_probs_b.bias") for name in c.stored)


def _expect(c: Settings, key: str, only: str) -> None:
    """Raise UnsupportedArchitecture if a setting has another value than `only`."""
    if c(key, only) != only:
        raise UnsupportedArchitecture(f"{c.label}: {key} {c(key)!r} is not supported for {c.architecture}, only {only}")
