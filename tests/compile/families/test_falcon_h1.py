"""Where Falcon-H1's multipliers go, and what of its configurations is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from radixlm.cli.tables import layer_rows
from radixlm.compile.families.registry import FAMILIES
from radixlm.compile.ops.implemented import check_implemented
from radixlm.compile.sources.huggingface import huggingface_settings
from radixlm.compile.sources.source import Source
from radixlm.runtime.artifact.model_config import Attention, Dense, LayerConfig, Mamba2, ModelConfig
from radixlm.runtime.errors import UnsupportedArchitecture

from ...goldens.families import FAMILIES as TINY


def config_of(**changes: Any) -> ModelConfig:
    return FAMILIES["falcon_h1"].config(huggingface_settings("tiny", {**TINY["falcon_h1"].config, **changes}))


def parts_of(config: ModelConfig) -> tuple[LayerConfig, Attention, Mamba2, Dense]:
    layer = config.layers[0]
    assert isinstance(layer.mixer, Attention) and isinstance(layer.beside, Mamba2) and isinstance(layer.ffn, Dense)
    return layer, layer.mixer, layer.beside, layer.ffn


def test_multipliers_go_where_weights_stay_as_they_are() -> None:
    config = config_of()
    layer, attention, beside, mlp = parts_of(config)
    assert attention.scale == pytest.approx(48**-0.5 * 1.2**2 * 0.8)
    factors = (layer.mixer_factor, layer.beside_factor, layer.ffn_factor, mlp.gate_factor)
    assert factors == pytest.approx((1.2 * 0.7, 0.6, 0.5, 1.6))
    of_beside = [beside.gate_factor, beside.value_factor, beside.key_factor, beside.query_factor, beside.step_factor]
    assert of_beside == pytest.approx([1.3 * own for own in (0.6, 1.4, 0.7, 1.8, 0.5)])
    assert (config.embedding_factor, config.logits_factor) == (2.5, 0.4)


def test_weights_are_read_as_a_checkpoint_has_them(source_of: Callable[..., Source]) -> None:
    source, tensors = source_of("falcon_h1"), TINY["falcon_h1"].tensors
    for name in ("self_attn.k_proj", "feed_forward.gate_proj", "feed_forward.down_proj", "mamba.out_proj"):
        name = f"model.layers.0.{name}.weight"
        assert np.array_equal(source.read_float32(name), tensors[name])
    joined = [source.read_float32(f"model.layers.0.mamba.{part}_proj.weight") for part in PARTS]
    assert np.array_equal(np.concatenate(joined), tensors["model.layers.0.mamba.in_proj.weight"])


PARTS = ("gate", "values", "keys", "queries", "dt")


def test_a_gguf_file_has_its_multipliers_in_its_weights(source_of: Callable[..., Source]) -> None:
    config = source_of("falcon_h1", "gguf").config
    layer, attention, beside, mlp = parts_of(config)
    assert attention.scale == 48**-0.5 and beside.is_convolved_alike and not beside.norm
    of_parts = (beside.gate_factor, beside.value_factor, beside.step_factor, mlp.gate_factor)
    assert {*of_parts, layer.mixer_factor, layer.beside_factor, layer.ffn_factor} == {1.0}
    assert parts_of(source_of("falcon_h1-norm", "gguf").config)[2].norm


def test_every_layer_keeps_a_state_and_keys_and_values() -> None:
    config = config_of()
    matrices, convolution = 6 * 32 * 48, 3 * (6 * 32 + 2 * 2 * 48)
    assert config.state_bytes == 3 * (matrices + convolution) * 4 and len(config.kv_attentions) == 3
    assert dict(layer_rows(config))["states"].startswith("3 recurrent layers, ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate is not supported"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"projectors_bias": True}, "projectors_bias is not supported"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias is not supported"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only silu"),
        ({"ssm_multipliers": [1.0, 2.0]}, r"ssm_multipliers is \[1\.0, 2\.0\]; 5 numbers are needed"),
        ({"mlp_multipliers": 2.0}, r"mlp_multipliers is 2\.0; 2 numbers are needed"),
    ],
)
def test_what_is_not_built_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=message):
        config_of(**changes)


def test_keys_of_odd_sizes_are_refused_only_where_they_leave_matrices_of_their_own() -> None:
    sizes = {"mamba_n_groups": 1, "mamba_d_state": 40}
    check_implemented("alike", config_of(**sizes, ssm_multipliers=[0.7] * 5))
    with pytest.raises(UnsupportedArchitecture, match="Mamba-2 with sizes that are no multiples of 16"):
        check_implemented("apart", config_of(**sizes))
