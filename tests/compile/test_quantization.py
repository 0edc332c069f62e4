"""Requantizing: never worse than llama.cpp's Q4_0, Q8_0 as it is, and no rounding where none is needed."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from radixlm.compile.weights.quantization import (
    F32,
    Q4,
    Q4_MINIMUM,
    Q8,
    Q8_MINIMUM,
    Weight,
    WeightKind,
    requantize,
    rounding_error,
)
from radixlm.runtime.errors import CompileError

groups_of_32 = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.just(32)),
    elements=st.one_of(
        st.floats(-1000, 1000, width=32),
        st.sampled_from([0.0, 0.5, 1.0, -1.5, 3.5, -8.0]),  # where many values lie between two codes
    ),
)


def slow_dequantize(weight: Weight) -> np.ndarray:
    assert weight.scales is not None
    values = np.zeros(weight.shape, np.float32)
    for row, column in np.ndindex(*weight.shape):
        group = column // weight.kind.group
        code, scale = np.float32(weight.codes[row, column]), np.float32(weight.scales[row, group])
        if weight.minima is None:
            values[row, column] = scale * (code - np.float32({"q4": 8, "q8": 128}[weight.kind.name]))
        else:
            values[row, column] = scale * code + np.float32(weight.minima[row, group])
    return values


@pytest.mark.parametrize("kind", [Q4, Q4_MINIMUM, Q8, Q8_MINIMUM, WeightKind("q8", 16)])
def test_dequantize_is_scale_times_code_less_zero_or_plus_minimum(kind: WeightKind) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16 if kind.name == "q4" else 256, (3, 64), np.uint8)
    scales = rng.standard_normal((3, 64 // kind.group)).astype(np.float16)
    minima = rng.standard_normal(scales.shape).astype(np.float16) if kind.has_minimum else None
    weight = Weight(kind, codes, scales, minima)
    np.testing.assert_array_equal(weight.dequantize(), slow_dequantize(weight))


def q4_0(group: np.ndarray) -> list[float]:
    """What a group is worth in llama.cpp's Q4_0: its value of largest magnitude is -8, the others are rounded."""
    extreme = max(group, key=abs)
    scale = np.float32(extreme) / np.float32(-8)
    inverse = np.float32(1) / scale if np.float16(scale) else np.float32(0)
    codes = [min(15, int(value * inverse + np.float32(8.5))) for value in group]
    return [float(np.float16(scale)) * (code - 8) for code in codes]


def squared_error(values: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Of each group of 32, as sums that float64 holds almost exactly."""
    return np.square(values.astype(np.float64) - stored).reshape(-1, 32).sum(axis=1)


def test_the_oracle_is_llama_cpp() -> None:
    values = np.random.default_rng(1).standard_normal((8, 64), np.float32)
    theirs = gguf.quants.dequantize(gguf.quants.quantize(values, Type.Q4_0), Type.Q4_0)
    assert [q4_0(group) for group in values.reshape(-1, 32)] == theirs.reshape(-1, 32).tolist()


@given(groups_of_32)
@settings(deadline=None)
def test_no_group_has_a_larger_squared_error_than_llama_cpp_gives_it(values: np.ndarray) -> None:
    theirs = np.array([q4_0(group) for group in values])
    ours = requantize(values, "q4")
    assert ours.kind == Q4 and ours.codes.max() < 16
    assert (squared_error(values, ours.dequantize()) <= squared_error(values, theirs)).all()


@pytest.mark.parametrize("spread", ["normal", "few large values"])
def test_q4_is_closer_than_llama_cpp_and_moves_large_values_less(spread: str) -> None:
    rng = np.random.default_rng(1)
    values = {
        "normal": rng.standard_normal((64, 1024), np.float32),
        "few large values": rng.standard_t(3, (64, 1024)).astype(np.float32),
    }[spread]
    theirs = gguf.quants.dequantize(gguf.quants.quantize(values, Type.Q4_0), Type.Q4_0)
    ours = requantize(values, "q4").dequantize()
    assert (squared_error(values, ours) <= squared_error(values, theirs)).all()
    assert squared_error(values, ours).sum() < 0.97 * squared_error(values, theirs).sum()
    importance = np.abs(values)
    assert (importance * np.square(values - ours)).sum() < 0.97 * (importance * np.square(values - theirs)).sum()


def test_a_candidate_beyond_float16_is_passed_over() -> None:
    values = np.zeros((1, 32), np.float32)
    values[0, 0] = -65504 * 8  # Q4_0's scale is the largest of float16; the next candidates' are larger
    np.testing.assert_array_equal(requantize(values, "q4").dequantize(), values)


def test_q8_equals_llama_cpp() -> None:
    values = np.random.default_rng(2).standard_normal((16, 256), np.float32)
    theirs = gguf.quants.dequantize(gguf.quants.quantize(values, Type.Q8_0), Type.Q8_0)
    np.testing.assert_array_equal(requantize(values, "q8").dequantize(), theirs)


@pytest.mark.parametrize("mode", ["q4", "q8"])
def test_zeros_stay_zeros(mode: str) -> None:
    weight = requantize(np.zeros((2, 32), np.float32), mode)  # type: ignore[arg-type]
    assert not weight.dequantize().any()


@pytest.mark.parametrize("kind", [Q4, Q4_MINIMUM])
def test_four_bits_become_eight_without_rounding(kind: WeightKind) -> None:
    rng = np.random.default_rng(3)
    scales = rng.standard_normal((4, 2)).astype(np.float16)
    minima = scales if kind.has_minimum else None
    weight = Weight(kind, rng.integers(0, 16, (4, 64), np.uint8), scales, minima)
    wide = requantize(weight, "q8")
    assert wide.kind == WeightKind("q8", 32, kind.has_minimum)
    np.testing.assert_array_equal(wide.dequantize(), weight.dequantize())


def test_a_weight_already_in_the_mode_is_left_alone() -> None:
    weight = Weight(Q4_MINIMUM, np.zeros((1, 32), np.uint8), np.ones((1, 1), np.float16), np.ones((1, 1), np.float16))
    assert requantize(weight, "q4") is weight


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bits_become_f32_exactly(dtype: type) -> None:
    values = np.random.default_rng(4).standard_normal((3, 5)).astype(dtype)
    weight = requantize(values, "f32")
    assert weight.kind == F32
    np.testing.assert_array_equal(weight.codes, values.astype(np.float32))


def test_rounding_error_sums_squares() -> None:
    source = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    weight = Weight(F32, source + np.float32(0.5))
    assert rounding_error(source, weight) == (1.0, 30.0)
    assert rounding_error(source, Weight(F32, source)) == (0.0, 30.0)


def test_rows_that_are_no_multiple_of_the_group_are_refused() -> None:
    with pytest.raises(CompileError, match="row of 40 values"):
        requantize(np.ones((2, 40), np.float32), "q4")


def test_values_beyond_float16_are_refused() -> None:
    with pytest.raises(CompileError, match="65504"):
        requantize(np.full((1, 32), 1e30, np.float32), "f16")


def test_labels_name_bits_group_and_minimum() -> None:
    assert [kind.label for kind in (Q4, Q8_MINIMUM, F32)] == ["q4_g32", "q8_g32_min", "f32"]
