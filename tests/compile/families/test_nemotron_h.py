"""Patterns of layers that Nemotron-H's family takes, and those that it refuses."""

from __future__ import annotations

import pytest
from radixlm.compile.families.registry import FAMILIES
from radixlm.compile.sources.huggingface_config import huggingface_settings
from radixlm.runtime.artifact.model_config import Mamba2, ModelConfig
from radixlm.runtime.errors import UnsupportedArchitecture

from ...goldens.families import FAMILIES as TINY


def config_of(pattern: str) -> ModelConfig:
    declared = {**TINY["nemotron_h"].config, "layers_block_type": None, "hybrid_override_pattern": pattern}
    return FAMILIES["nemotron_h"].config(huggingface_settings("tiny", declared))


def test_a_mixer_and_the_mlp_behind_it_are_one_layer() -> None:
    layers = config_of("M-M*-").layers
    assert [(isinstance(layer.mixer, Mamba2), layer.ffn is not None) for layer in layers] == [
        (True, True),
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize("pattern", ["-M*", "M--*", "ME*", "", "M?*"])
def test_other_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match="are not supported, only M and"):
        config_of(pattern)


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(UnsupportedArchitecture, match="no layer has attention"):
        config_of("M-MM-")
