"""Each format's matrices read as its own formula says, whole and in strips, and the kernels' kinds hold them so."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from radixlm.compile.sources.quantized.compressed import CompressedTensors
from radixlm.compile.sources.quantized.floats import FP8, GptOssBlocks
from radixlm.compile.sources.quantized.gptq import AWQ, GPTQ
from radixlm.compile.sources.quantized.mlc import MLC
from radixlm.compile.sources.quantized.mlx import MLX
from radixlm.compile.sources.quantized.tensors import Tensor, tensors
from radixlm.compile.weights.quantization import requantize
from radixlm.runtime.errors import CorruptSource, UnsupportedTensor

from .packing import packed, stored

N, K = 96, 256
NAME = "model.layers.0.mlp.up_proj"
HALF = 2.0**-11  # what rounding to float16 costs, relative to the scale


def read(format_: Any, arrays: dict[str, np.ndarray], name: str = NAME) -> Tensor:
    found = tensors("model", stored({name + ending: array for ending, array in arrays.items()}), format_)
    assert list(found) == [f"{name}.weight"]
    return found[f"{name}.weight"]


def check(tensor: Tensor, expected: np.ndarray, kind: str, *, is_exact: bool = True) -> None:
    """`expected` comes out of `read_float32`, and out of `read` up to float16 scales; in strips as at once."""
    assert tensor.info.shape == expected.shape
    np.testing.assert_array_equal(tensor.read_float32(), expected)
    weight = tensor.read()
    assert weight.kind.label == kind
    if is_exact:
        np.testing.assert_array_equal(weight.dequantize(), expected)
    for rows in (slice(0, 1), slice(16, 48), slice(37, len(expected)), slice(5, 6)):
        np.testing.assert_array_equal(tensor.read_float32(rows), expected[rows])
        strip = tensor.read(rows)
        assert strip.kind == weight.kind
        np.testing.assert_array_equal(strip.dequantize(), weight.dequantize()[rows])


def half_scales(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.001, 0.02, shape).astype(np.float16)


def per_input(groups: np.ndarray, group: int) -> np.ndarray:
    return groups.astype(np.float32).repeat(group, axis=1)


# GPTQ: weight = scales[g_idx] * (q - zeros[g_idx]), inputs along the first axis.


def gptq(bits: int, group: int, version: str, *, symmetric: bool, order: np.ndarray | None = None) -> tuple[Any, ...]:
    """Arrays, and the expected matrix `[N, K]`."""
    draw = np.random.default_rng(bits * group + symmetric)
    q = draw.integers(0, 1 << bits, (K, N))
    num_groups = K // group
    zeros = draw.integers(1, 1 << bits, (num_groups, N))
    if symmetric:
        zeros[:] = 1 << bits - 1
    scales = half_scales((num_groups, N), 3)
    g_idx = np.arange(K) // group if order is None else order
    expected = scales.astype(np.float32)[g_idx] * (q - zeros[g_idx]).astype(np.float32)
    arrays = {
        ".qweight": np.ascontiguousarray(packed(q.T, bits).T),
        ".qzeros": packed(zeros - (version == "gptq"), bits),
        ".scales": scales,
        ".g_idx": g_idx.astype(np.int32),
    }
    return arrays, expected.T


def gptq_format(bits: int, group: int, version: str = "gptq") -> GPTQ:
    return GPTQ.of("model", {"bits": bits, "group_size": group, "checkpoint_format": version})


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_symmetric_gptq(bits: int, group: int, version: str) -> None:
    arrays, expected = gptq(bits, K if group == -1 else group, version, symmetric=True)
    shared = 128 if group == -1 else group
    kind = f"q{bits}_g{shared}{'_zeros' if bits == 2 else ''}"  # the kernels' constant zero of 2 bits is another
    check(read(gptq_format(bits, group, version), arrays), expected, kind)


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize(("bits", "group"), [(2, 64), (3, 32), (4, 128), (4, 32), (8, 64)])
def test_gptq_with_zeros(bits: int, group: int, version: str) -> None:
    arrays, expected = gptq(bits, group, version, symmetric=False)
    check(read(gptq_format(bits, group, version), arrays), expected, f"q{bits}_g{group}_zeros")


def test_gptq_without_group_indices() -> None:
    arrays, expected = gptq(4, 64, "gptq", symmetric=True)
    del arrays[".g_idx"]
    check(read(gptq_format(4, 64), arrays), expected, "q4_g64")


def test_a_zero_of_none_borrows_from_the_next_of_its_word() -> None:
    """Version 1 subtracts one from each word's fields at once: what `0 - 1` borrows is given back."""
    arrays, _ = gptq(4, 64, "gptq_v2", symmetric=False)
    words = arrays[".qzeros"].view(np.uint32)
    words &= np.uint32(0xFF0FFFF0)  # zeros of 0 among others, in the lowest field and inside
    arrays[".qzeros"] = words.view(np.int32)
    second = read(gptq_format(4, 64, "gptq_v2"), arrays).read_float32()
    arrays[".qzeros"] = (words - np.uint32(0x11111111)).view(np.int32)
    np.testing.assert_array_equal(read(gptq_format(4, 64), arrays).read_float32(), second)


