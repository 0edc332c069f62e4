"""What stands between linears, against NumPy: floats, and the codes of exactly those floats."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.activation import ActivationSpec, Function, Gate, activation, gather_rows
from radixlm.compile.kernels.experts.entries import ExpertLimits, find_slabs
from radixlm.compile.kernels.quantized_rows import ROW_TILE
from radixlm.compile.weights.layout import GROUP, round_up

from .harness import TARGETS_HERE, built, by_rows, every_target, examples, runnable
from .pairwise import pairwise

EPS = 1e-5
FUNCTIONS: tuple[Function, ...] = ("rms_norm", "silu_mul", "identity")  # the rest is tested on two targets only
RARE: tuple[Function, ...] = (
    "layer_norm",
    "gelu_tanh_mul",
    "gelu_mul",
    "relu2_mul",
    "swiglu_clamped",
    "silu",
    "gelu_tanh",
    "gelu",
    "relu2",
    "tanh",
)
GATES: dict[Gate, Any] = {
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softplus": lambda x: np.logaddexp(0, x),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "identity": lambda x: x,
}
WIDTHS = (172, 37, 64, 24, 16, 1)  # whole groups of 32 and vectors of 16, and less than these
SPECS = pairwise(function=FUNCTIONS, target=TARGETS_HERE, width=WIDTHS, wide=(False, True))
RARE_SPECS = pairwise(function=RARE, target=(runnable()[0], runnable()[-1]), width=WIDTHS[:2])


@dataclass
class Out:
    """What the kernel wrote: floats, and codes as it lays them out."""

    y: np.ndarray
    codes: np.ndarray  # int8 [rows, groups, 32 or 64]
    scales: np.ndarray  # [rows, groups, 2]
    sums: np.ndarray  # [rows, groups, 2]

    def whole_codes(self) -> np.ndarray:
        """Codes as whole numbers, `[rows, groups, 32]`."""
        codes = self.codes.astype(np.int64)
        return codes if codes.shape[-1] == GROUP else 256 * codes[..., :GROUP] + codes[..., GROUP:]


def run(target: Target, spec: ActivationSpec, x: np.ndarray, gain: np.ndarray, gates: np.ndarray | None = None) -> Out:
    num_rows, groups = len(x), round_up(spec.width, GROUP) // GROUP
    tiles = (round_up(num_rows, ROW_TILE) // ROW_TILE, groups, ROW_TILE)
    y = np.full((num_rows, spec.y_stride), 7, np.float32)
    codes = np.full((*tiles, GROUP * (2 if spec.wide else 1)), 7, np.int8)
    scales, sums = np.full((*tiles, 2), 7, np.float32), np.full((*tiles, 2), 7, np.int32)
    built(target, activation, spec, target)(x, gain, gates, y, codes, scales, sums, num_rows)
    rows = [array.swapaxes(1, 2).reshape(-1, groups, array.shape[-1]) for array in (codes, scales, sums)]
    assert all((array[num_rows:] == 7).all() for array in rows)
    return Out(y, *(array[:num_rows] for array in rows))


def expected_floats(spec: ActivationSpec, x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    values = wide[:, : spec.width]
    if spec.function == "layer_norm":
        off = values - values.mean(axis=1, keepdims=True)
        normalized = off / np.sqrt((off**2).mean(axis=1, keepdims=True) + EPS)
        bias_at = round_up(spec.width, 16)
        return normalized * gain[: spec.width] + spec.has_bias * gain[bias_at : bias_at + spec.width]
    if spec.function == "rms_norm":
        normalized = values / np.sqrt((values**2).mean(axis=1, keepdims=True) + EPS)
        return normalized * gain[: spec.width] if spec.has_gain else normalized
    up = wide[:, spec.up_column : spec.up_column + spec.width]
    if spec.function == "swiglu_clamped":
        gate = np.minimum(values, 7)
        return (np.clip(up, -7, 7) + 1) * gate / (1 + np.exp(-1.702 * gate))
    return {
        "identity": lambda x: x,
        "silu": lambda x: x / (1 + np.exp(-x)),
        "gelu_tanh": lambda x: x * np.exp(-np.logaddexp(0, -2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        "gelu": lambda x: x / 2 * np.vectorize(math.erfc)(-x / np.sqrt(2)),
        "relu2": lambda x: np.maximum(x, 0) ** 2,
        "tanh": np.tanh,
    }[spec.function.removesuffix("_mul")](values) * (up if spec.function.endswith("_mul") else 1)


def quantized(values: np.ndarray, wide: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes `[rows, groups, 32]` and scales `[rows, groups]` of float32 rows, rounded as the kernels' contract says."""
    limit = np.float32(127 * 256 if wide else 127)
    padded = np.zeros((len(values), round_up(values.shape[1], GROUP)), np.float32)
    padded[:, : values.shape[1]] = values
    groups = padded.reshape(len(values), -1, GROUP)
    largest = np.maximum(np.abs(groups).max(-1), np.float32(1e-30))
    codes = np.rint(groups * (limit / largest)[..., None]).astype(np.int64)
    return codes, largest * (np.float32(1) / limit)


