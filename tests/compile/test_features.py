"""What families have and Llama has not, compiled: logits are those of NumPy, and rows do not depend on each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from radixlm.compile import compile_model
from radixlm.compile.families.registry import FAMILIES
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
from radixlm.runtime.model.model_runner import ModelRunner

from .ragged import Rows

FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the model, and of its layers
    "post": ({}, {"norms": "post"}),
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
        router=Router(scores="sigmoid", renormalise=False),
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
    """A source of a random Llama that has the feature."""
    of_model, of_layer = FEATURES[name]
    family = type(FAMILIES["llama"])
    original = family.config

    def config(self: Any, settings: Any) -> ModelConfig:
        plain = original(self, settings)
        return replace(plain, layers=tuple(replace(layer, **of_layer) for layer in plain.layers), **of_model)

    patch.setattr(family, "config", config)
    return write(make_tiny())


# With this random router and these weights one token of 20 is 2e-4 off in float32, and 0.4 where inputs are rounded: it
# is not known why. The golden of gpt-oss is met, with the same bits in all chunks (families/test_compiled.py).
NOT_EXPLAINED = pytest.mark.xfail(strict=True, reason="one token of 20 is far off, and it is not known why")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NOT_EXPLAINED if name == "gpt-oss" else ()) for name in FEATURES]
)
def test_a_feature_compiles_to_the_logits_of_numpy(
    name: str,
    make_tiny: Callable[..., Any],
    write_huggingface: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = compiled_with(name, make_tiny, write_huggingface, monkeypatch)
    report = compile_model(source, tmp_path / "feature.radixlm", quantize="f32", kv_dtype="f32")
    assert report.verification.worst_difference < 1e-4


@pytest.mark.parametrize(
    ("name", "quantize"),
    [
        *(pytest.param(name, "q8", marks=NOT_EXPLAINED if name == "gpt-oss" else ()) for name in EXPERTS),
        ("Qwen3-MoE", "q4"),
        ("sandwich", "q8"),
        ("parallel of two norms", "q4"),
        ("scalar", "f16"),
        ("logits soft-cap", "q8"),
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
    assert report.verification.worst_difference < 0.2
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
