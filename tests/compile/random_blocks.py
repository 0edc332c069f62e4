"""Random tensors in GGUF's block types: any bits are valid codes and sub-scales, the scales are chosen."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

# Where a block's float16 are, in bytes. IQ1_M has one in four parts; MXFP4 and NVFP4 have other scales.
_HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
QUANTIZED_TYPES = sorted({*_HALVES, "IQ1_M", "MXFP4", "NVFP4"})


def random_blocks(type_name: str, rng: np.random.Generator, num_rows: int, row_values: int) -> np.ndarray:
    """Random bits, uint8 `[num_rows, blocks of a row, bytes of a block]`."""
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[Type[type_name]]
    return rng.integers(0, 256, (num_rows, row_values // block_values, block_bytes), np.uint8)


def set_scales(type_name: str, blocks: np.ndarray, scales: np.ndarray) -> None:
    """Give blocks their scales: float16 `[rows, blocks of a row, 2]`, of which many types need the first only.

    MXFP4 takes the next lower power of two; NVFP4's four keep their mantissas, and get its exponent.
    """
    bits = scales.astype(np.float16).view(np.uint16)
    exponents = np.frexp(np.abs(scales[:, :, 0].astype(np.float32)))[1] - 1
    if type_name == "MXFP4":
        blocks[:, :, 0] = (128 + exponents).clip(0, 255)
    elif type_name == "NVFP4":
        blocks[:, :, :4] &= 0x87
        blocks[:, :, :4] |= ((exponents + 8).clip(0, 15).astype(np.uint8) << 3)[:, :, None]
    elif type_name == "IQ1_M":
        for part in range(4):
            at = 49 + 2 * part  # the high byte of a word; its lower half is of sub-scales
            blocks[:, :, at] = blocks[:, :, at] & 15 | (bits[:, :, 0] >> 4 * part << 4).astype(np.uint8) & 0xF0
    else:
        for number, at in enumerate(_HALVES[type_name]):
            blocks[:, :, at : at + 2] = bits[:, :, number, None].view(np.uint8)


def random_tensor(type_name: str, rng: np.random.Generator, shape: tuple[int, int], deviation: float) -> np.ndarray:
    """A matrix of about that standard deviation as a file stores it, uint8 `[rows, bytes of a row]`."""
    blocks = random_blocks(type_name, rng, *shape)
    scales = np.ones((*blocks.shape[:2], 2), np.float32)
    set_scales(type_name, blocks, scales)
    values = gguf.quants.dequantize(blocks.reshape(shape[0], -1), Type[type_name])
    set_scales(type_name, blocks, scales * np.float32(deviation) / values.std())
    return blocks.reshape(shape[0], -1)