@dataclass
class Example:
    """Random rows of one size: rows with NaN where nothing may be read, and a gain."""

    spec: ActivationSpec  # without codes
    x: np.ndarray
    gain: np.ndarray

    @classmethod
    def of(cls, function: Function, width: int, num_rows: int, scale: float, seed: int) -> Example:
        column = round_up(width, 16)
        is_gated = ActivationSpec(function, width, 0, False, True).is_gated
        stride = column * (2 if is_gated else 1) + 16
        spec = ActivationSpec(function, width, stride, False, True, column + 16, column, EPS)
        rng = np.random.default_rng(seed)
        x = np.full((num_rows, stride), np.nan, np.float32)
        x[:, :width] = rng.standard_normal((num_rows, width)) * scale
        if is_gated:
            x[:, column : column + width] = rng.standard_normal((num_rows, width))
        gain = np.full(2 * column, np.nan, np.float32)
        gain[:width], gain[column : column + width] = rng.standard_normal((2, width))
        return cls(spec, x, gain)


num_rows = st.sampled_from([21, 1, 3, 8, 9])
scales = st.sampled_from([1, 50, 1e-6])
seeds = st.integers(0, 1 << 30)


def coded(spec: ActivationSpec, wide: bool = False) -> ActivationSpec:
    """The same function, written as codes only."""
    return replace(spec, quantize=True, keep_float=False, wide=wide)


@by_rows(SPECS)
@examples(6)
@given(num_rows, scales, seeds)
def test_floats_are_those_of_the_formula_and_codes_those_of_the_floats(
    row: dict[str, Any], num_rows: int, scale: float, seed: int
) -> None:
    example, target = Example.of(row["function"], row["width"], num_rows, scale, seed), row["target"]
    spec, x, gain = example.spec, example.x, example.gain
    y, expected = run(target, spec, x, gain).y, expected_floats(spec, x, gain)
    floats = y[:, : spec.width]
    assert (np.abs(floats - expected) <= 1e-6 * np.abs(expected) + 1e-30).all()
    assert (y[:, spec.width :] == 7).all()
    out = run(target, coded(spec, row["wide"]), x, gain)
    codes, scales = quantized(floats, row["wide"])
    assert (out.whole_codes() == codes).all()
    assert (out.scales[..., 0] == scales).all()
    assert (out.sums == codes.reshape(*out.sums.shape, -1).sum(-1)).all()
    assert (out.scales[..., 1] == scales * out.sums.sum(-1).astype(np.float32)).all()
    assert (out.y == 7).all()


@by_rows(SPECS)
@examples(2)
@given(num_rows, scales, seeds)
def test_a_row_is_the_same_bits_alone_and_among_others(
    row: dict[str, Any], num_rows: int, scale: float, seed: int
) -> None:
    example, target = Example.of(row["function"], row["width"], num_rows, scale, seed), row["target"]
    x = np.tile(example.x, (11, 1))
    for form in (example.spec, coded(example.spec, row["wide"])):
        together = run(target, form, x, example.gain)
        for count in (1, 5, 9):
            rows = np.random.default_rng(seed + count).permutation(len(x))[:count]
            alone = run(target, form, x[rows], example.gain)
            assert (alone.y == together.y[rows]).all()
            assert (alone.codes == together.codes[rows]).all()
            assert (alone.scales == together.scales[rows]).all()


