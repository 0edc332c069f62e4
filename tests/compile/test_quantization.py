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
from radixlm.compile.weights.kinds import (
    F32,
    Q4,
    Q4_MINIMUM,
    Q8,
    Q8_GROUP16,
    Q8_MINIMUM,
    TABLES,
    CodesName,
    Scales,
    WeightKind,
)
from radixlm.compile.weights.quantization import Weight, requantize, rounding_error
from radixlm.runtime.errors import CompileError

from .kernels.random_weights import random_weight

groups_of_32 = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.just(32)),
    elements=st.one_of(
        st.floats(-1000, 1000, width=32),
        st.sampled_from([0.0, 0.5, 1.0, -1.5, 3.5, -8.0]),  # where many values lie between two codes
    ),
)


ZEROS = {"q2": 1, "q3": 4, "q4": 8, "q5": 16, "q6": 32, "q8": 128}
NESTED_MINIMUM = WeightKind("q5", Scales(32, "minimum", nested=True))
WEIGHTS = [
    Q4,
    Q4_MINIMUM,
    Q8,
    Q8_MINIMUM,
    Q8_GROUP16,
    WeightKind("q2", Scales(128)),
    WeightKind("q3", Scales(16, nested=True)),
    WeightKind("q4", Scales(64, "integers")),
    NESTED_MINIMUM,
    WeightKind("q6", Scales(16, nested=True)),
    WeightKind("fp4", Scales(32, dtype="e8m0")),
    WeightKind("fp4", Scales(16, dtype="e4m3")),
    WeightKind("iq4", Scales(32, nested=True)),
]
every_weight = pytest.mark.parametrize("kind", WEIGHTS, ids=lambda kind: kind.label)


def slow_dequantize(weight: Weight) -> np.ndarray:
    """Value by value, in float64, whose last rounding is then to float32."""
    kind = weight.kind
    assert weight.scales is not None and kind.scales is not None
    values = np.zeros(weight.shape, np.float32)
    for row, column in np.ndindex(*weight.shape):
        group, outer = column // kind.group, column // (256 if kind.is_nested else kind.group)
        scale, code = float(weight.scales[row, outer]), int(weight.codes[row, column])
        if kind.scales.dtype == "e8m0":
            scale = 2.0 ** (scale - 127)
        if kind.scales.dtype == "e4m3":
            exponent, mantissa = divmod(int(scale), 8)
            scale = 2.0 ** (exponent - 11) * (8 + mantissa) if exponent else 2.0**-10 * mantissa
        if weight.sub_scales is not None:
            scale *= float(weight.sub_scales[row, group])
        if kind.codes in TABLES:
            code = gguf_table(kind.codes)[code]
        elif weight.zeros is not None:
            code -= int(weight.zeros[row, group])
        elif not kind.has_minimum:
            code -= ZEROS[kind.codes]
        minimum = 0.0 if weight.minima is None else float(weight.minima[row, outer])
        values[row, column] = scale * code + minimum * (
            1.0 if weight.sub_minima is None else float(weight.sub_minima[row, group])
        )
    return values


def gguf_table(codes: str) -> list[int]:
    """What the codes of a table mean to ggml."""
    return list({"fp4": gguf.quants.MXFP4.kvalues, "iq4": gguf.quants.IQ4_NL.kvalues}[codes])


@every_weight
def test_dequantize_is_scale_times_code_less_zero_or_plus_minimum(kind: WeightKind) -> None:
    weight = random_weight(kind, 3, 256, np.random.default_rng(0))
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


@every_weight
def test_few_bits_become_eight_without_rounding(kind: WeightKind) -> None:
    weight = random_weight(kind, 4, 256, np.random.default_rng(3))
    wide = requantize(weight, "q8")
    assert wide.kind == WeightKind("q8", kind.scales)
    np.testing.assert_array_equal(wide.dequantize(), weight.dequantize())


@every_weight
def test_codes_of_at_most_four_bits_stay_what_they_are_as_q4(kind: WeightKind) -> None:
    weight = random_weight(kind, 4, 256, np.random.default_rng(3))
    assert requantize(weight, "q4").kind == (Q4 if kind.codes in ("q5", "q6", "q8") else kind)


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
    assert NESTED_MINIMUM.label == "q5_g32_min_nested"
    assert len({kind.label for kind in WEIGHTS}) == len(WEIGHTS)


@pytest.mark.parametrize(
    ("codes", "scales"),
    [
        ("f16", Scales(32)),
        ("q4", None),
        ("q4", Scales(8)),
        ("q4", Scales(64, nested=True)),
        ("q4", Scales(32, "integers", nested=True)),
        ("q4", Scales(32, nested=True, dtype="e8m0")),
        ("fp4", Scales(32, "minimum")),
        ("q4", Scales(32, "minimum", dtype="e8m0")),
    ],
)
def test_pairs_that_no_kernel_knows_are_refused(codes: CodesName, scales: Scales | None) -> None:
    with pytest.raises(ValueError, match=f"{codes} with .* is no kind of weight"):
        WeightKind(codes, scales)
