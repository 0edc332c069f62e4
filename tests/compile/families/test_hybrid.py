"""What families with states read of configurations, and what they take."""

from __future__ import annotations

from typing import Any

import pytest
from radixlm.cli.tables import layer_rows
from radixlm.compile.families.registry import FAMILIES
from radixlm.compile.families.settings import Settings
from radixlm.compile.sources.huggingface_config import huggingface_settings
from radixlm.runtime.artifact.model_config import Attention, ModelConfig, ShortConvolution
from radixlm.runtime.errors import CorruptSource, UnsupportedArchitecture

LFM2 = {  # of LiquidAI/LFM2-1.2B
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "vocab_size": 65536,
}


def config_of(config: dict[str, Any], **changes: Any) -> ModelConfig:
    settings = huggingface_settings("tiny", config | changes)
    return FAMILIES[settings.architecture].config(settings)


def test_lfm2_has_attention_in_six_layers_and_states_in_ten() -> None:
    config = config_of(LFM2)
    kinds = [isinstance(layer.mixer, Attention) for layer in config.layers]
    assert [index for index, has_attention in enumerate(kinds) if has_attention] == LFM2["full_attn_idxs"]
    assert config.intermediate_size == 8192 and config.tie_word_embeddings
    assert config.state_bytes == 160 << 10
    assert config.layers[0].mixer == ShortConvolution(kernel_size=3)
    assert dict(layer_rows(config))["states"] == "10 layers keep a state, 163.8 kB of each sequence"
    types = ["full_attention" if has_attention else "conv" for has_attention in kinds]
    assert config_of(LFM2, full_attn_idxs=None, layer_types=types) == config


def test_a_gguf_file_says_it_by_heads_of_layers() -> None:
    heads = [8 if index in LFM2["full_attn_idxs"] else 0 for index in range(16)]  # type: ignore[operator]
    values = {key: value for key, value in LFM2.items() if not key.startswith(("block", "full", "arch"))}
    values |= {"num_key_value_heads": heads, "intermediate_size": 8192, "tie_word_embeddings": True}
    settings = Settings("tiny", "gguf", "lfm2", "lfm2", values)
    assert FAMILIES["lfm2"].config(settings) == config_of(LFM2)


def test_a_kernel_out_of_range_is_refused() -> None:
    with pytest.raises(CorruptSource, match="kernel_size"):
        config_of(LFM2, conv_L_cache=1)


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(UnsupportedArchitecture, match="no layer has attention"):
        config_of(LFM2, full_attn_idxs=[])
