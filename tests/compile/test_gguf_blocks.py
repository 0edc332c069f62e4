"""Every block type holds the numbers that ggml's own reference reads from the same bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from radixlm.compile.sources.gguf_blocks import BLOCK_TYPES, weight_from_blocks
from radixlm.compile.weights.quantization import rounding_error

NESTED = {"Q4_K", "Q5_K", "Q6_K"}


def random_blocks(type_name: str, num_rows: int = 7, blocks_per_row: int = 3) -> np.ndarray:
    """Random bytes, except that the float16 scales are finite and of a size that weights have."""
    rng = np.random.default_rng(sum(map(ord, type_name)))
    _, block_bytes = gguf.GGML_QUANT_SIZES[Type[type_name]]
    if type_name in {"F32", "F16", "BF16"}:
        values = rng.standard_normal((num_rows, 32), np.float32)
        return gguf.quants.quantize(values, Type[type_name]).view(np.uint8)
    data = rng.integers(0, 256, (num_rows, blocks_per_row, block_bytes), np.uint8)
    num_halves = {"Q4_0": 1, "Q5_0": 1, "Q8_0": 1, "Q6_K": 1}.get(type_name, 2)
    halves = (rng.standard_normal((num_rows, blocks_per_row, num_halves)) * 0.01).astype(np.float16)
    where = slice(208, 210) if type_name == "Q6_K" else slice(0, 2 * num_halves)
    data[:, :, where] = halves.view(np.uint8)
    return data.reshape(num_rows, -1)


@pytest.mark.parametrize("type_name", sorted(BLOCK_TYPES - NESTED))
def test_types_with_plain_scales_are_kept_exactly(type_name: str) -> None:
    data = random_blocks(type_name)
    ours, theirs = weight_from_blocks(type_name, data).dequantize(), gguf.quants.dequantize(data, Type[type_name])
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("type_name", sorted(NESTED))
def test_types_with_nested_scales_lose_only_the_rounding_of_the_scale(type_name: str) -> None:
    data = random_blocks(type_name)
    exact = gguf.quants.dequantize(data, Type[type_name])
    weight = weight_from_blocks(type_name, data)
    error, total = rounding_error(exact, weight)
    assert 0 < (error / total) ** 0.5 < 2**-11
    assert weight.scales is not None and weight.scales.dtype == np.float16
    assert weight.codes.max() < {"Q4_K": 16, "Q5_K": 32, "Q6_K": 160}[type_name]


def test_a_vector_of_plain_values_stays_a_vector() -> None:
    values = np.arange(8, dtype=np.float32)
    np.testing.assert_array_equal(weight_from_blocks("F32", values.view(np.uint8)).codes, values)
