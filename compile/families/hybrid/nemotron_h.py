"""Nemotron-H (NVIDIA, 2025), dense: Mamba-2, or attention without positions, and MLPs without a gate.

A file counts a mixer and the MLP behind it as two layers, each with a norm. Here they are one.
Not as in transformers 5.23, and as in llama.cpp: steps may be shorter than `time_step_min`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from radixlm.runtime.artifact.model_config import Dense, LayerConfig, Mixer, ModelConfig
from radixlm.runtime.errors import UnsupportedArchitecture

from ...layers.decoder import Decoder
from ...layers.mamba2 import Mamba2Mixer
from ...layers.part_names import PartNames
from ...weights.view import View
from ..family import Family, Format, Views, parts_of
from ..settings import Settings
from .granite4 import mamba

_KINDS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
_MAMBA_KEYS = {  # Granite's key: this family's
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
}


@dataclass(frozen=True)
class _PairedNames(PartNames):
    """`stored` is the file's layer that has each layer's mixer; the one behind it has the MLP."""

    stored: tuple[int, ...] = ()

    def layer(self, index: int, role: str) -> str:
        """The checkpoint's name of a part of a layer."""
        return super().layer(self.stored[index] + (role in ("ffn_norm", "gate", "up", "down")), role)


class NemotronH(Family):
    """Each layer of a file is one branch; a pattern of M, * and - says which."""

    title = "Nemotron-H"
    huggingface = {"NemotronHForCausalLM": "nemotron_h"}
    gguf = ("nemotron_h",)
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
    }
    names = {
        "embedding": "model.embeddings.weight",
        "norm": "model.norm_f.weight",
        "attention_norm": "norm.weight",
        "ffn_norm": "norm.weight",
        **{role: f"mixer.{role}_proj.weight" for role in ("q", "k", "v", "o", "up", "down")},
        **{f"mamba_{role}": f"mixer.{role}_proj.weight" for role in ("in", "gate", "dt", "out")},
        "mamba_taps": "mixer.conv1d.weight",
        "mamba_rate": "mixer.A_log",
        "mamba_dt_bias": "mixer.dt_bias",
        "mamba_skip": "mixer.D",
        "mamba_norm": "mixer.norm.weight",
    }
    gguf_names = {"ffn_norm": "attn_norm.weight"}
    ignored = ("mtp.*",)

    def config(self, c: Settings) -> ModelConfig:
        """A mixer, and the MLP that the pattern has behind it, are a layer."""
        c.refuse("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "sliding_window")
        pattern = _pattern(c)
        if set(pattern) - set("M*-") or "--" in pattern or not pattern.startswith(("M", "*")):
            raise UnsupportedArchitecture(
                f"{c.label}: the layers {pattern} are not supported, only M and *, each with at most one - behind it"
            )
        mixers = [index for index, kind in enumerate(pattern) if kind != "-"]
        eps = c("rms_norm_eps", c("layer_norm_eps")) if c.format == "gguf" else c("layer_norm_epsilon")
        changed = replace(c, values={**c.values, "num_hidden_layers": len(mixers), "nextn_predict_layers": 0})
        return changed.model(lambda index: self._layer(c, pattern, mixers[index]), norm_eps=eps)

    def decoder(self, config: ModelConfig) -> Decoder:
        """Layers with an MLP are two of a file's."""
        stored, first = [], 0
        for layer in config.layers:
            stored.append(first)
            first += 1 if layer.ffn is None else 2
        return Decoder(config, _PairedNames(self.names, self.gguf_names, stored=tuple(stored)))

    def fused(self, decoder: Decoder, format_: Format) -> Mapping[str, Views]:
        """Gates, then what is convolved, then steps; a checkpoint has rates as their logarithms."""
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
        has_mlp = pattern[index + 1 : index + 2] == "-"
        return LayerConfig(mixer=_mixer(c, pattern, index), ffn=_mlp(c, index + 1) if has_mlp else None)


def _pattern(c: Settings) -> str:
    """A letter a layer; a GGUF file tells by numbers that other kinds of layers have none of."""
    if c.format == "gguf":
        sizes, heads = (
            [c.of_layer(key, index) for index in range(c.num_layers)]
            for key in ("intermediate_size", "num_key_value_heads")
        )
        return "".join("-" if size else "*" if kv else "M" for size, kv in zip(sizes, heads, strict=True))
    kinds = c("layers_block_type") or c("layer_types")
    if kinds:
        return "".join(_KINDS.get(str(kind), "?") for kind in kinds)
    return str(c("hybrid_override_pattern", ""))


def _mixer(c: Settings, pattern: str, index: int) -> Mixer:
    if pattern[index] == "*":
        return c.attention(num_kv_heads=c.of_layer("num_key_value_heads", index), rope=None)
    if c.format == "gguf":
        return mamba(c)
    return mamba(replace(c, values={**c.values, **{key: c(own) for key, own in _MAMBA_KEYS.items()}}))


def _mlp(c: Settings, index: int) -> Dense:
    if c("mlp_hidden_act", "relu2") != "relu2":
        raise UnsupportedArchitecture(f"{c.label}: mlp_hidden_act {c('mlp_hidden_act')!r} is not supported, only relu2")
    return c.dense(intermediate_size=c.of_layer("intermediate_size", index), function="relu2")