@every_target
def test_rows_at_the_places_of_entries_are_those_of_neighbours(target: Target) -> None:
    """Rows at other places are neither read nor written."""
    limits, width = ExpertLimits(num_experts=6, top_k=2, num_tokens=20), 96
    chosen = np.stack([np.full(20, 4), np.arange(20) % 4], 1).astype(np.int32)
    lists = np.zeros(limits.num_ints, np.int32)
    built(target, find_slabs, limits)(chosen, lists, len(chosen))
    places = lists[1 + 3 * limits.num_slabs + limits.num_places :]
    x = np.full((limits.num_places, 2 * width), np.nan, np.float32)
    x[places] = np.random.default_rng(0).standard_normal((len(places), 2 * width)).astype(np.float32)
    spec = ActivationSpec("silu_mul", width, 2 * width, False, True, width, width)
    expected, y = np.full((len(x), width), 7, np.float32), np.full((len(x), width), 7, np.float32)
    expected[places] = run(target, spec, x[places], x[:1]).y
    placed = built(target, activation, replace(spec, experts=limits), target)
    placed(x, None, None, lists, y, None, None, None, len(places))
    assert (y == expected).all()


@every_target
def test_a_row_of_zeros_has_zero_codes_and_saturated_gates_stay_finite(target: Target) -> None:
    zeros = np.zeros((1, 64), np.float32)
    out = run(target, ActivationSpec("identity", 64, 64, True, False), zeros, zeros)
    assert (out.codes == 0).all()
    gates = np.array([[-1e4, -200, -88, 88, 200, 1e4, 0, 1] * 4], np.float32)
    x = np.concatenate([gates, np.full_like(gates, 2)], axis=1)
    y = run(target, ActivationSpec("silu_mul", 32, 64, False, True, 32, 32), x, zeros).y
    sigmoid = 1 / (1 + np.exp(-np.maximum(gates, -87).astype(np.float64)))
    np.testing.assert_allclose(y, np.where(gates < -87, 0, 2 * gates * sigmoid), rtol=1e-6, atol=1e-33)


