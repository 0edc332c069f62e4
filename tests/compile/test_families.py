"""Families read their settings; what no kernel computes is refused by name; NumPy computes all of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from radixlm.compile import compile_model
from radixlm.compile.families.registry import FAMILIES, unsupported, weight_shapes
from radixlm.compile.families.settings import Settings
from radixlm.compile.kv_layout import resolved
from radixlm.compile.ops import implemented
from radixlm.compile.ops.implemented import check_implemented
from radixlm.compile.reference import reference_logits
from radixlm.runtime.artifact.model_config import (
    Dense,
    DenseAndExperts,
    DynamicScaling,
    Experts,
    FactorsScaling,
    Gate,
    LayerInputs,
    LongRopeScaling,
    ModelConfig,
    ProportionalScaling,
    QKNorm,
    Rope,
    Router,
    SharedExpert,
    Temperature,
    YarnScaling,
)
from radixlm.runtime.errors import UnsupportedArchitecture

ROPE = Rope(theta=1e4, rotary_dim=8)
MIXERS: dict[str, dict[str, Any]] = {
    "no rope": {"rope": None},
    "partial rope": {"rope": replace(ROPE, rotary_dim=4)},
    "yarn": {"rope": replace(ROPE, scaling=YarnScaling(factor=4.0, original_max_position_embeddings=16))},
    "factors": {"rope": replace(ROPE, scaling=FactorsScaling(factors=(1.0, 2.0, 3.0, 4.0), attention_factor=1.2))},
    "proportional": {"rope": replace(ROPE, scaling=ProportionalScaling(num_pairs=1))},
    "dynamic": {"rope": replace(ROPE, scaling=DynamicScaling(alpha=100.0))},
    "scale": {"scale": 1.0},
    "bias": {"bias": True, "output_bias": True},
    "norm of heads": {"qk_norm": QKNorm()},
    "norm of the width": {"qk_norm": QKNorm(over="width", after_rope=True)},
    "norm without gain": {"qk_norm": QKNorm(has_gain=False)},
    "norm of values": {"value_norm": True},
    "window": {"window": 5},
    "chunk": {"chunk": 5},
    "soft-cap": {"soft_cap": 1.0},
    "sinks": {"sinks": True},
    "gate": {"gate": Gate()},
    "gate with a bias": {"gate": Gate(bias=True)},
    "gate of heads": {"gate": Gate(over="head", function="softplus")},
    "temperature": {"temperature": Temperature(beta=2.0, original_length=16, shift=1)},
    "values that are keys": {"keys_are_values": True},
}
LAYERS: dict[str, dict[str, Any]] = {
    "post": {"norms": "post"},
    "sandwich": {"norms": "sandwich"},
    "feed-forward norm": {"norms": "pre_ffn"},
    "sandwich of another eps": {"norms": "sandwich", "post_norm_eps": 10.0},
    "parallel": {"norms": "parallel"},
    "parallel of two norms": {"norms": "parallel_two"},
    "no feed-forward": {"ffn": None},
    "scalar": {"layer_scalar": True},
    "relu2": {"ffn": Dense(intermediate_size=12, function="relu2", bias=True)},
    "gelu": {"ffn": Dense(intermediate_size=12, function="gelu")},
    "experts": {"ffn": Experts(num_experts=4, num_active=2, intermediate_size=12)},
    "shared expert": {
        "ffn": Experts(
            num_experts=4,
            num_active=2,
            intermediate_size=12,
            function="swiglu_clamped",
            bias=True,
            router=Router(scores="sigmoid", selection_bias=True, num_groups=2, bias=True, scale=2.0),
            shared=SharedExpert(intermediate_size=8, gate=True),
        )
    },
    "dense layer and experts": {
        "norms": "sandwich",
        "ffn": DenseAndExperts(
            dense=Dense(intermediate_size=12), experts=Experts(num_experts=4, num_active=2, intermediate_size=12)
        ),
    },
    "scaled input": {
        "ffn": Experts(
            num_experts=4,
            num_active=1,
            intermediate_size=12,
            input_scaled=True,
            router=Router(scores="softmax_of_chosen", expert_scale=True, input_norm=True),
        )
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "LayerNorm": {"norm": "layer_bias"},
    "embedding factor": {"embedding_factor": 7.0},
    "embedding norm": {"embedding_norm": True},
    "residual factor": {"residual_factor": 0.25},
    "logits factor": {"logits_factor": 0.25},
    "logits soft-cap": {"logits_soft_cap": 2.0},
    "output bias": {"output_bias": True},
    "layer inputs": {"layer_inputs": LayerInputs(size=16, vocab_size=40)},
}
PLAIN = frozenset({"dynamic", "proportional"})  # which need no kernel of their own


def model_of(name: str) -> ModelConfig:
    settings = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    more = {"intermediate_size": 12, "vocab_size": 40, "max_position_embeddings": 64}
    config = FAMILIES["llama"].config(Settings("tiny", "huggingface", "llama", "", settings | more))
    layer = config.layers[0]
    if name in MIXERS:
        layer = replace(layer, mixer=replace(layer.mixer, **MIXERS[name]))
    layer = replace(layer, **LAYERS.get(name, {}))
    second = replace(layer, mixer=replace(layer.mixer, shared_kv=0)) if name == "shared" else layer
    return replace(config, layers=(layer, second), **MODELS.get(name, {}))


def logits_of(config: ModelConfig) -> np.ndarray:
    def weight(name: str) -> np.ndarray:
        shape = shapes[name]
        rng = np.random.default_rng(list(name.encode()))
        return (rng.standard_normal(shape) * (0.3 if len(shape) > 1 else 1.0)).astype(np.float32)

    shapes = weight_shapes(config)
    return reference_logits(config, weight, range(40), dtype=np.float64)


@pytest.mark.parametrize("name", [*MIXERS, *LAYERS, *MODELS, "shared"])
def test_a_feature_moves_the_logits_of_numpy_and_is_computed_or_refused(name: str) -> None:
    config = model_of(name)
    logits = logits_of(config)
    assert np.isfinite(logits).all()
    assert np.abs(logits - logits_of(model_of("llama"))).max() > 1e-3 * logits.std()
    try:
        check_implemented("tiny", config)
    except UnsupportedArchitecture as refused:
        assert name not in PLAIN and "llama needs" in str(refused)


def test_the_plain_model_is_computed() -> None:
    check_implemented("tiny", model_of("llama"))
    for name in PLAIN:
        check_implemented("tiny", model_of(name))


def test_a_window_hides_what_is_before_it() -> None:
    """The last token's logits do not depend on a token that no layer's window reaches."""
    config = model_of("window")
    shapes = weight_shapes(config)
    rng = np.random.default_rng(0)
    weights = {name: 0.3 * rng.standard_normal(shape) for name, shape in shapes.items()}
    first, other = (reference_logits(config, weights.__getitem__, [start, *range(1, 12)]) for start in (20, 21))
    np.testing.assert_allclose(first[9:], other[9:], rtol=1e-12)  # two layers of 5: 9 tokens
    assert np.abs(first[8] - other[8]).max() > 1e-6


def test_longrope_is_chosen_by_the_compiled_length() -> None:
    scaling = LongRopeScaling(
        short_factors=(1.0,) * 4,
        long_factors=(2.0,) * 4,
        original_max_position_embeddings=32,
        attention_factor=1.5,
    )
    config = model_of("llama")
    mixer = replace(config.layers[0].mixer, rope=replace(ROPE, scaling=scaling), window=48)
    config = replace(config, layers=(replace(config.layers[0], mixer=mixer),))
    for length, factors, window in ((32, (1.0,) * 4, None), (33, (2.0,) * 4, None), (49, (2.0,) * 4, 48)):
        (found,) = resolved(config, length).attentions
        assert found.rope is not None and found.window == window
        assert found.rope.scaling == FactorsScaling(factors=factors, attention_factor=1.5)


def test_a_model_without_kernels_is_refused_before_anything_is_written(
    make_tiny: Callable[..., Any],
    write_huggingface: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(implemented.MODEL, "a context", lambda model: True)
    source = write_huggingface(make_tiny())
    output = tmp_path / "out" / "tiny.radixlm"
    output.parent.mkdir()
    with pytest.raises(UnsupportedArchitecture, match="llama needs a context"):
        compile_model(source, output)
    assert not list(output.parent.iterdir())


FAR = ("Jamba", "GPTNeoX", "MiniCPM", "PhiMoE", "InternLM2", "Starcoder2", "KimiLinear", "Mamba")


def test_an_unknown_family_is_told_the_nearest() -> None:
    assert "the nearest is Qwen3" in str(unsupported("x", "Qwen3NextForCausalLM"))
    assert "the nearest is Llama" in str(unsupported("x", "llama4"))
    for name in (*FAR, "xyz"):
        assert "the nearest by name is " in str(unsupported("x", f"{name}ForCausalLM"))
    told = str(unsupported("x", None))
    assert told == "x: architecture None is not supported; radixlm models lists those that are"
