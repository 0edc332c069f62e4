"""Every block type holds the numbers that ggml's own reference reads from the same bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from radixlm.compile.sources.gguf_blocks import BLOCK_TYPES, PLAIN_TYPES, weight_from_blocks
from radixlm.compile.weights.quantization import Weight, WeightKind, rounding_error

from .random_blocks import QUANTIZED_TYPES, random_blocks, set_scales

EXACT = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0"}
ROUNDED = sorted(set(QUANTIZED_TYPES) - EXACT)
ROW = 7 * 256
every_quantized_type = pytest.mark.parametrize("type_name", QUANTIZED_TYPES)


def both(type_name: str, blocks: np.ndarray) -> tuple[Weight, np.ndarray]:
    """Rows of blocks as we read them, and as the reference does."""
    data = blocks.reshape(len(blocks), -1)
    return weight_from_blocks(type_name, data), gguf.quants.dequantize(data, Type[type_name])


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def powers_of_two(rng: np.random.Generator, blocks: np.ndarray) -> np.ndarray:
    """Scales whose products with sub-scales are float16."""
    exponents = rng.integers(-7, 5, (*blocks.shape[:2], 2))
    return np.ldexp(rng.choice(np.float32([-1, 1]), exponents.shape), exponents)


def test_every_type_that_the_reference_reads_is_read() -> None:
    readable = set()
    for type_ in Type:
        values, size = gguf.GGML_QUANT_SIZES[type_]
        try:
            readable |= (
                {type_.name} if gguf.quants.dequantize(np.zeros((1, size), np.uint8), type_).size == values else set()
            )
        except NotImplementedError:
            continue
    assert readable == BLOCK_TYPES == PLAIN_TYPES | set(QUANTIZED_TYPES)


@pytest.mark.parametrize("type_name", sorted(PLAIN_TYPES))
def test_plain_values_are_kept(type_name: str) -> None:
    values = np.random.default_rng(0).standard_normal((7, 32), np.float32)
    data = gguf.quants.quantize(values, Type[type_name]).view(np.uint8)
    assert_same_bits(weight_from_blocks(type_name, data).dequantize(), gguf.quants.dequantize(data, Type[type_name]))


@every_quantized_type
def test_numbers_are_the_references_where_scales_are_not_rounded(type_name: str) -> None:
    rng = np.random.default_rng(1)
    blocks = random_blocks(type_name, rng, 64, ROW)
    set_scales(type_name, blocks, powers_of_two(rng, blocks))
    weight, theirs = both(type_name, blocks)
    assert_same_bits(weight.dequantize(), theirs)


@pytest.mark.parametrize("type_name", sorted(EXACT))
def test_types_with_plain_scales_are_kept_exactly(type_name: str) -> None:
    rng = np.random.default_rng(2)
    blocks = random_blocks(type_name, rng, 16, ROW)
    set_scales(type_name, blocks, rng.standard_normal((*blocks.shape[:2], 2)) * 0.01)
    weight, theirs = both(type_name, blocks)
    assert_same_bits(weight.dequantize(), theirs)
    assert rounding_error(theirs, weight)[0] == 0


@pytest.mark.parametrize("type_name", ROUNDED)
def test_types_with_nested_scales_lose_only_the_rounding_of_the_scale(type_name: str) -> None:
    rng = np.random.default_rng(3)
    blocks = random_blocks(type_name, rng, 16, ROW)
    set_scales(type_name, blocks, rng.choice([-1, 1], (*blocks.shape[:2], 2)) * rng.uniform(0.01, 0.02))
    weight, theirs = both(type_name, blocks)
    error, total = rounding_error(theirs, weight)
    assert 0 < (error / total) ** 0.5 < 2**-11
    assert weight.scales is not None and weight.scales.dtype == np.float16
    size = np.abs(theirs) if weight.minima is None else np.abs(theirs) + 2 * np.abs(each_value(weight, weight.minima))
    assert (np.abs(weight.dequantize() - theirs) <= 2**-11 * size).all()


def each_value(weight: Weight, of_groups: np.ndarray) -> np.ndarray:
    return of_groups.astype(np.float32).repeat(weight.kind.group, axis=1)


@every_quantized_type
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x0F, 0xF0, 0x55, 0xAA])
@pytest.mark.parametrize("scale", [0.0, 2.0**-8, -1.0])
def test_blocks_of_one_byte_are_the_references(type_name: str, byte: int, scale: float) -> None:
    blocks = np.full_like(random_blocks(type_name, np.random.default_rng(0), 1, 256), byte)
    set_scales(type_name, blocks, np.full((*blocks.shape[:2], 2), scale))
    weight, theirs = both(type_name, blocks)
    assert_same_bits(weight.dequantize(), theirs)


@every_quantized_type
def test_codes_fit_their_kind(type_name: str) -> None:
    blocks = random_blocks(type_name, np.random.default_rng(4), 16, ROW)
    weight = weight_from_blocks(type_name, blocks.reshape(16, -1))
    limits = {"Q5_1": 32, "Q4_K": 16, "Q5_K": 32, "Q6_K": 160, "Q2_K": 4, "Q3_K": 12, "TQ1_0": 10, "TQ2_0": 11}
    assert weight.codes.max() < limits.get(type_name, 16 if weight.kind.name == "q4" else 256)


@pytest.mark.parametrize(
    ("type_name", "kind"),
    [
        ("Q2_K", WeightKind("q4", 16, has_minimum=True)),
        ("Q3_K", WeightKind("q4", 16)),
        ("TQ2_0", WeightKind("q4", 32)),
        ("IQ2_S", WeightKind("q8", 16)),
        ("IQ4_XS", WeightKind("q8", 32)),
    ],
)
def test_the_smallest_kind_that_holds_a_type_is_taken(type_name: str, kind: WeightKind) -> None:
    blocks = random_blocks(type_name, np.random.default_rng(5), 1, ROW)
    assert weight_from_blocks(type_name, blocks.reshape(1, -1)).kind == kind


@pytest.mark.parametrize("exponent", [0, 1, 2, 103, 104, 128, 143])
def test_powers_of_two_within_float16_are_exact_and_smaller_ones_are_zero(exponent: int) -> None:
    blocks = random_blocks("MXFP4", np.random.default_rng(6), 1, 256)
    blocks[:, :, 0] = exponent
    weight, theirs = both("MXFP4", blocks)
    np.testing.assert_array_equal(weight.dequantize(), theirs if exponent >= 104 else np.zeros_like(theirs))


def test_every_byte_is_a_scale_of_nvfp4() -> None:
    blocks = random_blocks("NVFP4", np.random.default_rng(7), 64, 64)
    blocks[:, 0, :4] = np.arange(256).reshape(64, 4)
    weight, theirs = both("NVFP4", blocks)
    assert_same_bits(weight.dequantize(), theirs)


def test_a_vector_of_plain_values_stays_a_vector() -> None:
    values = np.arange(8, dtype=np.float32)
    np.testing.assert_array_equal(weight_from_blocks("F32", values.view(np.uint8)).codes, values)
