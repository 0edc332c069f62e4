"""Every kind of attention, several in each random model: compiled logits are NumPy's, and a token's have the same bits
whether its sequence is computed whole, in parts, beside others, or behind pages of another sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from msgspec.structs import fields, replace
from radixlm.compile import compile_model
from radixlm.compile.families.registry import FAMILIES, weight_shapes
from radixlm.compile.reference import reference_logits
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVDType
from radixlm.runtime.artifact.model_config import (
    Attention,
    FactorsScaling,
    Gate,
    LayerConfig,
    ModelConfig,
    ProportionalScaling,
    QKNorm,
    Rope,
    Temperature,
    YarnScaling,
)
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.model.model_runner import ModelRunner

from .conftest import write_checkpoint
from .ragged import Rows

NUM_TOKENS, NUM_PAGES = 90, 61
ROPE, SLOW = Rope(theta=1e4, rotary_dim=16), Rope(theta=1e6, rotary_dim=16)
YARN = YarnScaling(factor=4.0, original_max_position_embeddings=16)
FACTORS = FactorsScaling(factors=(1.0, 2.0, 3.0, 4.0), attention_factor=1.2)
PROPORTIONAL = ProportionalScaling(num_pairs=3)
LONG = {"num_kv_heads": 1, "head_dim": 32, "rope": Rope(theta=1e4, rotary_dim=32, scaling=PROPORTIONAL), "scale": 0.3}
OF_HEADS = QKNorm(has_gain=False)
MODELS: dict[str, tuple[dict[str, Any], ...]] = {  # the layers of each, where they are not Llama's
    "windows": (
        {"window": 20, "soft_cap": 2.0, "qk_norm": QKNorm(), "scale": 0.4},
        {"chunk": 24, "sinks": True, "rope": None, "temperature": Temperature(beta=0.5, original_length=16, shift=1)},
        {"rope": SLOW, "gate": Gate(bias=True), "soft_cap": 3.0},
        {"window": 33, "sinks": True, "gate": Gate(over="head", function="softplus"), "output_bias": True},
    ),
    "rotations": (
        {"rope": replace(ROPE, rotary_dim=8, scaling=FACTORS), "qk_norm": QKNorm(over="width"), "bias": True},
        {"rope": replace(ROPE, scaling=YARN), "qk_norm": QKNorm(after_rope=True), "sinks": True, "soft_cap": 2.0},
        {"rope": None, "keys_are_values": True, "value_norm": True, "scale": 0.5},
        {"qk_norm": QKNorm(over="each_head", kind="layer")},
    ),
    "shapes": (
        {"window": 20, "qk_norm": QKNorm(), "value_norm": True, "scale": 0.5},
        LONG | {"qk_norm": OF_HEADS, "keys_are_values": True},
        {"window": 20, "shared_kv": 0, "qk_norm": QKNorm()},
        LONG | {"shared_kv": 1, "sinks": True},
    ),
}
TOLERANCES: dict[KVDType, float] = {
    "f32": 1e-4,
    "f16": 2e-3,
    "k12v8": 2e-2,
}  # of codes, numbers near ties go either way


def config_of(name: str, plain: ModelConfig) -> ModelConfig:
    """A model of these layers; all else as in `plain`."""
    layer = plain.layers[0]
    mixers = (replace(layer.mixer, **({"rope": ROPE} | changes)) for changes in MODELS[name])
    return replace(plain, layers=tuple(replace(layer, mixer=mixer) for mixer in mixers))


def weight_of(config: ModelConfig) -> Callable[[str], np.ndarray]:
    """Random weights that depend on their names only; scores and gates of about 1."""
    shapes = weight_shapes(config)

    def weight(name: str) -> np.ndarray:
        shape = shapes[name]
        rng = np.random.default_rng(list(name.encode()))
        return (rng.standard_normal(shape) * (0.15 if len(shape) > 1 else 1.0)).astype(np.float32)

    return weight


@dataclass(frozen=True)
class Compiled:
    """An artifact, the logits that NumPy computes of two prompts, and how far from them it may be."""

    artifact: Artifact
    prompts: tuple[list[int], list[int]]
    expected: tuple[np.ndarray, np.ndarray]
    tolerance: float


class AtOddAddresses(Rows):
    """Rows whose arrays begin where no vector does."""

    def _batch(self, num_tokens: dict[int, int]) -> Batch:
        batch = super()._batch(num_tokens)
        return Batch(*(moved_by_one(array) for array in batch.arrays))


def moved_by_one(array: np.ndarray) -> np.ndarray:
    room = np.zeros(array.size + 17, array.dtype)
    start = (-room.ctypes.data // 4) % 16 + 1  # behind a multiple of 64 bytes
    room[start : start + array.size] = array.ravel()
    return room[start : start + array.size].reshape(array.shape)


def tokens(seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 29, NUM_TOKENS)]


@pytest.fixture(
    scope="module",
    params=[
        ("windows", "f32"),
        ("windows", "f16"),
        ("windows", "k12v8"),
        ("rotations", "k12v8"),
        ("rotations", "f32"),
        ("shapes", "f16"),
        ("shapes", "k12v8"),
    ],
    ids="-".join,
)
def compiled(
    request: pytest.FixtureRequest, make_tiny: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Compiled]:
    name, kv_dtype = request.param
    config = config_of(name, make_tiny().config)
    weight = weight_of(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(FAMILIES["llama"]), "config", lambda self, settings: config)
        tiny = make_tiny()
        tiny.weights |= {tensor: weight(tensor) for tensor in tiny.weights}
        folder = tmp_path_factory.mktemp(name)
        source = write_checkpoint(folder / "source", tiny)
        report = compile_model(source, folder / "tiny.radixlm", quantize="f32", kv_dtype=kv_dtype)
        prompts = tokens(0), tokens(1)
        expected = tuple(reference_logits(config, weight, prompt, kv_dtype=kv_dtype) for prompt in prompts)
        yield Compiled(Artifact.open(report.path), prompts, expected, TOLERANCES[kv_dtype])


def test_the_logits_are_those_of_numpy_with_the_same_bits_in_every_batch(compiled: Compiled) -> None:
    runner = ModelRunner(compiled.artifact, num_pages=NUM_PAGES, num_threads=2)
    first = compiled.prompts[0]
    cold = AtOddAddresses(runner, NUM_PAGES)
    alone = [cold.step({cold.add(prompt): NUM_TOKENS})[i] for i, prompt in enumerate(compiled.prompts)]
    for logits, expected in zip(alone, compiled.expected, strict=True):
        assert np.abs(logits - expected).max() < compiled.tolerance * expected.std()

    mixed = Rows(runner, NUM_PAGES)  # in chunks and token by token, beside one another
    numbers = [mixed.add(prompt) for prompt in compiled.prompts]
    parts: tuple[list[np.ndarray], ...] = ([], [])
    for counts in ((7, 19), (13, 2), (1, 45), *((1, 1) for _ in range(24)), (45, 0)):
        found = mixed.step({number: count for number, count in zip(numbers, counts, strict=True) if count})
        for number, logits in found.items():
            parts[number].append(logits)
    for logits, whole in zip(parts, alone, strict=True):
        assert (np.concatenate(logits) == whole).all()

    warm = Rows(runner, NUM_PAGES)  # behind pages that another sequence computed
    source = warm.add(first)
    warm.step({source: 3 * PAGE_SIZE})
    for num_shared in (1, 2, 3):
        number = warm.add(first)
        row = warm.rows[number]
        row.page_ids[:num_shared] = warm.rows[source].page_ids[:num_shared]
        row.num_computed = num_shared * PAGE_SIZE
        (logits,) = warm.step({number: NUM_TOKENS - row.num_computed}).values()
        assert (logits == alone[0][num_shared * PAGE_SIZE :]).all()
    runner.close()


@pytest.mark.parametrize("name", MODELS)
def test_each_feature_of_each_layer_moves_the_logits(name: str, make_tiny: Callable[..., Any]) -> None:
    """Without this, a compiled model could lack one and agree."""
    config = config_of(name, make_tiny().config)
    expected = reference_logits(config, weight_of(config), tokens(0))
    for index, changes in enumerate(MODELS[name]):
        for feature in changes:
            without = without_feature(config, index, feature)
            if without is not None:
                logits = reference_logits(without, weight_of(without), tokens(0))
                assert np.abs(logits - expected).max() > 3e-2 * expected.std(), (index, feature)


DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Attention)}


def without_feature(config: ModelConfig, index: int, feature: str) -> ModelConfig | None:
    """The model without a feature of a layer; None where the heads' sizes hang on it."""
    layer: LayerConfig = config.layers[index]
    if feature in ("num_kv_heads", "head_dim"):
        return None
    default = {"rope": ROPE, "scale": layer.mixer.head_dim**-0.5}.get(feature, DEFAULTS[feature])
    if feature == "rope" and layer.mixer.rope is not None:
        default = replace(ROPE, rotary_dim=layer.mixer.head_dim)
    changed = replace(layer, mixer=replace(layer.mixer, **{feature: default}))
    return replace(config, layers=tuple(changed if i == index else each for i, each in enumerate(config.layers)))
