"""Falcon-H1 (TII, 2025): in each layer, attention and Mamba-2 in parallel after one norm.

There are multipliers before and after matrices. llama.cpp's converter folds them into the weights, so a GGUF file has
none. Here weights stay unchanged: outputs of matrices, or linear functions of these, are multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace
from radixlm.runtime.artifact.model_config import LayerConfig, Mamba2, ModelConfig
from radixlm.runtime.errors import UnsupportedArchitecture

from ...layers.decoder import Decoder
from ...layers.recurrent import Mamba2Mixer
from ...weights.view import View
from ..family import Family, Format, Views, parts_of
from ..settings import Settings
from .granite4 import mamba

_PARTS = ("gate_factor", "value_factor", "key_factor", "query_factor", "step_factor")  # in the order of the file


class FalconH1(Family):
    """Falcon-H1: the inputs of Mamba-2 are one matrix; the norm after it is optional."""

    title = "Falcon-H1"
    huggingface = {"FalconH1ForCausalLM": "falcon_h1"}
    gguf = ("falcon-h1",)
    defaults = {
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_conv_bias": True,
        "mamba_norm_before_gate": True,
    }
    names = {
        "ffn_norm": "pre_ff_layernorm.weight",
        "gate": "feed_forward.gate_proj.weight",
        "up": "feed_forward.up_proj.weight",
        "down": "feed_forward.down_proj.weight",
        "norm": "model.final_layernorm.weight",
    }
    gguf_names = {"ffn_norm": "ffn_norm"}

    def config(self, c: Settings) -> ModelConfig:
        """Return the model, with multipliers of embeddings and logits."""
        c.refuse("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias")
        return c.model(
            self.layer,
            embedding_factor=c.number("embedding_multiplier", 1.0),
            logits_factor=c.number("lm_head_multiplier", 1.0),
        )

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`, with its multipliers.

        Scores take those before queries and keys, attention outputs take that before values.
        """
        before = c.number("attention_in_multiplier", 1.0)
        scale = c.head_dim**-0.5 * before**2 * c.number("key_multiplier", 1.0)
        of_gates, of_output = _multipliers(c, "mlp_multipliers", 2)
        return LayerConfig(
            mixer=c.attention(scale=scale, bias=False),
            beside=self.beside(c),
            ffn=c.dense(gate_factor=of_gates),
            mixer_factor=before * c.number("attention_out_multiplier", 1.0),
            beside_factor=c.number("ssm_out_multiplier", 1.0),
            ffn_factor=of_output,
        )

    def beside(self, c: Settings) -> Mamba2:
        """Return Mamba-2, with or without a norm; each part of its input has a multiplier of its own."""
        if c.function() != "silu_mul":
            raise UnsupportedArchitecture(f"{c.label}: hidden_act {c('hidden_act')!r} is not supported, only silu")
        if c.format == "gguf":
            return replace(mamba(c), norm=any(name.endswith(".ssm_norm.weight") for name in c.stored))
        has_norm = bool(c("mamba_rms_norm"))
        if has_norm:
            c.refuse("mamba_norm_before_gate")
        of_all = c.number("ssm_in_multiplier", 1.0)
        factors = {part: of_all * own for part, own in zip(_PARTS, _multipliers(c, "ssm_multipliers", 5), strict=True)}
        return replace(mamba(c), norm=has_norm, **factors)

    def fused(self, decoder: Decoder, format_: Format) -> Mapping[str, Views]:
        """Split Mamba-2's stored input matrix into gates, convolved parts and steps.

        A checkpoint has the logarithms of rates, which are converted.
        """
        views: dict[str, Views] = {}
        for index, layer in enumerate(decoder.layers):
            mixer = layer.beside
            assert isinstance(mixer, Mamba2Mixer)
            is_gguf, rate = format_ == "gguf", mixer.spec.rate.name
            stored = f"blk.{index}.ssm_in.weight" if is_gguf else f"model.layers.{index}.mamba.in_proj.weight"
            views |= dict(parts_of(stored, mixer.stored))
            if not is_gguf:
                views[rate] = (View(rate, minus_exp=True),)
        return views


def _multipliers(c: Settings, key: str, number: int) -> list[float]:
    """Return a list of `number` multipliers, by default ones. Raises UnsupportedArchitecture for others."""
    values = c(key, [1.0] * number)
    if not isinstance(values, list) or len(values) != number:
        raise UnsupportedArchitecture(f"{c.label}: {key} is {values!r}; {number} numbers are needed")
    return values
