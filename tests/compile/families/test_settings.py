"""What families read of a configuration, in the layouts in which it is found."""

from __future__ import annotations

import json
import math
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from radixlm.compile.families.registry import FAMILIES, model_config
from radixlm.compile.families.settings import Settings
from radixlm.compile.ops.rope_frequencies import rope_frequencies
from radixlm.compile.sources.gguf import GGUFSource
from radixlm.compile.sources.huggingface import HuggingFaceSource, huggingface_settings
from radixlm.compile.sources.model_files import read_json
from radixlm.runtime.artifact.model_config import (
    Dense,
    Experts,
    LinearScaling,
    ModelConfig,
    QKNorm,
    Rope,
    SharedExpert,
    Temperature,
    YarnScaling,
)
from radixlm.runtime.errors import CorruptSource, UnsupportedArchitecture
from safetensors.numpy import save_file

from ...goldens import families, tiny_gguf
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


@pytest.mark.parametrize(
    ("name", "key", "same_as"),
    [
        ("gemma2", "attn_logit_softcapping", None),
        ("gemma2", "final_logit_softcapping", None),
        ("gemma4", "final_logit_softcapping", None),
        ("gemma2", "sliding_window", None),
        ("cohere2", "sliding_window", None),
        ("gpt_oss", "sliding_window", None),
        ("exaone4", "sliding_window", None),
        ("deepseek_v3", "q_lora_rank", None),
        ("ernie4_5", "head_dim", 16),
        ("seed_oss", "head_dim", 16),
        ("gpt_oss", "head_dim", 16),
        ("qwen3", "num_key_value_heads", 4),
        ("smollm3", "num_key_value_heads", 4),
    ],
)
def test_null_is_no_default_of_the_class(name: str, key: str, same_as: int | None) -> None:
    """It is none, as a soft cap of None, or what the class makes of None, such as a head for each head of queries."""
    heads = {"hidden_size": 64, "num_attention_heads": 4}
    whole = json.loads(json.dumps({**families.FAMILIES[name].config, **heads}))  # whose parts other tests share
    text = whole.get("text_config", whole)
    text |= {**heads, key: None}
    found = json.loads(msgspec.json.encode(config_of(whole)))
    layer = found["layers"][0]["mixer"]
    field = {
        "attn_logit_softcapping": layer.get("soft_cap"),
        "final_logit_softcapping": found.get("logits_soft_cap"),
        "sliding_window": layer.get("window"),
        "q_lora_rank": layer.get("query_dim"),
        "head_dim": layer.get("head_dim"),
        "num_key_value_heads": layer.get("num_kv_heads"),
    }[key]
    assert field == same_as


@pytest.mark.parametrize("name", ["gpt_oss", "gemma4"])
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_null_positions_are_those_of_the_class(name: str, key: str) -> None:
    whole = json.loads(json.dumps(families.FAMILIES[name].config))
    text = whole.get("text_config", whole)
    for each in ("rope_parameters", "rope_scaling"):
        text.pop(each, None)
    expected = config_of(whole)
    text[key] = None
    assert config_of(whole) == expected


def test_a_layer_may_have_settings_of_its_own() -> None:
    """As transformers 5 saves them for any class."""
    config = {**families.FAMILIES["qwen3"].config, "num_hidden_layers": 3}
    own = {"1": {"intermediate_size": 48, "num_key_value_heads": 1}, "2": {"head_dim": 8}}
    first, second, third = config_of({**config, "per_layer_config": own}).layers
    plain = config_of(config).layers[0]
    assert first == plain and second.ffn == Dense(intermediate_size=48)
    assert (second.mixer.num_kv_heads, third.mixer.head_dim) == (1, 8)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"7": {"head_dim": 8}}, "per_layer_config has layer 7"),
        ({"0": {"skip": ["mlp"]}}, "skip"),
        ({"x": {}}, "cannot be right"),
    ],
)
def test_settings_of_a_layer_that_cannot_be_are_named(own: dict[str, Any], said: str) -> None:
    config = {**families.FAMILIES["qwen3"].config, "per_layer_config": own}
    with pytest.raises((CorruptSource, UnsupportedArchitecture), match=said):
        model_config(huggingface_settings("tiny", config))