@every_target
@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("damage", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_damaged_activation_shows_in_its_scale_and_in_no_other(target: Target, wide: bool, damage: float) -> None:
    """Rounded to some integer, a NaN would become a number like any other."""
    x = np.ones((1, 96), np.float32)
    x[0, 37] = damage
    spec = ActivationSpec("identity", 96, 96, True, False, wide=wide)
    assert np.isfinite(run(target, spec, x, x).scales[0, :, 0]).tolist() == [True, False, True]


@every_target
def test_gathered_rows_are_those_asked_for(target: Target) -> None:
    x = np.random.default_rng(0).standard_normal((9, 48)).astype(np.float32)
    indices, y = np.array([8, 0, 3, 3], np.int32), np.zeros((4, 48), np.float32)
    built(target, gather_rows, 48)(x, indices, y, 4)
    assert (y == x[indices]).all()


@by_rows(RARE_SPECS)
@examples(4)
@given(num_rows, scales, seeds)
def test_rarer_functions_are_those_of_their_formulas(
    row: dict[str, Any], num_rows: int, scale: float, seed: int
) -> None:
    function, target = row["function"], row["target"]
    example = Example.of(function, row["width"], num_rows, scale, seed)
    spec, x, gain = replace(example.spec, has_bias=function == "layer_norm"), example.x, example.gain
    values = x[:, : spec.width].astype(np.float64)
    out, expected = run(target, spec, x, gain), expected_floats(spec, x, gain)
    off = np.abs(out.y[:, : spec.width] - expected)
    if function == "layer_norm":  # what is left of a difference is as exact as what it is the difference of
        scale_of_row = np.abs(values).max(axis=1, keepdims=True) / np.sqrt(values.var(axis=1, keepdims=True) + EPS)
        assert (off <= 2e-6 * (np.abs(gain[: spec.width]) * (scale_of_row + 1) + np.abs(expected))).all()
    else:  # an exponential is as exact as what it is a power of is large
        assert (off <= 1e-6 * (1 + values**2 / 4) * np.abs(expected) + 1e-30).all()
    codes, _ = quantized(out.y[:, : spec.width], wide=False)
    assert (run(target, coded(spec), x, gain).whole_codes() == codes).all()
    rows = np.random.default_rng(1).permutation(len(x))[:3]
    assert (run(target, spec, x[rows], gain).y == out.y[rows]).all()


@pytest.mark.parametrize("target", [runnable()[0], runnable()[-1]], ids=lambda target: target.name)
@pytest.mark.parametrize(
    ("gate", "function", "gate_width"),
    [
        ("sigmoid", "identity", 1),
        ("softplus", "identity", 16),
        ("softplus", "identity", 12),
        ("sigmoid", "silu_mul", 172),
        ("silu", "identity", 1),
        ("identity", "gelu_tanh", 1),
    ],
)
def test_other_rows_gate_elements_heads_or_rows(
    target: Target, gate: Gate, function: Function, gate_width: int
) -> None:
    rng, width, column = np.random.default_rng(7), 172, 176
    spec = ActivationSpec(function, width, 2 * column, False, True, column, column)
    spec = replace(spec, gate=gate, gate_stride=200, gate_column=16, gate_width=gate_width)
    num_gates = -(-width // gate_width)
    x, gates = rng.standard_normal((9, 2 * column)).astype(np.float32), np.full((9, 200), np.nan, np.float32)
    gates[:, 16 : 16 + num_gates] = rng.standard_normal((9, num_gates)) * 9
    factor = GATES[gate](np.repeat(gates[:, 16 : 16 + num_gates].astype(np.float64), gate_width, axis=1)[:, :width])
    y = run(target, spec, x, x, gates).y[:, :width]
    np.testing.assert_allclose(y, expected_floats(spec, x, x) * factor, rtol=2e-6, atol=1e-30)
    assert (run(target, spec, x[4:5], x, gates[4:5]).y[:, :width] == y[4]).all()


@pytest.mark.parametrize("target", [runnable()[0], runnable()[-1]], ids=lambda target: target.name)
def test_what_bounds_a_function_keeps_it_and_a_nan_shows_in_every_function(target: Target) -> None:
    x = np.tile(np.array([np.nan, -1e4, -88, -7.5, 0, 7.5, 88, 1e4], np.float32), (1, 16))
    for function in (*RARE[1:], *FUNCTIONS[1:]):
        spec = ActivationSpec(function, 64, 128, False, True, 64, 64)
        y = run(target, spec, x, x).y[0, :8]
        assert np.isnan(y).tolist() == [True] + [False] * 7, function
        with np.errstate(all="ignore"):
            wanted = expected_floats(spec, np.maximum(x, -1e3), x)[0, :8]
        if function == "swiglu_clamped":
            np.testing.assert_allclose(y[5:], wanted[5:], rtol=1e-6)
        if function in ("gelu", "silu", "gelu_tanh", "relu2"):
            np.testing.assert_allclose(y[4:], wanted[4:], rtol=1e-6)
    ones, spec = np.ones((1, 64), np.float32), ActivationSpec("identity", 64, 64, False, True, 64)
    for gate in set(GATES) - {"identity"}:  # which has no end
        y = run(target, replace(spec, gate=gate, gate_stride=128), ones, ones, x).y[0, :8]
        assert np.isnan(y).tolist() == [True] + [False] * 7, gate
        assert (np.abs(y[1:3]) < 1e-30).all()


@every_target
def test_a_norm_without_a_gain_reads_none(target: Target) -> None:
    x = np.random.default_rng(0).standard_normal((3, 48)).astype(np.float32)
    spec = ActivationSpec("rms_norm", 37, 48, False, True, 48, eps=EPS, has_gain=False)
    y = run(target, spec, x, np.full(48, np.nan, np.float32)).y[:, :37]
    np.testing.assert_allclose(y, expected_floats(spec, x, x), rtol=1e-6)
