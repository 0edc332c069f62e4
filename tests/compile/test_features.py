"""What families have and Llama has not, compiled: logits are those of NumPy, and rows do not depend on each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from radixlm.compile import compile_model, verification
from radixlm.compile.families.registry import FAMILIES
from radixlm.compile.ops import functions
from radixlm.compile.ops.reference_ops import ReferenceOps
from radixlm.compile.reference import evaluate
from radixlm.compile.sources.huggingface import HuggingFaceSource
from radixlm.compile.stored_weights import Quantize
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.model_config import (
    Dense,
    DenseAndExperts,
    Experts,
    Function,
    LayerInputs,
    ModelConfig,
    Router,
    SharedExpert,
)
from radixlm.runtime.errors import VerificationFailed
from radixlm.runtime.model.model_runner import ModelRunner

from .conftest import TinyModel
from .ragged import Rows

Weights = dict[str, np.ndarray]

LONG = pytest.mark.long  # for `make test-long`: what another here has, too
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the model, and of its layers
    "post": ({}, {"norms": "post"}),
    "feed-forward norm": ({"norm": "layer"}, {"norms": "pre_ffn"}),
    "sandwich": ({"residual_factor": 0.5}, {"norms": "sandwich", "post_norm_eps": 0.5}),
    "parallel": ({"norm": "layer"}, {"norms": "parallel"}),
    "parallel of two norms": ({"norm": "layer_bias"}, {"norms": "parallel_two"}),
    "no feed-forward": ({}, {"ffn": None}),
    "scalar": ({"norm": "layer_bias"}, {"layer_scalar": True}),
    "factors": ({"embedding_factor": 7.0, "residual_factor": 0.25, "logits_factor": 0.0625}, {}),
    "embedding norm": ({"embedding_norm": True, "embedding_factor": 0.3}, {}),
    "logits soft-cap": ({"logits_soft_cap": 3.0, "logits_factor": 0.0625, "output_bias": True}, {}),
}
FUNCTIONS: tuple[Function, ...] = (
    "gelu_mul",
    "gelu_tanh_mul",
    "relu2_mul",
    "swiglu_clamped",
    "silu",
    "gelu",
    "gelu_tanh",
    "relu2",
)
EXPERTS: dict[str, Experts] = {
    "Qwen3-MoE": Experts(num_experts=8, num_active=3, intermediate_size=40),
    "gpt-oss": Experts(
        num_experts=8,
        num_active=2,
        intermediate_size=64,
        function="swiglu_clamped",
        bias=True,
        router=Router(scores="softmax_of_chosen", bias=True),
    ),
    "DeepSeek-V3": Experts(
        num_experts=8,
        num_active=3,
        intermediate_size=32,
        router=Router(scores="sigmoid", selection_bias=True, num_groups=4, num_active_groups=2, scale=2.5),
        shared=SharedExpert(intermediate_size=64),
    ),
    "Qwen2-MoE": Experts(
        num_experts=5,
        num_active=2,
        intermediate_size=64,
        router=Router(renormalise=False),
        shared=SharedExpert(intermediate_size=32, gate=True),
    ),
    "Llama 4": Experts(
        num_experts=4,
        num_active=1,
        intermediate_size=64,
        input_scaled=True,
        router=Router(scores="sigmoid_of_chosen"),
        shared=SharedExpert(intermediate_size=64),
    ),
    "Gemma 4": Experts(
        num_experts=8,
        num_active=2,
        intermediate_size=32,
        function="gelu_tanh_mul",
        router=Router(expert_scale=True, input_norm=True),
    ),
}
for family, experts in EXPERTS.items():
    FEATURES[family] = {}, {"ffn": experts, "norms": "sandwich" if family == "Gemma 4" else "pre"}
BESIDE = DenseAndExperts(dense=Dense(intermediate_size=64, function="gelu_tanh_mul"), experts=EXPERTS["Gemma 4"])
FEATURES["Gemma 4 beside"] = {}, {"ffn": BESIDE, "norms": "sandwich"}
FEATURES["layer inputs"] = {"layer_inputs": LayerInputs(size=32, vocab_size=64)}, {"layer_scalar": True}
for function in FUNCTIONS:
    FEATURES[function] = {}, {"ffn": Dense(intermediate_size=100, function=function, bias=function == "gelu")}


def compiled_with(
    name: str, make_tiny: Callable[..., Any], write: Callable[..., Path], patch: pytest.MonkeyPatch
) -> Path:
    """A source of a random Llama that has the feature; with experts, of weights that are `conditioned`."""
    of_model, of_layer = FEATURES[name]
    family = type(FAMILIES["llama"])
    original = family.config

    def config(self: Any, settings: Any) -> ModelConfig:
        plain = original(self, settings)
        return replace(plain, layers=tuple(replace(layer, **of_layer) for layer in plain.layers), **of_model)

    patch.setattr(family, "config", config)
    tiny = make_tiny()
    return write(conditioned(tiny) if name in EXPERTS else tiny)


def conditioned(tiny: TinyModel) -> TinyModel:
    """The model with matrices that keep the deviation of their input, but those of gates, which shall reach limits.

    With all deviations 1, router logits reach 23, and attention is at one token or another: NumPy itself then moves a
    token of gpt-oss's layer by 2.5e-4 where embeddings change by 1e-7 (in float64 by 1.1e-4), and by 0.37 where inputs
    are rounded and embeddings change by 1e-4, because other experts are chosen. With these it is 1.1e-6 and 1.5e-6.
    """
    for name, weight in tiny.weights.items():
        if weight.ndim > 1 and "embed_tokens" not in name and not name.endswith("bias"):
            enters = ".experts." in name and "down_proj" not in name
            tiny.weights[name] = weight * np.float32((3.5 if enters else 1.0) * weight.shape[-1] ** -0.5)
    return tiny


@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG if name in FUNCTIONS[1:] else []) for name in FEATURES])
def test_a_feature_compiles_to_the_logits_of_numpy(
    name: str,
    make_tiny: Callable[..., Any],
    write_huggingface: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All layers, and each alone: one that is left out adds nothing, whatever it computes."""
    source = compiled_with(name, make_tiny, write_huggingface, monkeypatch)
    monkeypatch.setattr(verification, "_layers_apart", lambda config, weights: [(0, 1), (0,), (1,)])
    report = compile_model(source, tmp_path / "feature.radixlm", quantize="f32", kv_dtype="f32")
    assert report.verification.worst_difference < (1e-5 if name in EXPERTS else 1e-4)


