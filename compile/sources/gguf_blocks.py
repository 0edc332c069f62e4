"""GGUF's block types as weights: every code untouched, nested scales and minima multiplied out.

Knows how ggml lays blocks out (ggml-common.h), not files. A block of 32, 64 or 256 values of one row becomes codes in
the order of the values, one a byte. Types with a grid are in `gguf_grids.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from gguf import quants
from numpy.typing import NDArray

from ..weights.quantization import (
    BF16,
    F16,
    F32,
    Q4,
    Q4_GROUP16,
    Q4_GROUP16_MINIMUM,
    Q4_MINIMUM,
    Q8,
    Q8_GROUP16,
    Q8_MINIMUM,
    Weight,
    WeightKind,
)
from .gguf_bits import Bytes, Parts, fields, half, signed_codes, single_bits
from .gguf_grids import iq1_m, iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs


def weight_from_blocks(type_name: str, data: Bytes) -> Weight:
    """The weight stored in `data`, uint8 `[N, bytes of a row]` (or `[bytes]` for a vector of plain values).

    Scales that a type keeps as a product (K and IQ types but IQ4_NL) are rounded to float16, and so is a power of two
    beyond float16 (MXFP4); everything else is exact. Raises KeyError for a type that is not in `BLOCK_TYPES`.
    """
    if type_name in _PLAIN:
        kind, dtype = _PLAIN[type_name]
        return Weight(kind, data.view(dtype))
    kind, block_bytes, unpack = _BLOCKS[type_name]
    with np.errstate(over="ignore", invalid="ignore"):  # the caller refuses infinite scales, with the tensor's name
        codes, scales, minima = _unpack_rows(data, block_bytes, unpack)
        half_minima = None if minima is None else minima.astype(np.float16)
        return Weight(kind, codes, scales.astype(np.float16), half_minima)


def _unpack_rows(data: Bytes, block_bytes: int, unpack: Callable[[Bytes], Parts]) -> Parts:
    num_rows = data.shape[0]
    codes, scales, minima = unpack(data.reshape(-1, block_bytes))
    rows = (num_rows, -1)
    return codes.reshape(rows), scales.reshape(rows), None if minima is None else minima.reshape(rows)


# One function per type: blocks [B, bytes] -> codes [B, values], scales [B, groups], minima [B, groups] or
# None.


def _q4_0(blocks: Bytes) -> Parts:
    return fields(blocks[:, 2:], 4, 16), half(blocks, 0), None


def _q4_1(blocks: Bytes) -> Parts:
    return fields(blocks[:, 4:], 4, 16), half(blocks, 0), half(blocks, 2)


def _q5_0(blocks: Bytes) -> Parts:
    codes = fields(blocks[:, 6:], 4, 16) | single_bits(blocks[:, 2:6]) << np.uint8(4)
    return codes + np.uint8(128 - 16), half(blocks, 0), None


def _q5_1(blocks: Bytes) -> Parts:
    codes = fields(blocks[:, 8:], 4, 16) | single_bits(blocks[:, 4:8]) << np.uint8(4)
    return codes, half(blocks, 0), half(blocks, 2)


def _q8_0(blocks: Bytes) -> Parts:
    return signed_codes(blocks[:, 2:].view(np.int8)), half(blocks, 0), None


def _q2_k(blocks: Bytes) -> Parts:
    scales = half(blocks, 80).astype(np.float32) * (blocks[:, :16] & np.uint8(15)).astype(np.float32)
    minima = -half(blocks, 82).astype(np.float32) * (blocks[:, :16] >> np.uint8(4)).astype(np.float32)
    return fields(blocks[:, 16:80], 2, 32), scales, minima


def _q3_k(blocks: Bytes) -> Parts:
    codes = fields(blocks[:, 32:96], 2, 32) | fields(blocks[:, :32], 1, 32) << np.uint8(2)
    six_bits = fields(blocks[:, 96:104], 4, 8) | fields(blocks[:, 104:108], 2, 4) << np.uint8(4)
    return codes + np.uint8(8 - 4), _centered_scales(half(blocks, 108), six_bits), None


def _q4_k(blocks: Bytes) -> Parts:
    scales, minima = _nested_scales(blocks)
    return fields(blocks[:, 16:], 4, 32), scales, minima


def _q5_k(blocks: Bytes) -> Parts:
    scales, minima = _nested_scales(blocks)
    codes = fields(blocks[:, 48:], 4, 32) | fields(blocks[:, 16:48], 1, 32) << np.uint8(4)
    return codes, scales, minima


def _q6_k(blocks: Bytes) -> Parts:
    codes = fields(blocks[:, :128], 4, 64) | fields(blocks[:, 128:192], 2, 32) << np.uint8(4)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * half(blocks, 208).astype(np.float32)
    return codes + np.uint8(128 - 32), scales, None


def _iq4_nl(blocks: Bytes) -> Parts:
    return _IQ4_CODES[fields(blocks[:, 2:], 4, 16)], half(blocks, 0), None


def _iq4_xs(blocks: Bytes) -> Parts:
    six_bits = fields(blocks[:, 4:8], 4, 1) | fields(blocks[:, 2:4], 2, 1) << np.uint8(4)
    return _IQ4_CODES[fields(blocks[:, 8:], 4, 16)], _centered_scales(half(blocks, 0), six_bits), None


def _mxfp4(blocks: Bytes) -> Parts:
    """Scales are half the powers of two that the format means, for codes are twice its values."""
    exponents = blocks[:, :1].astype(np.int32) - 128
    return _FP4_CODES[fields(blocks[:, 1:], 4, 16)], np.ldexp(np.float32(1), exponents), None


def _nvfp4(blocks: Bytes) -> Parts:
    """As MXFP4, with a scale of 4 bits of exponent and 3 of mantissa for 16 values; 127 is no number, and read as 0."""
    exponents, mantissas = (blocks[:, :4] >> np.uint8(3) & np.uint8(15)).astype(np.int32), blocks[:, :4] & np.uint8(7)
    significands = np.where(exponents == 0, mantissas, mantissas + np.uint8(8)).astype(np.float32)
    scales = np.ldexp(significands, np.maximum(exponents, 1) - 11)
    return _FP4_CODES[fields(blocks[:, 4:], 4, 8)], np.where(blocks[:, :4] == 127, np.float32(0), scales), None


def _tq1_0(blocks: Bytes) -> Parts:
    """Five digits of base 3 in a byte, read from the highest by multiplying what is left of it."""
    parts = ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4))
    digits = [_ternary_digits(packed, count) for packed, count in parts]
    return np.hstack(digits) + np.uint8(8 - 1), half(blocks, 52).repeat(8, axis=1), None


def _tq2_0(blocks: Bytes) -> Parts:
    return fields(blocks[:, :64], 2, 32) + np.uint8(8 - 1), half(blocks, 64).repeat(8, axis=1), None


def _ternary_digits(packed: Bytes, count: int) -> Bytes:
    """The first digits of all bytes, then the second ones, up to `count`."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
    rest = packed[:, None, :] * powers  # modulo 256: what the digits before were worth is gone
    return (rest.astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.uint8).reshape(len(packed), -1)


