"""Recurrent layers beside attention: compiled logits are NumPy's, and a token's have the same bits whether its sequence
is computed whole, in parts, beside others, or from a copy of another's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from radixlm.compile import compile_model
from radixlm.compile.families.registry import FAMILIES
from radixlm.compile.kv_layout import resolved
from radixlm.compile.reference import reference_logits
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.artifact.model_config import GatedDelta, Mamba2, Mixer, ModelConfig, Recurrent, ShortConvolution
from radixlm.runtime.errors import EngineError, InvalidParameter
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.model.model_runner import ModelRunner

from .conftest import write_checkpoint
from .ragged import Rows
from .test_attention_models import weight_of

NUM_TOKENS, NUM_PAGES, NUM_SLOTS = 90, 61, 9
ATTENTION = None  # the plain model's
MODELS: dict[str, tuple[Mixer | None, ...]] = {
    "deltas": (
        GatedDelta(num_key_heads=2, num_value_heads=6, key_dim=16, value_dim=32, kernel_size=4),
        ATTENTION,
        GatedDelta(num_key_heads=3, num_value_heads=6, key_dim=32, value_dim=16, kernel_size=2, tiled=True),
        GatedDelta(num_key_heads=20, num_value_heads=20, key_dim=16, value_dim=16, kernel_size=3),
    ),
    "mamba": (
        Mamba2(num_heads=6, head_dim=32, num_groups=2, state_dim=24, kernel_size=4),
        ATTENTION,
        Mamba2(num_heads=20, head_dim=16, num_groups=1, state_dim=16, kernel_size=2, bias=True, convolution_bias=False),
    ),
    "convolutions": (
        ShortConvolution(kernel_size=3),
        ATTENTION,
        ShortConvolution(kernel_size=5, bias=True),
        ATTENTION,
        ShortConvolution(kernel_size=2),
    ),
}


BESIDE: dict[str, tuple[Recurrent | None, ...]] = {  # the plain model's attention
    "beside": (
        Mamba2(
            num_heads=5,
            head_dim=32,
            num_groups=1,
            state_dim=48,
            kernel_size=4,
            norm=False,
            gate_factor=1.5,
            value_factor=0.5,
            key_factor=0.7,
            query_factor=2.0,
            step_factor=0.4,
        ),
        None,
        ShortConvolution(kernel_size=3),
    ),
}
FACTORS = {"mixer_factor": 0.7, "beside_factor": 1.3, "ffn_factor": 0.6}


def config_of(name: str, plain: ModelConfig) -> ModelConfig:
    """A model of these layers; all else as in `plain`."""
    layer = plain.layers[0]
    if name in BESIDE:
        other = replace(layer, ffn=replace(layer.ffn, gate_factor=1.4), **FACTORS)
        return replace(plain, layers=tuple(replace(other, beside=beside) for beside in BESIDE[name]))
    return replace(plain, layers=tuple(replace(layer, mixer=mixer or layer.mixer) for mixer in MODELS[name]))


def fading(weight: Callable[[str], np.ndarray]) -> Callable[[str], np.ndarray]:
    """The same, where no state grows."""
    return lambda name: -np.abs(weight(name)) / 4 if name.endswith("A_log") else weight(name)


@dataclass(frozen=True)
class Compiled:
    """An artifact, and the logits that NumPy computes of two prompts."""

    artifact: Artifact
    prompts: tuple[list[int], list[int]]
    expected: tuple[np.ndarray, np.ndarray]


@pytest.fixture(scope="module", params=[*MODELS, *BESIDE])
def compiled(
    request: pytest.FixtureRequest, make_tiny: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Compiled:
    config = config_of(request.param, make_tiny().config)
    weight = fading(weight_of(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(FAMILIES["llama"]), "config", lambda self, settings: config)
        tiny = make_tiny()
        tiny.weights |= {tensor: weight(tensor) for tensor in tiny.weights}
        folder = tmp_path_factory.mktemp(request.param)
        source = write_checkpoint(folder / "source", tiny)
        report = compile_model(source, folder / "tiny.radixlm", quantize="f32", kv_dtype="f32")
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 29, NUM_TOKENS).tolist(), rng.integers(0, 29, NUM_TOKENS).tolist()
    expected = reference_logits(config, weight, prompts[0]), reference_logits(config, weight, prompts[1])
    return Compiled(Artifact.open(report.path), prompts, expected)


@pytest.fixture
def runner(compiled: Compiled) -> Iterator[ModelRunner]:
    runner = ModelRunner(compiled.artifact, num_pages=NUM_PAGES, num_threads=2, num_state_slots=NUM_SLOTS)
    yield runner
    runner.close()


def test_the_logits_are_those_of_numpy_with_the_same_bits_in_every_batch(
    compiled: Compiled, runner: ModelRunner
) -> None:
    cold = Rows(runner, NUM_PAGES)
    alone = [cold.step({cold.add(prompt): NUM_TOKENS})[i] for i, prompt in enumerate(compiled.prompts)]
    for logits, expected in zip(alone, compiled.expected, strict=True):
        assert np.abs(logits - expected).max() < 1e-4 * expected.std()

    mixed = Rows(runner, NUM_PAGES)  # in chunks and token by token, beside one another
    numbers = [mixed.add(prompt) for prompt in compiled.prompts]
    parts: tuple[list[np.ndarray], ...] = ([], [])
    for counts in ((7, 19), (13, 2), (1, 45), *((1, 1) for _ in range(24)), (45, 0)):
        found = mixed.step({number: count for number, count in zip(numbers, counts, strict=True) if count})
        for number, logits in found.items():
            parts[number].append(logits)
    for logits, whole in zip(parts, alone, strict=True):
        assert (np.concatenate(logits) == whole).all()
    assert runner.state_pool is not None and not runner.state_pool[0].any()


def test_a_sequence_goes_on_from_a_copy_of_anothers_state(compiled: Compiled, runner: ModelRunner) -> None:
    """Behind any token: a state knows no pages."""
    prompt, pool = compiled.prompts[0], runner.state_pool
    assert pool is not None
    rows = Rows(runner, NUM_PAGES)
    whole = rows.step({rows.add(prompt): NUM_TOKENS})[0]
    source, other = rows.add(prompt), rows.add(prompt)
    for stop in (16, 21, 63):
        rows.step({source: stop - rows.rows[source].num_computed})
        row, shared = rows.rows[other], -(-stop // PAGE_SIZE)
        row.page_ids[:shared] = rows.rows[source].page_ids[:shared]
        row.num_computed, row.state = stop, 8
        pool[8] = pool[rows.rows[source].state]
        snapshot = pool[8].copy()
        assert (rows.step({other: NUM_TOKENS - stop})[other] == whole[stop:]).all()
        assert (pool[8] == snapshot).all()


def test_a_row_without_tokens_changes_nothing(compiled: Compiled, runner: ModelRunner) -> None:
    pool = runner.state_pool
    assert pool is not None
    pool[1:] = 1.0
    batch = Batch.of_zeros(0, 5, [3])
    *arrays, rows = batch.arrays
    arrays[4] = np.array([[3], [4], [5]], np.int32)
    arrays[3] = np.full(5, 1, np.int32)
    runner.forward(
        Batch(*arrays, rows, state_in=np.array([2, 0, 2], np.int32), state_out=np.array([2, 6, 6], np.int32))
    )
    assert (pool[[1, 2, 3, 4, 5, 7, 8]] == 1).all() and (pool[6] != 1).all() and not pool[0].any()


@pytest.mark.parametrize(
    ("state_in", "state_out", "message"),
    [
        (None, [1, 2], "state_in is missing"),
        ([0, 0], None, "state_out is missing"),
        ([0], [1, 2], r"state_in is int32 \(1,\)"),
        ([0, 9], [1, 2], r"state_in holds 0\.\.9, must be in 0\.\.8"),
        ([0, 0], [1, 0], r"state_out holds 0\.\.1, must be in 1\.\.8"),
        ([0, 0], [3, 3], "sequences share slots that one of them writes"),
        ([0, 3], [3, 4], "sequences share slots that one of them writes"),
    ],
)
def test_slots_that_cannot_be_used_are_refused(
    state_in: list[int] | None, state_out: list[int] | None, message: str, runner: ModelRunner
) -> None:
    pool = runner.state_pool
    assert pool is not None
    pool[1:] = 1.0
    slots = [None if each is None else np.array(each, np.int32) for each in (state_in, state_out)]
    zeros, positions = np.zeros(2, np.int32), np.arange(2, dtype=np.int32)
    arrays = zeros, zeros, positions * np.int32(PAGE_SIZE), positions, positions[:, None], zeros + np.int32(1)
    with pytest.raises(EngineError, match=message):
        runner.forward(Batch(*arrays, positions, state_in=slots[0], state_out=slots[1]))
    assert (pool[1:] == 1).all()


def test_states_need_slots(compiled: Compiled) -> None:
    with pytest.raises(InvalidParameter, match="num_state_slots is 0, and tiny keeps a state of each sequence: 2 at"):
        ModelRunner(compiled.artifact, num_pages=NUM_PAGES)


def test_the_layers_of_a_state_lie_one_behind_the_other(make_tiny: Callable[..., Any]) -> None:
    config = resolved(config_of("convolutions", make_tiny().config), 128)
    width = config.hidden_size
    assert [config.state_layer(layer) // width for layer in range(6)] == [0, 2, 2, 6, 6, 7]
    assert config.state_bytes == 7 * width * 4
    assert [config.kv_layer(layer) for layer in (1, 3)] == [0, 1] and len(config.kv_attentions) == 2
    assert make_tiny().config.state_bytes == 0
    beside = config_of("beside", make_tiny().config)
    first = 3 * (5 * 32 + 2 * 48) + 5 * 32 * 48
    assert [beside.state_layer(layer) for layer in range(4)] == [0, first, first, first + 2 * width]
    assert [beside.kv_layer(layer) for layer in range(3)] == [0, 1, 2]
    assert config.why_not_partial is not None and "state" in config.why_not_partial