@pytest.mark.parametrize(
    ("limit", "is_taken"),
    [
        ([0.0, math.inf], True),
        ([0, None], True),
        ([None, None], True),
        (None, True),
        ([0.0, 0.1], False),
        ([0.001, math.inf], False),
    ],
)
@pytest.mark.parametrize("name", ["granite4_h", "nemotron_h", "falcon_h1"])
def test_only_a_limit_of_steps_that_limits_is_refused(name: str, limit: Any, is_taken: bool) -> None:
    config = {**families.FAMILIES[name].config, "time_step_limit": limit}
    with nullcontext() if is_taken else pytest.raises(UnsupportedArchitecture, match="time_step_limit"):
        config_of(config)


def test_a_factor_of_yarn_that_is_null_is_that_of_the_lengths() -> None:
    rope = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}
    config = {**families.FAMILIES["qwen3"].config, "rope_scaling": rope, "max_position_embeddings": 512}
    (found,) = config_of(config).ropes
    assert found.scaling == YarnScaling(factor=8.0, original_max_position_embeddings=64)


def test_biases_of_qwen3_5_are_of_the_output_too() -> None:
    layers = config_of({**families.FAMILIES["qwen3_5"].config, "attention_bias": True}).attentions
    assert all(layer.bias and layer.output_bias for layer in layers)  # type: ignore[union-attr]


def test_biases_of_qwen3_5_are_of_queries_and_gates_head_by_head(tmp_path: Path) -> None:
    tiny = families.FAMILIES["qwen3_5"]
    tiny.write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**tiny.config, "attention_bias": True}))
    matrices = {
        name: array for name, array in tiny.tensors.items() if ".self_attn." in name and name.endswith("proj.weight")
    }
    biases = {name[:-6] + "bias": np.arange(len(array), dtype=np.float32) for name, array in matrices.items()}
    save_file({**tiny.tensors, **biases}, tmp_path / "model.safetensors")
    with HuggingFaceSource(tmp_path) as source:
        attention = source.config.layers[2].mixer
        size = attention.head_dim  # type: ignore[union-attr]
        stored = biases["model.layers.2.self_attn.q_proj.bias"].reshape(-1, 2, size)
        for part, name in enumerate(("q_proj", "gate_proj")):
            found = source.read_float32(f"model.layers.2.self_attn.{name}.bias")
            np.testing.assert_array_equal(found, stored[:, part].ravel())


