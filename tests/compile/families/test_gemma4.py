"""What Gemma 4 has that no checkpoint can be without, what its files hold beside it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from radixlm.cli.tables import layer_rows
from radixlm.compile.families.gemma4 import Gemma4, Gemma4Unified
from radixlm.compile.families.registry import weight_shapes
from radixlm.compile.families.settings import Settings
from radixlm.compile.inspection import inspect_source
from radixlm.compile.kv_layout import resolved
from radixlm.compile.ops.implemented import check_implemented
from radixlm.compile.reference import reference_logits
from radixlm.compile.sources.huggingface import HuggingFaceSource, huggingface_settings
from radixlm.compile.sources.source import Source
from radixlm.compile.stored_weights import source_token_bytes
from radixlm.runtime.artifact.model_config import Experts, LayerConfig, ModelConfig, ProportionalScaling
from radixlm.runtime.errors import CorruptSource, SourceError, UnsupportedArchitecture
from safetensors.numpy import load_file, save_file

from ...goldens.families import FAMILIES
from ...goldens.tiny_outputs import TinyOutputs
from .harness import SEEN, TOLERANCE, distance

TINY, PROMPT = FAMILIES["gemma4"], 2  # of 70 tokens


def config_of(name: str = "gemma4", **changes: Any) -> ModelConfig:
    text: Any = FAMILIES[name].text
    nested = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": {**text, **changes}}
    settings = huggingface_settings("tiny", nested)
    return Gemma4().config(settings)


def far(config: ModelConfig, source: Source, name: str) -> float:
    """How far the logits of `config` are from the golden; a matrix that the source lacks is random."""

    def weight(tensor: str) -> np.ndarray:
        if tensor in source.tensors():
            return source.read_float32(tensor)
        rng = np.random.default_rng(list(tensor.encode()))
        return (rng.standard_normal(weight_shapes(config)[tensor]) / 8).astype(np.float32)

    prompt = TinyOutputs.load(name).prompts[PROMPT]
    return float(prompt.distance(reference_logits(config, weight, prompt.ids)[prompt.rows]))


def mixers(config: ModelConfig, **changes: Any) -> ModelConfig:
    return replace(config, layers=tuple(replace(each, mixer=replace(each.mixer, **changes)) for each in config.layers))


def shares_another(config: ModelConfig) -> ModelConfig:
    """The fourth layer reads the keys and values of the first, and not of the second, which is the last like it."""
    layers = list(config.layers)
    assert layers[3].mixer.shared_kv == 1
    layers[3] = replace(layers[3], mixer=replace(layers[3].mixer, shared_kv=0))
    return replace(config, layers=tuple(layers))


def without_router_norm(layer: LayerConfig) -> LayerConfig:
    assert layer.ffn is not None and layer.experts is not None
    router = replace(layer.experts.router, input_norm=False)
    return replace(layer, ffn=replace(layer.ffn, experts=replace(layer.experts, router=router)))


WITHOUT: dict[str, tuple[str, Callable[[ModelConfig], ModelConfig]]] = {
    "shared keys and values": ("gemma4", shares_another),
    "scores that are not scaled": ("gemma4", lambda c: mixers(c, scale=c.head_dim**-0.5)),
    "embedding factor": ("gemma4", lambda c: replace(c, embedding_factor=1.0)),
    "layer inputs": ("gemma4", lambda c: replace(c, layer_inputs=None)),
    "values that are keys": ("gemma4-moe", lambda c: mixers(c, keys_are_values=False)),
    "router norm": ("gemma4-moe", lambda c: replace(c, layers=tuple(map(without_router_norm, c.layers)))),
    "experts beside": (
        "gemma4-moe",
        lambda c: replace(c, layers=tuple(replace(each, ffn=each.ffn.dense) for each in c.layers)),  # type: ignore[union-attr]
    ),
}


@pytest.mark.parametrize("feature", WITHOUT)
def test_without_what_every_checkpoint_has_the_golden_is_missed(feature: str, source_of: Callable[..., Source]) -> None:
    name, change = WITHOUT[feature]
    source = source_of(name)
    assert far(source.config, source, name) <= TOLERANCE
    assert far(change(source.config), source, name) > SEEN


def test_layers_have_two_shapes_and_the_last_share() -> None:
    small, large = config_of().attentions[:3:2]
    assert (small.head_dim, small.num_kv_heads, small.window) == (32, 1, 16)
    assert (large.head_dim, large.num_kv_heads, large.window) == (64, 1, None)
    assert large.rope is not None and large.rope.scaling == ProportionalScaling(num_pairs=8)
    assert [each.shared_kv for each in config_of().attentions] == [None, None, None, 1, 2]
    assert [each.ffn.intermediate_size for each in config_of().layers if each.ffn] == [128, 128, 128, 256, 256]
    experts = config_of("gemma4-moe")
    assert [each.num_kv_heads for each in experts.attentions] == [2, 2, 1]
    assert [each.keys_are_values for each in experts.attentions] == [False, False, True]


def test_a_config_leaves_sizes_to_the_class() -> None:
    config = Gemma4().config(huggingface_settings("x", {"architectures": ["Gemma4ForCausalLM"]}))
    assert (config.vocab_size, config.num_hidden_layers, config.hidden_size) == (262144, 30, 2304)
    shapes = [(each.head_dim, each.num_kv_heads, each.window) for each in config.attentions]
    assert shapes[:6] == [(256, 4, 512)] * 5 + [(512, 4, None)] and shapes[-1] == (512, 4, None)
    local, whole = config.ropes
    assert (local.theta, local.scaling) == (1e4, None)
    assert (whole.theta, whole.scaling) == (1e6, ProportionalScaling(num_pairs=64))
    assert config.layer_inputs is not None and config.layer_inputs.size == 256
    unified = Gemma4Unified().config(huggingface_settings("x", {"architectures": ["Gemma4UnifiedForCausalLM"]}))
    assert unified.layer_inputs is None and unified.attentions[0].window == 1024


@pytest.mark.parametrize(
    ("name", "length", "why"),
    [
        ("gemma4", 512, "window of the tokens"),
        ("gemma4", 16, "read the keys and values of others"),
        ("gemma4-moe", 16, "2 different shapes of keys and values"),
    ],
)
def test_a_part_of_a_prefix_is_refused_with_the_reason(name: str, length: int, why: str) -> None:
    assert why in (resolved(config_of(name), length).why_not_partial or "")


def test_what_sees_and_hears_and_unused_matrices_are_left_out(tmp_path: Path) -> None:
    """As checkpoints of the hub have it; layers that share keys and values have matrices that nothing reads."""
    TINY.write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    parts = ("vision_tower.x", "audio_tower.x", "embed_vision.x", "embed_audio.x", "vision_embedder.x")
    more = {f"model.{part}.weight": np.zeros((2, 2), np.float32) for part in parts}
    for part in ("k_proj", "v_proj", "k_norm"):
        stem = "model.language_model.layers"
        more[f"{stem}.3.self_attn.{part}.weight"] = tensors[f"{stem}.1.self_attn.{part}.weight"]
    save_file(tensors | more, tmp_path / "model.safetensors")
    assert distance(HuggingFaceSource(tmp_path), "gemma4") <= TOLERANCE
    for foreign in ("model.language_model.layers.1.self_attn.q_proj.bias", f"{stem}.2.self_attn.v_norm.weight"):
        save_file(tensors | {foreign: np.zeros(128, np.float32)}, tmp_path / "model.safetensors")
        with pytest.raises(UnsupportedArchitecture, match="has no place in the gemma4 architecture"):
            HuggingFaceSource(tmp_path)


@pytest.mark.parametrize("part", ["attn_k.weight", "attn_v.weight", "attn_k_norm.weight"])
def test_unused_matrices_of_a_gguf_file_are_left_out(part: str) -> None:
    assert [Gemma4().ignores(f"blk.{index}.{part}", config_of()) for index in range(5)] == [False] * 3 + [True] * 2


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        ("gemma4", {"use_bidirectional_attention": "all"}, UnsupportedArchitecture, "see what follows"),
        ("gemma4", {"attention_bias": True}, UnsupportedArchitecture, "attention_bias is not supported"),
        ("gemma4", {"num_kv_shared_layers": 3}, CorruptSource, "layer 2 has no keys and values"),
        ("gemma4", {"num_kv_shared_layers": 9}, CorruptSource, "layer 0 has no keys and values"),
        ("gemma4", {"vocab_size_per_layer_input": 319}, CorruptSource, "320 tokens and 319 rows"),
        ("gemma4-moe", {"num_experts": None}, CorruptSource, "num_experts of experts is not given"),
        ("gemma4-moe", {"top_k_experts": 9}, CorruptSource, "cannot have 9 of 8 experts"),
    ],
)
def test_a_configuration_that_cannot_be_computed_is_refused(
    name: str, changes: dict[str, Any], error: type[SourceError], message: str
) -> None:
    with pytest.raises(error, match=message):
        config_of(name, **changes)


def test_numbers_of_layers_that_kernels_cannot_cut_are_refused() -> None:
    with pytest.raises(UnsupportedArchitecture, match="numbers of layers that are no multiple of 16"):
        check_implemented("tiny", config_of(hidden_size_per_layer_input=24))


def test_files_of_llama_cpp_may_stretch_no_frequency() -> None:
    values = {"sliding_window_pattern": [True, False], "num_hidden_layers": 2, "attention.key_length_swa": 32}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 320}
    more = {"intermediate_size": 64, "max_position_embeddings": 512, "sliding_window": 16}
    factors = {"rope_freqs": (1.0, 2.0, *([1e30] * 30))}
    settings = Settings("x", "gguf", "gemma4", "gemma4", values | sizes | more, rope_factors=factors)
    with pytest.raises(UnsupportedArchitecture, match="1 and huge numbers only"):
        Gemma4().config(settings)


def test_a_token_reads_its_own_row_of_the_embeddings_for_layers(source_of: Callable[..., Source]) -> None:
    with_inputs = source_of("gemma4")
    table = with_inputs.tensors()["model.embed_tokens_per_layer.weight"].shape
    whole = sum(int(np.prod(tensor.shape)) for tensor in with_inputs.tensors().values())
    assert source_token_bytes(with_inputs) == 4 * (whole - (table[0] - 1) * table[1])


def test_inspection_counts_experts_beside_a_dense_layer(checkpoint: Callable[[str], Path]) -> None:
    found = inspect_source(checkpoint("gemma4-moe"))
    assert found.refusal is None and found.family == "Gemma 4"
    experts = found.model.layers[0].experts
    assert isinstance(experts, Experts) and (experts.num_experts, experts.num_active) == (8, 3)
    assert dict(layer_rows(found.model))["experts"] == "3 of 8 per token, in 3 layers"


def test_a_table_says_what_layers_get_and_share() -> None:
    rows = dict(layer_rows(config_of()))
    assert rows["heads"] == "4 of 32, 1 for keys and values; 4 of 64, 1 for keys and values"
    assert rows["shared"] == "2 layers use the KV of other layers"
    assert rows["layer inputs"] == "32 numbers per token and layer"
