"""Nemotron-H (NVIDIA, 2025) and Nemotron 3: Mamba-2 or attention without positions, and feed-forward without gates.

The feed-forward layers are MLPs or experts. A file counts a mixer and the feed-forward layer after it as two layers,
each with a norm. Here they are one. As in llama.cpp, and unlike transformers 5.23, steps may be shorter than
`time_step_min`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from radixlm.runtime.artifact.model_config import Dense, Experts, LayerConfig, Mixer, ModelConfig, SharedExpert
from radixlm.runtime.errors import UnsupportedArchitecture

from ...layers.decoder import Decoder
from ...layers.part_names import PartNames
from ...layers.recurrent import Mamba2Mixer
from ...weights.view import View
from ..deepseek import grouped_router
from ..family import Family, Format, Views, parts_of
from ..settings import PER_LAYER, Settings
from .granite4 import mamba

_KINDS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
_MAMBA_KEYS = {  # Granite's key to this family's
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
}
_BEHIND = {
    **{role: f"mixer.{role}_proj.weight" for role in ("up", "down")},
    "ffn_norm": "norm.weight",
    "router": "mixer.gate.weight",
    "selection_bias": "mixer.gate.e_score_correction_bias",
    **{f"expert_{role}": f"mixer.experts.{role}_proj.weight" for role in ("up", "down")},
    **{f"shared_{role}": f"mixer.shared_experts.{role}_proj.weight" for role in ("up", "down")},
}
_LAYERS = re.compile(r"(?:[M*][-E]?)+")


@dataclass(frozen=True)
class _PairedNames(PartNames):
    """Names of parts; `stored` has the file's layer of each mixer, and the next layer has the parts in `_BEHIND`."""

    stored: tuple[int, ...] = ()

    def layer(self, index: int, role: str) -> str:
        """Return the checkpoint's name of a part of a layer."""
        return super().layer(self.stored[index] + (role in _BEHIND), role)


