"""Patterns of layers that Nemotron-H's family takes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from radixlm.compile.families.registry import FAMILIES
from radixlm.compile.sources.huggingface import huggingface_settings
from radixlm.runtime.artifact.model_config import (
    Dense,
    Experts,
    Mamba2,
    ModelConfig,
    Router,
    SharedExpert,
    is_gated,
)
from radixlm.runtime.errors import UnsupportedArchitecture

from ...goldens.families import FAMILIES as TINY


def config_of(pattern: str, name: str = "nemotron_h", **changes: Any) -> ModelConfig:
    declared = {**TINY[name].config, "layers_block_type": None, "hybrid_override_pattern": pattern, **changes}
    return FAMILIES["nemotron_h"].config(huggingface_settings("tiny", declared))


def test_a_mixer_and_the_mlp_behind_it_are_one_layer() -> None:
    layers = config_of("M-M*-").layers
    assert [(isinstance(layer.mixer, Mamba2), layer.ffn is not None) for layer in layers] == [
        (True, True),
        (True, False),
        (False, True),
    ]


def test_experts_stand_behind_a_mixer_as_an_mlp_does() -> None:
    layers = config_of("MEM*EM-", "nemotron_h-moe").layers
    assert [type(layer.ffn) for layer in layers] == [Experts, type(None), Experts, Dense]
    experts = layers[0].ffn
    assert isinstance(experts, Experts) and experts.function == "relu2" and not is_gated(experts.function)
    assert experts.router == Router(scores="sigmoid", selection_bias=True, scale=2.5)
    assert experts.shared == SharedExpert(intermediate_size=96)


def test_layers_that_guess_further_tokens_are_left_out_of_a_file() -> None:
    """A file counts two for a mixer and what is behind it."""
    family, config = FAMILIES["nemotron_h"], config_of("MEM*E", "nemotron_h-moe")
    assert family.ignores("blk.5.nextn.eh_proj.weight", config) and not family.ignores("blk.4.ffn_up_exps", config)


def test_a_projection_around_experts_is_refused() -> None:
    with pytest.raises(UnsupportedArchitecture, match="moe_latent_size is not supported"):
        config_of("ME*", "nemotron_h-moe", moe_latent_size=64)


@pytest.mark.parametrize("pattern", ["-M*", "EM*", "M--*", "M-E*", "ME-*", "", "M?*"])
def test_other_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match="are not supported, only M and"):
        config_of(pattern)


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(UnsupportedArchitecture, match="no layer has attention"):
        config_of("M-MM-")
