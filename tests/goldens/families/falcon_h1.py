"""Falcon-H1: attention and Mamba-2 beside each other in each layer, and a multiplier nearly everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..tiny_models import Part
from .family import Config, Off, TinyFamily
from .hybrid import MAMBA_OFFS, mamba
from .parts import attention, config, decoder, gated_mlp, sizes

SSM_MULTIPLIERS = [0.6, 1.4, 0.7, 1.8, 0.5]  # of gates, values, keys (B), queries (C) and steps
ONE_BY_ONE = ("gates", "values", "keys", "queries", "steps")


def mixers(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    """Both; without a norm Mamba-2 has no gains."""
    yield from attention(score=1.1)(c, layer, prefix)
    yield from (part for part in mamba(c, prefix) if c["mamba_rms_norm"] or ".norm." not in part[0])


def feed(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    yield from gated_mlp(c, layer, prefix, name="feed_forward")


def falcon_config(num_layers: int, **changes: Any) -> dict[str, Any]:
    return config(
        "FalconH1ForCausalLM",
        "falcon_h1",
        sizes(128, 160, num_layers, 4, 2, 48),
        **{
            "attention_bias": False,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.7,
            "embedding_multiplier": 2.5,
            "key_multiplier": 0.8,
            "lm_head_multiplier": 0.4,
            "mamba_chunk_size": 64,
            "mamba_conv_bias": True,
            "mamba_d_conv": 4,
            "mamba_d_head": 32,
            "mamba_d_ssm": 192,  # not what `mamba_expand` says
            "mamba_d_state": 48,
            "mamba_expand": 2,
            "mamba_n_groups": 2,
            "mamba_n_heads": 6,
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": False,
            "mamba_rms_norm": False,
            "mlp_bias": False,
            "mlp_multipliers": [1.6, 0.5],
            "projectors_bias": False,
            "rope_theta": 10000.0,
            "ssm_in_multiplier": 1.3,
            "ssm_multipliers": SSM_MULTIPLIERS,
            "ssm_out_multiplier": 0.6,
            "time_step_limit": [0.0, float("inf")],
            **changes,
        },
    )


def without_one(values: list[float], index: int) -> list[float]:
    """The same, but for one that is 1."""
    return [1.0 if number == index else value for number, value in enumerate(values)]


BRANCHES = (
    Off("attention", tensors={r"self_attn\.o_proj": 0.0}),
    Off("mamba", tensors={r"mamba\.out_proj": 0.0}),
)
MULTIPLIERS = (
    *(
        Off(key, config={key: 1.0})
        for key in (
            "attention_in_multiplier",
            "attention_out_multiplier",
            "embedding_multiplier",
            "key_multiplier",
            "lm_head_multiplier",
            "ssm_in_multiplier",
            "ssm_out_multiplier",
        )
    ),
    *(
        Off(f"multiplier_of_{part}", config={"ssm_multipliers": without_one(SSM_MULTIPLIERS, index)})
        for index, part in enumerate(ONE_BY_ONE)
    ),
    Off("multiplier_of_mlp_gates", config={"mlp_multipliers": [1.0, 0.5]}),
    Off("multiplier_of_mlp_output", config={"mlp_multipliers": [1.6, 1.0]}),
)

FALCON_H1 = (
    TinyFamily(
        "falcon_h1",
        3500,
        falcon_config(3),
        parts=decoder(mixers, feed, norms=("input_layernorm", "pre_ff_layernorm"), last_norm="final_layernorm"),
        offs=(*BRANCHES, *MULTIPLIERS, *(off for off in MAMBA_OFFS if "mamba_" not in off.feature)),
    ),
    TinyFamily(
        "falcon_h1-norm",
        3501,
        falcon_config(2, mamba_rms_norm=True, ssm_multipliers=[0.7] * 5),
        parts=decoder(mixers, feed, norms=("input_layernorm", "pre_ff_layernorm"), last_norm="final_layernorm"),
        offs=(
            *BRANCHES,
            *MAMBA_OFFS,
            Off("multipliers_of_parts", config={"ssm_multipliers": [1.0] * 5}),
        ),
    ),
)