def _centered_scales(scale: NDArray[np.float16], six_bits: Bytes) -> NDArray[np.float32]:
    return scale.astype(np.float32) * (six_bits.astype(np.float32) - np.float32(32))


def _nested_scales(blocks: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Eight scales and minima of 6 bits in 12 bytes, times the block's two float16 (get_scale_min_k4)."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.hstack([first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)])
    minima = np.hstack([second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)])
    scale, minimum = half(blocks, 0).astype(np.float32), half(blocks, 2).astype(np.float32)
    return scale * scales.astype(np.float32), -minimum * minima.astype(np.float32)


_IQ4_CODES = signed_codes(np.array(quants.IQ4_NL.kvalues, np.int8))
_FP4_CODES = signed_codes(np.array(quants.MXFP4.kvalues, np.int8))

_PLAIN: dict[str, tuple[WeightKind, np.dtype[Any]]] = {
    "F32": (F32, np.dtype("<f4")),
    "F16": (F16, np.dtype("<f2")),
    "BF16": (BF16, np.dtype(ml_dtypes.bfloat16)),
}
_BLOCKS: dict[str, tuple[WeightKind, int, Callable[[Bytes], Parts]]] = {
    "Q4_0": (Q4, 18, _q4_0),
    "Q4_1": (Q4_MINIMUM, 20, _q4_1),
    "Q5_0": (Q8, 22, _q5_0),
    "Q5_1": (Q8_MINIMUM, 24, _q5_1),
    "Q8_0": (Q8, 34, _q8_0),
    "Q2_K": (Q4_GROUP16_MINIMUM, 84, _q2_k),
    "Q3_K": (Q4_GROUP16, 110, _q3_k),
    "Q4_K": (Q4_MINIMUM, 144, _q4_k),
    "Q5_K": (Q8_MINIMUM, 176, _q5_k),
    "Q6_K": (Q8_GROUP16, 210, _q6_k),
    "IQ1_S": (Q8, 50, iq1_s),
    "IQ1_M": (Q8_GROUP16, 56, iq1_m),
    "IQ2_XXS": (Q8, 66, iq2_xxs),
    "IQ2_XS": (Q8_GROUP16, 74, iq2_xs),
    "IQ2_S": (Q8_GROUP16, 82, iq2_s),
    "IQ3_XXS": (Q8, 98, iq3_xxs),
    "IQ3_S": (Q8, 110, iq3_s),
    "IQ4_NL": (Q8, 18, _iq4_nl),
    "IQ4_XS": (Q8, 136, _iq4_xs),
    "MXFP4": (Q8, 17, _mxfp4),
    "NVFP4": (Q8_GROUP16, 36, _nvfp4),
    "TQ1_0": (Q4, 54, _tq1_0),
    "TQ2_0": (Q4, 66, _tq2_0),
}
PLAIN_TYPES = frozenset(_PLAIN)
BLOCK_TYPES = PLAIN_TYPES | frozenset(_BLOCKS)
