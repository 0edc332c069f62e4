"""The NumPy evaluation agrees with what transformers computed for the same tiny models (tests/goldens)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from radixlm.compile.families.registry import FAMILIES
from radixlm.compile.ops import reference_ops
from radixlm.compile.ops.reference_mixers import round_to_int8
from radixlm.compile.ops.reference_ops import nothing_quantized
from radixlm.compile.ops.rope_frequencies import rope_frequencies
from radixlm.compile.reference import reference_logits
from radixlm.compile.sources.huggingface import huggingface_settings
from radixlm.runtime.artifact.manifest import TOP_LOGITS
from radixlm.runtime.artifact.model_config import FactorsScaling, ModelConfig, Rope

from ..goldens.tiny_models import TINY_MODELS, TinyModel
from ..goldens.tiny_outputs import TinyOutputs


def config_of(tiny: TinyModel) -> ModelConfig:
    settings = huggingface_settings(tiny.name, tiny.config)
    return FAMILIES[settings.architecture].config(settings)


@pytest.fixture(params=TINY_MODELS)
def tiny(request: pytest.FixtureRequest) -> TinyModel:
    return TINY_MODELS[request.param]


def logits_of(tiny: TinyModel, ids: list[int], **kwargs: object) -> np.ndarray:
    return reference_logits(config_of(tiny), tiny.tensors.__getitem__, ids, **kwargs)


def test_the_weights_are_those_the_goldens_were_made_of(tiny: TinyModel) -> None:
    assert tiny.digest() == TinyOutputs.load(tiny.name).digest


def test_logits_equal_those_of_transformers(tiny: TinyModel) -> None:
    for prompt in TinyOutputs.load(tiny.name).prompts:
        logits = logits_of(tiny, prompt.ids)
        assert logits.dtype == np.float32
        assert np.abs(logits[prompt.rows] - prompt.logits).max() <= 1e-4 * prompt.logits.std()


def test_rounding_kv_to_f16_moves_logits_by_less_than_two_thousandths(tiny: TinyModel) -> None:
    for prompt in TinyOutputs.load(tiny.name).prompts:
        logits = logits_of(tiny, prompt.ids, kv_dtype="f16")[prompt.rows]
        assert 0 < np.abs(logits - prompt.logits).max() <= 2e-3 * prompt.logits.std()


def test_embeddings_and_matrices_may_be_read_in_parts(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an embedding the rows of the prompt's tokens, of a matrix a strip at a time; never a whole one."""
    monkeypatch.setattr(reference_ops, "STRIP", 4096)
    read: list[int] = []

    def rows(name: str, rows: slice) -> np.ndarray:
        read.append(tiny.tensors[name][rows].size)
        return tiny.tensors[name][rows]

    def vector(name: str) -> np.ndarray:
        assert tiny.tensors[name].ndim == 1, name
        return tiny.tensors[name]

    ids = [3, 7, 3, 5]
    logits = reference_logits(config_of(tiny), vector, ids, rows=rows)
    np.testing.assert_allclose(logits, logits_of(tiny, ids), rtol=0, atol=1e-5 * logits.std())
    assert len([size for size in read if size == config_of(tiny).hidden_size]) >= 3 and max(read) <= 4096


def test_a_chat_of_three_turns_continues_as_in_transformers(tiny: TinyModel) -> None:
    history: list[int] = []
    for turn in TinyOutputs.load(tiny.name).turns:
        history += turn.user
        num_before = len(history)
        history += turn.reply
        chosen = logits_of(tiny, history)[num_before - 1 : -1].argmax(axis=-1)
        assert chosen.tolist() == turn.reply


def test_float64_differs_from_float32_by_rounding_only(tiny: TinyModel) -> None:
    ids = tiny.prompts()[2]
    exact = logits_of(tiny, ids, dtype=np.float64)
    assert exact.dtype == np.float64
    assert np.abs(exact - logits_of(tiny, ids)).max() <= 2e-5 * exact.std()


def test_a_token_sees_nothing_after_it(tiny: TinyModel) -> None:
    ids = tiny.prompts()[2]
    np.testing.assert_allclose(logits_of(tiny, ids[:9]), logits_of(tiny, ids)[:9], atol=1e-4)


def test_factors_say_the_same_as_llama3_scaling() -> None:
    (rope,) = config_of(TINY_MODELS["llama3"]).ropes
    unscaled = rope_frequencies(Rope(theta=rope.theta, rotary_dim=rope.rotary_dim))
    factors = tuple(float(f) for f in unscaled / rope_frequencies(rope))
    same = Rope(theta=rope.theta, rotary_dim=rope.rotary_dim, scaling=FactorsScaling(factors=factors))
    np.testing.assert_allclose(rope_frequencies(same), rope_frequencies(rope), rtol=1e-6)
    assert (min(factors), max(factors)) == (1.0, 8.0)


def test_int8_rounding_keeps_each_group_within_half_a_step() -> None:
    x = np.random.default_rng(0).normal(size=(5, 70)).astype(np.float32)
    x[0, 32:64] = 0
    rounded = round_to_int8(x)
    for start in (0, 32, 64):
        group, kept = x[:, start : start + 32], rounded[:, start : start + 32]
        step = np.abs(group).max(axis=1, keepdims=True) / 127
        assert (np.abs(group - kept) <= 0.501 * step).all()
        assert len(np.unique(np.rint(kept[1] / step[1]))) <= 255
    assert (rounded[0, 32:64] == 0).all()


def test_int8_rounding_goes_half_to_even() -> None:
    x = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]], dtype=np.float32)
    assert round_to_int8(x)[0].tolist() == [127, 0, 2, 2, 0, -2]


def test_activations_are_rounded_before_the_named_matrices_only() -> None:
    tiny = replace(TINY_MODELS["qwen2"])
    ids = tiny.prompts()[1]
    exact = logits_of(tiny, ids)
    asked: set[str] = set()

    def only_down(name: str) -> bool:
        asked.add(name)
        return name.endswith("down_proj.weight")

    some = logits_of(tiny, ids, quantized=only_down)
    everything = logits_of(tiny, ids, quantized=lambda name: True)
    assert np.array_equal(exact, logits_of(tiny, ids, quantized=nothing_quantized))
    assert 0 < np.abs(some - exact).max() < np.abs(everything - exact).max() < 0.2 * exact.std()
    assert asked == {name for name in tiny.tensors if name.endswith("weight") and "norm" not in name}


def test_the_largest_logits_are_exact_where_the_output_matrix_rounds_its_inputs() -> None:
    tiny = TINY_MODELS["qwen2"]
    ids = tiny.prompts()[1]
    exact = logits_of(tiny, ids)
    rounded = logits_of(tiny, ids, quantized=lambda name: name == "model.embed_tokens.weight")
    is_exact = rounded == exact
    largest = np.argsort(-exact, axis=-1)[:, : TOP_LOGITS // 2]
    assert np.take_along_axis(is_exact, largest, axis=-1).all()
    assert not is_exact.all(axis=-1).any()
