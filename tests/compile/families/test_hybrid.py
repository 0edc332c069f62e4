"""What families with states read of configurations, and what they take."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from radixlm.cli.tables import layer_rows
from radixlm.compile.families.registry import FAMILIES
from radixlm.compile.families.settings import Settings
from radixlm.compile.ops.implemented import check_implemented
from radixlm.compile.reference import reference_logits
from radixlm.compile.sources.huggingface import HuggingFaceSource, huggingface_settings
from radixlm.compile.sources.source import Source
from radixlm.runtime.artifact.model_config import Attention, GatedDelta, LayerConfig, ModelConfig, ShortConvolution
from radixlm.runtime.errors import CorruptSource, UnsupportedArchitecture
from safetensors.numpy import save_file

from ...goldens import families as tiny_families
from ...goldens.tiny_outputs import TinyOutputs
from .harness import SEEN, TOLERANCE, distance

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
    assert dict(layer_rows(config))["states"] == "10 recurrent layers, 163.8 kB per sequence"
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


@pytest.mark.parametrize(("format_", "tiled"), [("huggingface", False), ("gguf", True)])
def test_a_key_head_belongs_to_neighbours_or_to_every_other_value_head(
    format_: str, tiled: bool, source_of: Callable[..., Source]
) -> None:
    source, prompt = source_of("qwen3_5", format_), TinyOutputs.load("qwen3_5").prompts[1]
    assert {layer.mixer.tiled for layer in source.config.layers if isinstance(layer.mixer, GatedDelta)} == {tiled}
    other = replace(source.config, layers=tuple(map(in_other_order, source.config.layers)))
    logits = reference_logits(other, source.read_float32, prompt.ids)
    assert prompt.distance(logits[prompt.rows]) > SEEN


def in_other_order(layer: LayerConfig) -> LayerConfig:
    mixer = layer.mixer
    return replace(layer, mixer=replace(mixer, tiled=not mixer.tiled)) if isinstance(mixer, GatedDelta) else layer


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_language_model_of_one_that_sees_is_read(name: str, tmp_path: Path) -> None:
    tiny = tiny_families.FAMILIES[name]
    tiny.write(tmp_path)
    tensors = {
        key.replace("model.", "model.language_model.", 1) if key.startswith("model.") else key: tensor
        for key, tensor in tiny.tensors.items()
    }
    beside = {key: np.zeros((2, 2), np.float32) for key in ("model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight")}
    save_file(tensors | beside, tmp_path / "model.safetensors")
    nested = {
        "architectures": [str(tiny.config["architectures"][0]).replace("CausalLM", "ConditionalGeneration")],  # type: ignore[index]
        "model_type": name,
        "text_config": {key: value for key, value in tiny.config.items() if key != "architectures"},
    }
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert distance(HuggingFaceSource(tmp_path), name) <= TOLERANCE


def test_the_state_of_qwen_holds_a_matrix_for_each_value_head() -> None:
    """As Qwen/Qwen3.5-9B has it: 24 layers of 32 heads of 128 x 128, and three tokens of 8,192 columns."""
    values = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "vocab_size": 248320,
    }
    config = config_of({"architectures": ["Qwen3_5ForCausalLM"], **values})
    assert config.state_bytes == 24 * (32 * 128 * 128 + 3 * 8192) * 4
    assert [isinstance(layer.mixer, Attention) for layer in config.layers] == [False, False, False, True] * 8
    assert config.ropes[0].rotary_dim == 64
    with pytest.raises(CorruptSource, match="32 value heads cannot share 5 key heads"):
        config_of({"architectures": ["Qwen3_5ForCausalLM"], **values}, linear_num_key_heads=5)
    odd = config_of({"architectures": ["Qwen3_5ForCausalLM"], **values}, linear_key_head_dim=24)
    with pytest.raises(UnsupportedArchitecture, match="needs the delta rule with heads whose sizes are no multiples"):
        check_implemented("odd", odd)
