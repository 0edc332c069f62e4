"""Every block type holds the numbers that ggml's own reference reads from the same bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from radixlm.compile.sources.gguf_blocks import BLOCK_TYPES, PLAIN_TYPES, planes_from_blocks, weight_from_blocks
from radixlm.compile.weights.packing import pack, pack_planes, packed_shape
from radixlm.compile.weights.quantization import Weight, rounding_error

from .kernels.random_weights import num_codes
from .random_blocks import QUANTIZED_TYPES, random_blocks, set_scales

# Their scale is an eighth or a quarter of a float16, which may be none.
DIVIDED = ["IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_XXS"]
ROW = 7 * 256
every_quantized_type = pytest.mark.parametrize("type_name", QUANTIZED_TYPES)


def both(type_name: str, blocks: np.ndarray) -> tuple[Weight, np.ndarray]:
    """Rows of blocks as we read them, and as the reference does."""
    data = blocks.reshape(len(blocks), -1)
    return weight_from_blocks(type_name, data), gguf.quants.dequantize(data, Type[type_name])


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


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
def test_numbers_are_the_references(type_name: str) -> None:
    rng = np.random.default_rng(1)
    blocks = random_blocks(type_name, rng, 64, ROW)
    set_scales(type_name, blocks, rng.choice([-1, 1], (*blocks.shape[:2], 2)) * rng.uniform(0.001, 0.02))
    weight, theirs = both(type_name, blocks)
    assert_same_bits(weight.dequantize(), theirs)
    assert rounding_error(theirs, weight)[0] == 0


@pytest.mark.parametrize("type_name", DIVIDED)
def test_a_scale_that_is_no_float16_once_divided_is_rounded(type_name: str) -> None:
    rng = np.random.default_rng(3)
    blocks = random_blocks(type_name, rng, 16, ROW)
    set_scales(type_name, blocks, np.full((*blocks.shape[:2], 2), 1731 * 2.0**-24))
    weight, theirs = both(type_name, blocks)
    error, total = rounding_error(theirs, weight)
    assert 0 < (error / total) ** 0.5 < 2**-8


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
    assert weight.codes.max() < num_codes(weight.kind)


@pytest.mark.parametrize(
    ("type_name", "label", "bits"),
    [
        ("Q5_0", "q5_g32", 5.5),
        ("Q2_K", "q2_g16_min_nested", 3.125),
        ("Q3_K", "q3_g16_nested", 3.5625),
        ("Q4_K", "q4_g32_min_nested", 4.625),
        ("Q5_K", "q5_g32_min_nested", 5.625),
        ("Q6_K", "q6_g16_nested", 6.5625),
        ("IQ2_S", "q8_g16_nested", 8.5625),
        ("IQ4_NL", "iq4_g32", 4.5),
        ("IQ4_XS", "iq4_g32_nested", 4.3125),
        ("MXFP4", "fp4_g32_e8m0", 4.25),
        ("NVFP4", "fp4_g16_e4m3", 4.5),
        ("TQ2_0", "q2_g128", 2.125),
    ],
)
def test_a_type_takes_about_as_many_bits_as_in_its_file(type_name: str, label: str, bits: float) -> None:
    blocks = random_blocks(type_name, np.random.default_rng(5), 16, ROW)
    weight = weight_from_blocks(type_name, blocks.reshape(16, -1))
    shape = packed_shape(weight.kind, *blocks_shape(weight))
    assert weight.kind.label == label
    assert (shape.codes + shape.scales + shape.offsets) * 8 == bits * 16 * ROW


def blocks_shape(weight: Weight) -> tuple[int, int]:
    return weight.shape[0], weight.shape[1]


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 103, 104, 128, 143, 250])
def test_powers_of_two_are_exact_but_for_those_that_float32_has_none_for(exponent: int) -> None:
    blocks = random_blocks("MXFP4", np.random.default_rng(6), 1, 256)
    blocks[:, :, 0] = exponent
    weight, theirs = both("MXFP4", blocks)
    np.testing.assert_array_equal(weight.dequantize(), theirs if exponent >= 2 else np.zeros_like(theirs))


def test_every_byte_is_a_scale_of_nvfp4() -> None:
    blocks = random_blocks("NVFP4", np.random.default_rng(7), 64, 64)
    blocks[:, 0, :4] = np.arange(256).reshape(64, 4)
    weight, theirs = both("NVFP4", blocks)
    assert_same_bits(weight.dequantize(), theirs)


def test_a_vector_of_plain_values_stays_a_vector() -> None:
    values = np.arange(8, dtype=np.float32)
    np.testing.assert_array_equal(weight_from_blocks("F32", values.view(np.uint8)).codes, values)


@every_quantized_type
@pytest.mark.parametrize("num_rows", [1, 16, 37])
def test_planes_are_packed_to_the_same_bytes_as_codes_one_by_one(type_name: str, num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    blocks = random_blocks(type_name, rng, num_rows, ROW)
    set_scales(
        type_name, blocks, rng.choice([-1, 1], (*blocks.shape[:2], 2)) * rng.uniform(0.01, 2, (*blocks.shape[:2], 2))
    )
    data = blocks.reshape(num_rows, -1)
    planes = planes_from_blocks(type_name, data)
    if planes is None:
        assert type_name.startswith(("IQ1", "IQ2", "IQ3", "TQ1"))
        return
    expected, found = pack(weight_from_blocks(type_name, data)), pack_planes(planes, ROW)
    for array in ("codes", "scales", "offsets"):
        ours, theirs = getattr(found, array), getattr(expected, array)
        assert (ours is None) == (theirs is None)
        assert ours is None or (ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes())


@every_quantized_type
def test_what_is_called_exact_is_the_references(type_name: str) -> None:
    blocks = random_blocks(type_name, np.random.default_rng(7), 8, ROW)
    set_scales(type_name, blocks, np.full((*blocks.shape[:2], 2), 2.0**-24))  # a subnormal float16
    weight, theirs = both(type_name, blocks)
    if weight.is_exact:
        assert_same_bits(weight.dequantize(), theirs)
    assert weight.is_exact or planes_from_blocks(type_name, blocks.reshape(8, -1)) is None


@pytest.mark.parametrize(("exponent", "is_exact"), [(0, False), (1, False), (2, True)])
def test_powers_of_two_that_become_zero_are_not_exact(exponent: int, is_exact: bool) -> None:
    blocks = random_blocks("MXFP4", np.random.default_rng(6), 1, 256)
    blocks[0, 3, 0] = exponent
    data = blocks.reshape(1, -1)
    blocks[0, :3, 0], blocks[0, 4:, 0] = 100, 100
    assert weight_from_blocks("MXFP4", data).is_exact is is_exact
    assert (planes_from_blocks("MXFP4", data) is not None) is is_exact
