"""What families read of a configuration, in the layouts in which it is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from radixlm.compile.families.registry import FAMILIES
from radixlm.compile.families.settings import Settings
from radixlm.compile.sources.huggingface import HuggingFaceSource
from radixlm.compile.sources.huggingface_config import huggingface_settings
from radixlm.runtime.artifact.model_config import LinearScaling, ModelConfig
from safetensors.numpy import save_file

from ...goldens import families
from .harness import TOLERANCE, distance


def config_of(config: dict[str, Any]) -> ModelConfig:
    settings = huggingface_settings("tiny", config)
    return FAMILIES[settings.architecture].config(settings)


def gguf_config(architecture: str, **values: Any) -> ModelConfig:
    sizes = {"vocab_size": 64, "hidden_size": 336, "num_attention_heads": 2, "head_dim": 128, "intermediate_size": 64}
    settings = {**sizes, "max_position_embeddings": 512, **values}
    return FAMILIES[architecture].config(Settings("tiny", "gguf", architecture, architecture, settings))


def test_a_config_that_sees_leaves_sizes_to_the_class() -> None:
    """As google/gemma-3-4b-it has it: heads, their size and the vocabulary are not in it."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = config_of({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    assert (config.vocab_size, config.num_attention_heads, config.head_dim) == (262208, 8, 256)
    assert config.tie_word_embeddings and config.attentions[0].scale == 1 / 16
    windows = [attention.window for attention in config.attentions]
    assert windows[:7] == [1024] * 5 + [None, 1024] and windows.count(None) == 5
    local, whole = config.ropes
    assert (local.theta, local.scaling, whole.theta, whole.scaling) == (1e4, None, 1e6, LinearScaling(factor=8.0))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_language_model_of_one_that_sees_is_read(prefix: str, tmp_path: Path) -> None:
    tiny = families.FAMILIES["gemma3"]
    tiny.write(tmp_path)
    tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in tiny.tensors.items()}
    seeing = {f"{part}.x.weight": np.zeros((2, 2), np.float32) for part in ("vision_tower", "multi_modal_projector")}
    save_file(tensors | seeing, tmp_path / "model.safetensors")
    nested = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": dict(tiny.config)}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert distance(HuggingFaceSource(tmp_path), "gemma3") <= TOLERANCE


@pytest.mark.parametrize("name", ["gemma3", "olmo3"])
def test_rotary_positions_by_type_of_layer_are_the_same(name: str) -> None:
    """As transformers 5 writes what older files have in several keys."""
    old = dict(families.FAMILIES[name].config)
    new = {key: value for key, value in old.items() if not key.startswith("rope_")}
    local = {"rope_type": "default", "rope_theta": old.get("rope_local_base_freq", old["rope_theta"])}
    whole = {"rope_theta": old["rope_theta"], **old["rope_scaling"]}  # type: ignore[dict-item]
    new["rope_parameters"] = {"sliding_attention": local, "full_attention": whole}
    assert config_of(new) == config_of(old)


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_only_the_27b_of_gguf_is_not_scaled_by_the_size_of_a_head(architecture: str, layers: int) -> None:
    scales = [gguf_config(architecture, num_hidden_layers=n).attentions[0].scale for n in (layers, layers - 1)]
    assert scales == [168**-0.5, 128**-0.5]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (None, [True, True, True, False]),
        (2, [True, False, True, False]),
        ("LGLL", [True, False, True, True]),
        ([False, True, True, False], [False, True, True, False]),
        (True, [True] * 4),
    ],
)
def test_a_pattern_of_windows_is_a_period_or_a_list(pattern: Any, expected: list[bool]) -> None:
    settings = Settings("tiny", "gguf", "olmo2", "olmo2", {"sliding_window_pattern": pattern})
    assert [settings.slides(index, full_every=4) for index in range(4)] == expected


def test_phi_in_gguf_has_its_factors_without_a_kind_of_scaling() -> None:
    values = {
        "num_hidden_layers": 1,
        "rope_scaling": {"rope_type": "none", "original_max_position_embeddings": 64, "attention_factor": 1.5},
    }
    factors = {f"rope_factors_{kind}": (number,) * 64 for kind, number in (("short", 1.0), ("long", 3.0))}
    sizes = {"vocab_size": 64, "hidden_size": 256, "num_attention_heads": 2, "intermediate_size": 64}
    settings = {**sizes, "max_position_embeddings": 512, **values}
    config = FAMILIES["phi3"].config(Settings("tiny", "gguf", "phi3", "phi3", settings, rope_factors=factors))
    scaling: Any = config.ropes[0].scaling
    assert (scaling.attention_factor, scaling.original_max_position_embeddings) == (1.5, 64)
    assert (scaling.short_factors[0], scaling.long_factors[0]) == (1.0, 3.0)


def test_granite_of_gguf_may_have_no_positions() -> None:
    for said, has_rope in ((None, True), (True, True), (False, False)):
        config = gguf_config("granite", num_hidden_layers=1, **{"rope.scaling.finetuned": said})
        assert (config.attentions[0].rope is not None) == has_rope