def test_modules_of_gptq_may_have_bits_and_groups_of_their_own() -> None:
    """GPTQModel's `dynamic`: the first pattern that matches a module's name from its beginning holds."""
    dynamic = {
        r"-:.*\.down_proj": {},
        r"+:.*\.0\..*up": {"bits": 8, "group_size": 32, "desc_act": True},
        r".*\.1\..*up": {"group_size": 128},
        r".*up": {"bits": 2},
    }
    format_ = GPTQ.of("model", {"bits": 4, "group_size": 64, "dynamic": dynamic})
    for layer, bits, group in ((0, 8, 32), (1, 4, 128)):
        arrays, expected = gptq(bits, group, "gptq", symmetric=True)
        check(read(format_, arrays, f"model.layers.{layer}.mlp.up_proj"), expected, f"q{bits}_g{group}")
    arrays, expected = gptq(4, 64, "gptq", symmetric=True)
    check(read(format_, arrays, "model.layers.0.mlp.gate_proj"), expected, "q4_g64")


@pytest.mark.parametrize(
    ("dynamic", "said"),
    [
        ({".*": {"bits": 7}}, "bits of the quantization is 7"),
        ({".*": {"format": "marlin"}}, "a format of its own for '.*', only bits and group_size are read"),
        ({".*": 8}, "no settings but 8 for '.*'"),
        ({"+:(": {}}, "which is no pattern"),
        (["up"], "only settings by patterns are read"),
    ],
)
def test_a_dynamic_of_gptq_that_is_not_read(dynamic: Any, said: str) -> None:
    with pytest.raises(UnsupportedTensor, match=re.escape(said)):
        GPTQ.of("model", {"bits": 4, "group_size": 64, "dynamic": dynamic})


def test_gptq_gives_the_model_its_inputs_in_order() -> None:
    order = np.random.default_rng(5).permutation(np.arange(K) // 32)
    arrays, expected = gptq(4, 32, "gptq", symmetric=True, order=order)
    tensor = read(gptq_format(4, 32), arrays)
    check(tensor, expected, "q4_g32")
    np.testing.assert_array_equal(tensor.read().input_order, np.argsort(order, kind="stable"))
    np.testing.assert_array_equal(requantize(tensor.read(), "q8").dequantize(), expected)
    np.testing.assert_array_equal(requantize(tensor.read(), "f32").codes, expected)


def test_gptq_groups_that_do_not_divide() -> None:
    arrays, _ = gptq(4, 128, "gptq", symmetric=True)
    with pytest.raises(UnsupportedTensor, match="256 inputs cannot be cut into groups of 96"):
        read(gptq_format(4, 96), arrays)


def test_gptq_groups_that_the_scales_contradict() -> None:
    arrays, _ = gptq(4, 128, "gptq", symmetric=True)
    with pytest.raises(CorruptSource, match="scales for 2 groups, 256 inputs in groups of 64 ask for 4"):
        read(gptq_format(4, 64), arrays)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({".qzeros": np.zeros((2, 11), np.int32)}, r"qzeros has shape \[2, 11\], the other arrays ask for \[2, 12\]"),
        ({".scales": np.zeros((2, 95), np.float16)}, r"scales has shape \[2, 95\]"),
        ({".g_idx": np.zeros(K, np.int32)}, "does not put 128 inputs into each of 2 groups"),
        ({".g_idx": np.zeros(K - 1, np.int32)}, r"g_idx has shape \[255\]"),
    ],
)
def test_gptq_whose_arrays_disagree(change: dict[str, np.ndarray], said: str) -> None:
    arrays, _ = gptq(4, 128, "gptq", symmetric=True)
    with pytest.raises(CorruptSource, match=said):
        read(gptq_format(4, 128), arrays | change).read()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not read"),
        ({"bits": 4, "group_size": 128, "is_marlin_format": True}, "only gptq and gptq_v2"),
        ({"bits": 5, "group_size": 128}, "bits of the quantization is 5, one of 2, 3, 4, 8 is read"),
        ({"bits": 4, "group_size": "all"}, "group_size of the quantization is 'all'"),
        ({"bits": 4}, "group_size of the quantization is None"),
    ],
)
def test_gptq_that_is_not_read(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedTensor, match=said):
        GPTQ.of("model", config)