class NemotronH(Family):
    """Nemotron-H: each layer of a file is one branch; a pattern of M, *, - and E (experts) lists their kinds."""

    title = "Nemotron-H (also Nemotron 3 Nano)"
    huggingface = {"NemotronHForCausalLM": "nemotron_h"}
    gguf = ("nemotron_h", "nemotron_h_moe")
    defaults = {
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "head_dim": 128,
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "norm_topk_prob": True,
    }
    names = {
        "embedding": "model.embeddings.weight",
        "norm": "model.norm_f.weight",
        "attention_norm": "norm.weight",
        **_BEHIND,
        **{role: f"mixer.{role}_proj.weight" for role in ("q", "k", "v", "o")},
        **{f"mamba_{role}": f"mixer.{role}_proj.weight" for role in ("in", "gate", "dt", "out")},
        "mamba_taps": "mixer.conv1d.weight",
        "mamba_rate": "mixer.A_log",
        "mamba_dt_bias": "mixer.dt_bias",
        "mamba_skip": "mixer.D",
        "mamba_norm": "mixer.norm.weight",
    }
    gguf_names = {"ffn_norm": "attn_norm.weight"}
    ignored = ("mtp.*",)
    has_extra_layers = True

    def config(self, c: Settings) -> ModelConfig:
        """Return the model; a mixer and the feed-forward layer that follows it in the pattern are one layer."""
        c.refuse("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "sliding_window", "moe_latent_size")
        pattern = _pattern(c)
        if not _LAYERS.fullmatch(pattern):
            raise UnsupportedArchitecture(
                f"{c.label}: the layers {pattern} are not supported, only M and *, each with at most one - or E behind"
            )
        mixers = [index for index, kind in enumerate(pattern) if kind in "M*"]
        eps = c("rms_norm_eps", c("layer_norm_eps")) if c.format == "gguf" else c("layer_norm_epsilon")
        # a file counts its layers differently, and lists per-layer differences by its own numbers
        joined = {"num_hidden_layers": len(mixers), "nextn_predict_layers": 0, PER_LAYER: None}
        changed = replace(c, values={**c.values, **joined})
        return changed.model(lambda _, index: self._layer(c, pattern, mixers[index]), norm_eps=eps)

    def decoder(self, config: ModelConfig) -> Decoder:
        """Return the model's parts; a layer with a feed-forward layer is two of a file's."""
        stored = tuple(self.num_stored_layers(config, index) for index in range(len(config.layers)))
        return Decoder(config, _PairedNames(self.names, self.gguf_names, stored=stored))

    def num_stored_layers(self, config: ModelConfig, most: int | None = None) -> int:
        """Return the number of a file's layers in the first `most` layers, or in all."""
        return sum(1 if layer.ffn is None else 2 for layer in config.layers[:most])

    def fused(self, decoder: Decoder, format_: Format) -> Mapping[str, Views]:
        """Split Mamba-2's stored input matrix into gates, convolved parts and steps.

        A checkpoint has the logarithms of rates, which are converted.
        """
        views: dict[str, Views] = {}
        for mixer in (layer.self_attn for layer in decoder.layers):
            if isinstance(mixer, Mamba2Mixer):
                [joined], rate = mixer.convolved, mixer.spec.rate.name
                stored = decoder.names.gguf_of[joined.name] if format_ == "gguf" else joined.name
                views |= dict(parts_of(stored, mixer.stored))
                if format_ == "huggingface":
                    views[rate] = (View(rate, minus_exp=True),)
        return views

    def _layer(self, c: Settings, pattern: str, index: int) -> LayerConfig:
        """Return the layer whose mixer is the file's layer `index`, with the feed-forward layer after it."""
        behind, after = pattern[index + 1 : index + 2], index + 1
        ffn = _mlp(c.at(after), after) if behind == "-" else _experts(c.at(after)) if behind == "E" else None
        return LayerConfig(mixer=_mixer(c.at(index), pattern, index), ffn=ffn)


def _pattern(c: Settings) -> str:
    """Return a letter per layer; in a GGUF file, sizes of 0 tell the kinds of layers apart."""
    if c.format == "gguf":
        sizes, heads = (
            [c.of_layer(key, index) for index in range(c.num_layers)]
            for key in ("intermediate_size", "num_key_value_heads")
        )
        behind = "E" if c("num_experts") else "-"
        return "".join(behind if size else "*" if kv else "M" for size, kv in zip(sizes, heads, strict=True))
    kinds = c("layers_block_type") or c("layer_types")
    if kinds:
        return "".join(_KINDS.get(str(kind), "?") for kind in kinds)
    return str(c("hybrid_override_pattern", ""))


def _mixer(c: Settings, pattern: str, index: int) -> Mixer:
    """Return the mixer that the file has as layer `index`."""
    if pattern[index] == "*":
        return c.attention(num_kv_heads=c.of_layer("num_key_value_heads", index), rope=None)
    if c.format == "gguf":
        return mamba(c)
    return mamba(replace(c, values={**c.values, **{key: c(own) for key, own in _MAMBA_KEYS.items()}}))


def _mlp(c: Settings, index: int) -> Dense:
    """Return the MLP that the file has as layer `index`."""
    return c.dense(intermediate_size=c.of_layer("intermediate_size", index), function=_function(c))


def _experts(c: Settings) -> Experts:
    """Return DeepSeek V3's router and its experts, with a shared one that every token passes."""
    shared = c.number("moe_shared_expert_intermediate_size", c("shared_expert_intermediate_size"))
    router = grouped_router(c, scores="sigmoid", selection_bias=True)
    return c.experts(function=_function(c), router=router, shared=SharedExpert(intermediate_size=shared))


def _function(c: Settings) -> Literal["relu2"]:
    """Return the activation function. Raises UnsupportedArchitecture for any but relu2."""
    if c("mlp_hidden_act", "relu2") != "relu2":
        raise UnsupportedArchitecture(f"{c.label}: mlp_hidden_act {c('mlp_hidden_act')!r} is not supported, only relu2")
    return "relu2"