def test_numbers_that_no_json_has_are_read_as_transformers_tags_them(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": [0.0, {"__float__": "Infinity"}], "b": {"c": {"__float__": "-Infinity"}}, "d": Infinity}')
    assert read_json(path) == {"a": [0.0, math.inf], "b": {"c": -math.inf}, "d": math.inf}


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


def test_olmo3_has_one_base_and_scales_only_full_attention_where_positions_are_not_by_type_of_layer() -> None:
    """As transformers 5 writes it: the sliding layers have no scaling, but the base is that of all layers."""
    old = dict(families.FAMILIES["olmo3"].config)
    new = {key: value for key, value in old.items() if not key.startswith("rope_")}
    scaling: Any = old["rope_scaling"]
    attentions = config_of(new | {"rope_parameters": {**scaling, "rope_theta": 8e6}}).attentions
    ropes = [attention.rope for attention in attentions if attention.rope is not None]
    assert [rope.theta for rope in ropes] == [8e6] * 4
    assert [isinstance(rope.scaling, YarnScaling) for rope in ropes] == [False, False, False, True]
    assert [rope.scaling is None for rope in ropes] == [True, True, True, False]


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


def scout(**changes: Any) -> dict[str, Any]:
    """As meta-llama/Llama-4-Scout-17B-16E-Instruct has it, in six layers."""
    rope = {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
    text = {
        "attention_chunk_size": 8192,
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "model_type": "llama4_text",
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 6,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rope_scaling": {**rope, "original_max_position_embeddings": 8192},
        "vocab_size": 202048,
        **changes,
    }
    return {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": text}


def test_llama_4_leaves_layers_temperatures_and_norms_to_the_class() -> None:
    config = config_of(scout())
    assert config.max_position_embeddings == 1 << 22
    with_rope, without = config.attentions[2:4]
    assert (with_rope.chunk, with_rope.qk_norm, with_rope.temperature) == (
        8192,
        QKNorm(has_gain=False, after_rope=True),
        None,
    )
    assert (without.rope, without.chunk, without.qk_norm) == (None, None, None)
    assert without.temperature == Temperature(beta=0.1, original_length=8192, shift=1)
    assert [attention.rope is None for attention in config.attentions] == [False] * 3 + [True] + [False] * 2
    (experts,) = {layer.ffn for layer in config.layers}
    assert isinstance(experts, Experts) and (experts.num_experts, experts.intermediate_size) == (16, 8192)
    assert experts.input_scaled and experts.shared == SharedExpert(intermediate_size=8192)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # there is nothing between frequencies that are kept and those that are not
        kept = rope_frequencies(config.ropes[0]) == rope_frequencies(Rope(theta=5e5, rotary_dim=128))
    assert kept.tolist() == [True] * 35 + [False] * 29


def test_the_language_model_of_a_llama_4_that_sees_is_read(tmp_path: Path) -> None:
    """Under the names of meta-llama/Llama-4-Scout-17B-16E-Instruct."""
    tiny = families.FAMILIES["llama4"]
    tiny.write(tmp_path)
    tensors = {f"language_model.{name}": tensor for name, tensor in tiny.tensors.items()}
    seeing = {
        name: np.zeros((2, 2), np.float32)
        for name in ("vision_model.class_embedding", "multi_modal_projector.linear_1.weight")
    }
    save_file(tensors | seeing, tmp_path / "model.safetensors")
    nested = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": dict(tiny.config)}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert distance(HuggingFaceSource(tmp_path), "llama4") <= TOLERANCE


def test_maverick_has_experts_in_every_other_layer_and_no_norms() -> None:
    config = config_of(scout(interleave_moe_layer_step=2, use_qk_norm=False, num_local_experts=128))
    assert [isinstance(layer.ffn, Experts) for layer in config.layers] == [False, True] * 3
    assert config.layers[0].ffn == Dense(intermediate_size=16384)
    assert not any(attention.qk_norm for attention in config.attentions)
    listed = config_of(scout(moe_layers=[0, 5]))
    assert [isinstance(layer.ffn, Experts) for layer in listed.layers] == [True, *[False] * 4, True]
    values = {"num_hidden_layers": 1, "moe_intermediate_size": 64}
    for count, has_norm in ((16, True), (128, False)):  # a GGUF file does not say it
        found = gguf_config("llama4", num_local_experts=count, num_experts_per_tok=1, **values)
        assert (found.attentions[0].qk_norm is not None) == has_norm


def test_a_llama_4_without_chunks_in_gguf_is_refused() -> None:
    with pytest.raises(UnsupportedArchitecture, match="without chunks is not supported"):
        gguf_config("llama4", num_hidden_layers=1, num_local_experts=4, **{"attention.sliding_window": 0})


@pytest.mark.parametrize("name", ["stablelm", "stablelm-parallel"])
def test_a_file_of_stablelm_is_parallel_where_it_has_no_second_norm(name: str, tmp_path: Path) -> None:
    """Whatever it says: llama.cpp's converter says yes of every model whose config.json does not say."""
    tiny = families.FAMILIES[name]
    says_otherwise = {**tiny.config, "use_parallel_residual": not tiny.config["use_parallel_residual"]}
    path = tiny_gguf.write(replace(tiny, config=says_otherwise), tmp_path / "tiny.gguf")
    assert distance(GGUFSource(path), name) <= TOLERANCE