# AWQ: weight = (q - zero) * scale, eight outputs a word in an order of their own.


def awq_words(values: np.ndarray) -> np.ndarray:
    """int32 `[R, C / 8]` of values `[R, C]`."""
    words = np.zeros((len(values), values.shape[1] // 8), np.uint32)
    for word in range(words.shape[1]):
        for place, output in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            words[:, word] |= values[:, word * 8 + output].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)


def awq(group: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    draw = np.random.default_rng(group)
    q, zeros = draw.integers(0, 16, (K, N)), draw.integers(0, 16, (K // group, N))
    scales = half_scales((K // group, N), 4)
    expected = (q - zeros.repeat(group, axis=0)) * scales.astype(np.float32).repeat(group, axis=0)
    return {".qweight": awq_words(q), ".qzeros": awq_words(zeros), ".scales": scales}, expected.astype(np.float32).T


@pytest.mark.parametrize("group", [32, 64, 128])
def test_awq(group: int) -> None:
    arrays, expected = awq(group)
    format_ = AWQ.of("model", {"bits": 4, "group_size": group, "version": "gemm", "zero_point": True})
    check(read(format_, arrays), expected, f"q4_g{group}_zeros")


@pytest.mark.parametrize("version", ["gemv", "GEMV", "gemv_fast", "marlin"])
def test_awq_of_another_layout(version: str) -> None:
    with pytest.raises(UnsupportedTensor, match=f"layout {version.lower()} is not read, only gemm"):
        AWQ.of("model", {"bits": 4, "group_size": 128, "version": version})


# compressed-tensors: weight = (q - zero) * scale, q signed and stored with its half added.


def compressed(bits: int) -> CompressedTensors:
    groups = {"group_0": {"weights": {"num_bits": bits}}}
    return CompressedTensors.of("model", {"format": "pack-quantized", "config_groups": groups})


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("group", [32, 128, K])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_compressed_tensors(bits: int, group: int, dtype: Any) -> None:
    draw, half = np.random.default_rng(bits + group), 1 << bits - 1
    q = draw.integers(-half, half, (N, K))
    scales = half_scales((N, K // group), 5).astype(dtype)
    arrays = {
        ".weight_packed": packed(q + half, bits),
        ".weight_scale": scales,
        ".weight_shape": np.array([N, K]),
    }
    expected = q.astype(np.float32) * per_input(scales, group)
    check(read(compressed(bits), arrays), expected, f"q{bits}_g{min(group, 128)}")


@pytest.mark.parametrize("group", [32, K])
def test_packed_compressed_tensors_with_zeros(group: int) -> None:
    draw = np.random.default_rng(group)
    q, zeros = draw.integers(-8, 8, (N - 3, K)), draw.integers(-8, 8, (N - 3, K // group))
    scales = half_scales((N - 3, K // group), 5)
    arrays = {
        ".weight_packed": packed(q + 8, 4),
        ".weight_scale": scales,
        ".weight_zero_point": np.ascontiguousarray(packed((zeros + 8).T, 4).T),
        ".weight_shape": np.array([N - 3, K]),
    }
    expected = (q - zeros.repeat(group, axis=1)) * per_input(scales, group)
    check(read(compressed(4), arrays), expected.astype(np.float32), f"q4_g{min(group, 128)}_zeros")


def test_packed_compressed_tensors_with_sorted_inputs() -> None:
    draw = np.random.default_rng(8)
    q, g_idx = draw.integers(-8, 8, (N, K)), draw.permutation(np.arange(K) // 64)
    scales = half_scales((N, K // 64), 5)
    arrays = {
        ".weight_packed": packed(q + 8, 4),
        ".weight_scale": scales,
        ".weight_shape": np.array([N, K]),
        ".weight_g_idx": g_idx.astype(np.int32),
    }
    expected = q.astype(np.float32) * scales.astype(np.float32)[:, g_idx]
    check(read(compressed(4), arrays), expected, "q4_g64")


@pytest.mark.parametrize("shape", [(N, 1), (N, K // 64), (1,)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_of_whole_bytes(shape: tuple[int, ...], symmetric: bool) -> None:
    draw = np.random.default_rng(9)
    q, zeros = draw.integers(-60, 60, (N, K)), draw.integers(-60, 60, shape) * (not symmetric)
    scales = half_scales(shape, 6)
    arrays = {".weight": q.astype(np.int8), ".weight_scale": scales}
    if not symmetric:
        arrays[".weight_zero_point"] = zeros.astype(np.int8)
    scale, zero = (np.broadcast_to(a.reshape(-1, shape[-1]), (N, shape[-1])) for a in (scales, zeros))
    expected = (q - zero.repeat(K // shape[-1], axis=1)) * per_input(scale, K // shape[-1])
    kind = f"q8_g{min(K // shape[-1], 128)}{'' if symmetric else '_zeros'}"
    check(read(compressed(8), arrays), expected.astype(np.float32), kind)


def test_compressed_tensors_whose_words_are_not_of_the_configured_bits() -> None:
    arrays = {
        ".weight_packed": np.zeros((N, K // 8), np.int32),
        ".weight_scale": half_scales((N, 1), 1),
        ".weight_shape": np.array([N, K]),
    }
    with pytest.raises(CorruptSource, match=r"none of \[8\] bits, which the configuration says"):
        read(compressed(8), arrays)


@pytest.mark.parametrize(
    "config",
    [
        {"format": "marlin-24"},
        {"format": "mixed-precision", "config_groups": {"group_0": {"format": "sparse-24-bitmask"}}},
        {"format": "pack-quantized", "sparsity_config": {"format": "sparse-24-bitmask"}},
    ],
)
def test_compressed_tensors_that_are_not_read(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedTensor, match="is not read"):
        CompressedTensors.of("model", config)


def test_compressed_tensors_with_rotations_are_refused() -> None:
    """As SpinQuant and QuIP write them. Without any, the key may be there all the same."""
    transforms = {"config_groups": {"R1": {"type": "hadamard", "apply": [{"location": "weight_output"}]}}}
    with pytest.raises(UnsupportedTensor, match=r"rotations of activations \(transform_config\) are"):
        CompressedTensors.of("model", {"format": "pack-quantized", "transform_config": transforms})
    CompressedTensors.of("model", {"format": "pack-quantized", "transform_config": {}})


# MLX: weight = scale * q + bias.


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("bits", "group"), [(2, 64), (3, 64), (4, 32), (4, 64), (4, 128), (5, 32), (6, 64), (8, 64)])
def test_mlx(bits: int, group: int, dtype: Any) -> None:
    draw = np.random.default_rng(bits + group)
    q = draw.integers(0, 1 << bits, (N, K))
    scales, biases = (half_scales((N, K // group), seed).astype(dtype) for seed in (1, 2))
    arrays = {".weight": packed(q, bits).view(np.uint32), ".scales": scales, ".biases": -biases}
    expected = per_input(scales, group) * q.astype(np.float32) - per_input(biases, group)
    format_ = MLX("model", {"bits": bits, "group_size": group})
    check(read(format_, arrays), expected, f"q{bits}_g{group}_min")


def test_mlx_whose_modules_have_their_own_bits() -> None:
    q, scales = np.random.default_rng(1).integers(0, 256, (N, K)), half_scales((N, K // 64), 1)
    arrays = {".weight": packed(q, 8).view(np.uint32), ".scales": scales, ".biases": scales}
    format_ = MLX("model", {"bits": 4, "group_size": 32, NAME: {"bits": 8, "group_size": 64}})
    check(read(format_, arrays), per_input(scales, 64) * q.astype(np.float32) + per_input(scales, 64), "q8_g64_min")
    with pytest.raises(CorruptSource, match="scales for 4 groups, 512 inputs in groups of 32 ask for 16"):
        read(MLX("model", {"bits": 4, "group_size": 32}), arrays)


def test_experts_of_mlx_are_one_matrix_below_the_other() -> None:
    q = np.random.default_rng(1).integers(0, 16, (3 * N, K))
    scales, biases = (half_scales((3 * N, K // 64), seed) for seed in (1, 2))
    arrays = {".weight": packed(q, 4).view(np.uint32), ".scales": scales, ".biases": -biases}
    stacks = {ending: array.reshape(3, N, -1) for ending, array in arrays.items()}
    expected = per_input(scales, 64) * q.astype(np.float32) - per_input(biases, 64)
    check(read(MLX("model", {"bits": 4, "group_size": 64}), stacks), expected, "q4_g64_min")


# FP4: powers of two for 32, E4M3 for 16.

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def nibbles(rows: int = N) -> tuple[np.ndarray, np.ndarray]:
    """Codes `[rows, K]`, and the bytes that hold them, the even code in the low half."""
    codes = np.random.default_rng(rows).integers(0, 16, (rows, K))
    return codes, (codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8)


def test_blocks_of_gpt_oss() -> None:
    codes, data = nibbles(4 * N)
    scales = np.random.default_rng(2).integers(110, 130, (4 * N, K // 32)).astype(np.uint8)
    arrays = {"_blocks": data.reshape(4, N, K // 32, 16), "_scales": scales.reshape(4, N, K // 32)}
    expected = FP4[codes] * per_input(2.0 ** (scales.astype(np.float32) - 127), 32)
    check(read(GptOssBlocks(), arrays, "model.layers.0.mlp.experts.gate_up_proj"), expected, "fp4_g32_e8m0")


def test_mxfp4_of_compressed_tensors_and_of_mlx() -> None:
    codes, data = nibbles()
    scales = np.random.default_rng(2).integers(110, 130, (N, K // 32)).astype(np.uint8)
    expected = FP4[codes] * per_input(2.0 ** (scales.astype(np.float32) - 127), 32)
    check(read(compressed(4), {".weight_packed": data, ".weight_scale": scales}), expected, "fp4_g32_e8m0")
    format_ = MLX("model", {"bits": 4, "group_size": 32, "mode": "mxfp4"})
    check(read(format_, {".weight": data.view(np.uint32), ".scales": scales}), expected, "fp4_g32_e8m0")


def test_a_power_of_two_beyond_float16_is_exact() -> None:
    codes, data = nibbles()
    scales = np.full((N, K // 32), 200, np.uint8)
    expected = FP4[codes] * np.float32(2.0**73)
    check(read(compressed(4), {".weight_packed": data, ".weight_scale": scales}), expected, "fp4_g32_e8m0")


@pytest.mark.parametrize(("scale", "group"), [(255, 32), (127, 16), (130, 16)])
def test_scales_of_4_bits_that_are_no_numbers_are_refused(scale: int, group: int) -> None:
    _, data = nibbles()
    arrays = {".weight_packed": data, ".weight_scale": np.full((N, K // group), scale, np.uint8)}
    with pytest.raises(CorruptSource, match="scales that are no numbers, or negative"):
        read(compressed(4), arrays).read()


@pytest.mark.parametrize("factor", [None, 3.0])
def test_nvfp4(factor: float | None) -> None:
    codes, data = nibbles()
    scales = np.random.default_rng(2).uniform(0.1, 400, (N, K // 16)).astype(ml_dtypes.float8_e4m3fn)
    arrays = {".weight_packed": data, ".weight_scale": scales}
    if factor is not None:
        arrays[".weight_global_scale"] = np.array([factor], np.float32)
    expected = FP4[codes] * per_input(scales.astype(np.float32) * np.float32(1 / (factor or 1)), 16)
    tensor = read(compressed(4), arrays)
    np.testing.assert_allclose(tensor.read_float32(), expected, rtol=1e-6)
    kind = "fp4_g16" if factor else "fp4_g16_e4m3"
    check(tensor, tensor.read_float32(), kind, is_exact=factor is None)
    np.testing.assert_allclose(tensor.read().dequantize(), expected, rtol=HALF)


# FP8: weight = code * scale.


@pytest.mark.parametrize("shape", [(), (1,), (N, 1), (3, 2)])
def test_fp8(shape: tuple[int, ...]) -> None:
    draw = np.random.default_rng(1)
    codes = draw.standard_normal((N, K)).astype(ml_dtypes.float8_e4m3fn)
    scales = draw.uniform(0.01, 0.1, shape).astype(np.float32)
    whole = scales if len(shape) == 2 else scales.reshape(1, 1)
    every = whole.repeat(-(-N // len(whole)), axis=0)[:N].repeat(-(-K // whole.shape[1]), axis=1)[:, :K]
    expected = codes.astype(np.float32) * every
    tensor = read(FP8(block=(32, 128)), {".weight": codes, ".weight_scale_inv": scales})
    check(tensor, expected, "q8_g32", is_exact=False)
    np.testing.assert_array_equal(tensor.read().codes, requantize(expected, "q8").codes)


def test_fp8_with_powers_of_two_and_blocks_that_reach_over_the_edge() -> None:
    draw = np.random.default_rng(1)
    codes = draw.standard_normal((N, K)).astype(ml_dtypes.float8_e4m3fn)
    scales = (2.0 ** draw.integers(-8, -2, (2, 3))).astype(ml_dtypes.float8_e8m0fnu)
    every = scales.astype(np.float32).repeat(64, axis=0)[:N].repeat(96, axis=1)[:, :K]
    tensor = read(FP8(block=(64, 96)), {".weight": codes, ".weight_scale_inv": scales})
    check(tensor, codes.astype(np.float32) * every, "q8_g32", is_exact=False)


def test_fp8_whose_scales_are_of_other_blocks() -> None:
    arrays = {
        ".weight": np.zeros((N, K), ml_dtypes.float8_e4m3fn),
        ".weight_scale_inv": np.ones((3, 3), np.float32),
    }
    with pytest.raises(
        CorruptSource, match=r"scales of shape \[3, 3\], \[96, 256\] in blocks of \[128, 128\] asks for"
    ):
        read(FP8(), arrays)


# MLC: weight = (q - 7) * scale.


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize(
    ("quantization", "name"),
    [("q4f16_1", NAME), ("q4f32_1", NAME), ("q4f16_0", NAME), ("q4f16_0", "model.embed_tokens")],
)
def test_mlc(quantization: str, name: str, dtype: Any) -> None:
    q = np.random.default_rng(1).integers(0, 15, (N, K))
    scales = half_scales((N, K // 32), 1).astype(dtype)
    words = packed(q, 4).view(np.uint32)
    turned = quantization.endswith("_0") and name == NAME
    arrays = {".q_weight": words.T.copy() if turned else words, ".q_scale": scales.T.copy() if turned else scales}
    expected = (q - 7).astype(np.float32) * per_input(scales, 32)
    check(read(MLC.of("model", quantization), arrays, name), expected, "q4_g32")


def test_experts_of_mlc_are_one_matrix_below_the_other() -> None:
    q = np.random.default_rng(1).integers(0, 15, (3 * N, K))
    scales = half_scales((3 * N, K // 32), 1)
    arrays = {
        ".q_weight": packed(q, 4).view(np.uint32).reshape(3, N, -1),
        ".q_scale": scales.reshape(3, N, -1),
    }
    tensor = read(MLC.of("model", "q4f16_1"), arrays, "model.layers.0.mlp.moe_down_proj")
    check(tensor, (q - 7).astype(np.float32) * per_input(scales, 32), "q4_g32")


def test_mlc_with_a_code_that_it_never_writes() -> None:
    arrays = {".q_weight": np.full((N, K // 8), 0xFFFFFFFF, np.uint32), ".q_scale": half_scales((N, K // 32), 1)}
    with pytest.raises(CorruptSource, match="codes above 14"):
        read(MLC.of("model", "q4f16_1"), arrays).read()


@pytest.mark.parametrize("quantization", ["q3f16_1", "q4f16_ft", "e5m2_e5m2_f16"])
def test_mlc_that_is_not_read(quantization: str) -> None:
    with pytest.raises(UnsupportedTensor, match=f"{quantization} is not read .*take the same model as q4f16_1"):
        MLC.of("model", quantization)


@pytest.mark.parametrize(
    ("format_", "arrays", "missing"),
    [
        (gptq_format(4, 128), gptq(4, 128, "gptq", symmetric=True)[0], ".qzeros"),
        (AWQ(128), awq(128)[0], ".scales"),
        (MLC("q4f16_1"), {".q_weight": np.zeros((N, 4), np.uint32)}, ".q_scale"),
        (MLX("model", {"bits": 4, "group_size": 64}), {".scales": half_scales((N, 4), 1)}, ".weight"),
        (FP8(), {".weight_scale_inv": np.ones((), np.float32)}, ".weight"),
    ],
)
def test_a_missing_array_is_named(format_: Any, arrays: dict[str, np.ndarray], missing: str) -> None:
    with pytest.raises(CorruptSource, match=f"{missing} is missing"):
        read(format_, {ending: array for ending, array in arrays.items() if ending != missing})


def test_scales_that_are_no_numbers_are_refused() -> None:
    arrays, _ = gptq(4, 128, "gptq", symmetric=True)
    arrays[".scales"][1, 5] = np.inf
    with pytest.raises(CorruptSource, match="no numbers or larger than float16 holds"):
        read(gptq_format(4, 128), arrays).read()