def without_biases(part: str) -> Callable[[ModelConfig, Weights], tuple[ModelConfig, Weights]]:
    """Zeros for what ends in `part`."""
    return lambda config, weights: (
        config,
        {name: weight * (not name.endswith(part)) for name, weight in weights.items()},
    )


def with_router(**changes: Any) -> Callable[[ModelConfig, Weights], tuple[ModelConfig, Weights]]:
    """Another router."""

    def changed(config: ModelConfig, weights: Weights) -> tuple[ModelConfig, Weights]:
        router = replace(EXPERTS["gpt-oss"].router, **changes)
        layers = (replace(layer, ffn=replace(layer.ffn, router=router)) for layer in config.layers)  # type: ignore[type-var]
        return replace(config, layers=tuple(layers)), weights

    return changed


@pytest.mark.parametrize(
    "without",
    [
        pytest.param(without_biases("mlp.gate.bias"), id="bias of the router"),
        pytest.param(without_biases("gate_proj.bias"), id="biases of gates"),
        pytest.param(without_biases("up_proj.bias"), id="biases of up"),
        pytest.param(without_biases("down_proj.bias"), id="biases of down"),
        pytest.param(with_router(scores="softmax", renormalise=False), id="softmax of those chosen"),
        pytest.param(with_router(scores="sigmoid_of_chosen"), id="softmax"),
        pytest.param(None, id="limit of gates"),
    ],
)
def test_every_token_of_gpt_oss_shows_each_feature(
    without: Callable[[ModelConfig, Weights], tuple[ModelConfig, Weights]] | None,
    make_tiny: Callable[..., Any],
    write_huggingface: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By thousands of times what kernels may be off."""
    source = HuggingFaceSource(compiled_with("gpt-oss", make_tiny, write_huggingface, monkeypatch))
    weights = {name: source.read_float32(name) for name in source.tensors()}
    ids = np.random.default_rng(0).integers(0, source.config.vocab_size, 20)

    def logits(config: ModelConfig, weights: Weights) -> np.ndarray:
        return evaluate(config, ReferenceOps(weights.__getitem__, ids))

    expected = logits(source.config, weights)
    if without is None:
        monkeypatch.setattr(functions, "_CLAMP", 1e4)
    found = logits(*(without(source.config, weights) if without else (source.config, weights)))
    assert (np.sqrt(np.square(found - expected).mean(axis=-1)) / expected.std(axis=-1)).min() > 0.03


def test_a_kernel_without_the_limit_of_gates_is_found(
    make_tiny: Callable[..., Any],
    write_huggingface: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = compiled_with("gpt-oss", make_tiny, write_huggingface, monkeypatch)
    monkeypatch.setattr(functions, "_CLAMP", 1e4)
    with pytest.raises(VerificationFailed, match="differ from the NumPy evaluation"):
        compile_model(source, tmp_path / "feature.radixlm", quantize="f32", kv_dtype="f32")


@pytest.mark.parametrize(
    ("name", "quantize"),
    [
        *(pytest.param(name, "q8", marks=[] if name in ("gpt-oss", "DeepSeek-V3") else LONG) for name in EXPERTS),
        ("Qwen3-MoE", "q4"),
        pytest.param("sandwich", "q8", marks=LONG),
        ("parallel of two norms", "q4"),
        ("scalar", "f16"),
        pytest.param("logits soft-cap", "q8", marks=LONG),
        ("Gemma 4 beside", "q8"),
        ("layer inputs", "q4"),
    ],
)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(
    name: str,
    quantize: Quantize,
    make_tiny: Callable[..., Any],
    write_huggingface: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = compiled_with(name, make_tiny, write_huggingface, monkeypatch)
    report = compile_model(source, tmp_path / "feature.radixlm", quantize=quantize)
    assert report.verification.worst_difference < (0.1 if name in EXPERTS else 0.2)
    runner = ModelRunner(Artifact.open(report.path), num_pages=32)
    prompts = [np.random.default_rng(i).integers(0, 29, 41).tolist() for i in range(3)]
    whole = Rows(runner, 32)
    alone = [whole.step({whole.add(prompt): 41})[i] for i, prompt in enumerate(prompts)]
    mixed = Rows(runner, 32)
    numbers = [mixed.add(prompt) for prompt in prompts]
    parts = [mixed.step(dict(zip(numbers, counts, strict=True))) for counts in ((1, 17, 30), (3, 23, 1), (37, 1, 10))]
    for i, number in enumerate(numbers):
        assert (np.concatenate([part[number] for part in parts]) == alone[i]).all()
    runner.close()
