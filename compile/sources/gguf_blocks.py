"""GGUF's block types as weights: every code untouched, nested scales and minima as they are.

Knows how ggml lays blocks out (ggml-common.h), not files. A block of 32, 64 or 256 values of one row becomes codes in
the order of the values, one a byte. Types with a grid are in `gguf_grids.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields as fields_of
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..weights.kinds import (
    BF16,
    F16,
    F32,
    Q4,
    Q4_MINIMUM,
    Q5,
    Q5_MINIMUM,
    Q8,
    Scales,
    WeightKind,
)
from ..weights.quantization import Weight
from .gguf_bits import Bytes, Parts, fields, half, signed_codes, single_bits
from .gguf_grids import iq1_m, iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs


def weight_from_blocks(type_name: str, data: Bytes) -> Weight:
    """The weight stored in `data`, uint8 `[N, bytes of a row]` (or `[bytes]` for a vector of plain values).

    Exact, but for a scale that float16 or a byte of exponent cannot hold: one below 2**-126 (MXFP4), and an eighth of a
    subnormal float16 (IQ1, IQ2 and IQ3). Raises KeyError for a type that is not in `BLOCK_TYPES`.
    """
    if type_name in _PLAIN:
        kind, dtype = _PLAIN[type_name]
        return Weight(kind, data.view(dtype))
    kind, block_bytes, unpack = _BLOCKS[type_name]
    with np.errstate(over="ignore", invalid="ignore"):  # the caller refuses infinite scales, with the tensor's name
        parts = unpack(data.reshape(-1, block_bytes))
        arrays = {field.name: getattr(parts, field.name) for field in fields_of(parts)}
        return Weight(kind, **{name: _rows(array, len(data)) for name, array in arrays.items() if array is not None})


def _rows(array: NDArray[Any], num_rows: int) -> NDArray[Any]:
    return (array.astype(np.float16) if array.dtype == np.float32 else array).reshape(num_rows, -1)


# One function per type: blocks [B, bytes] -> codes [B, values], the rest [B, groups] or [B, 1].


def _q4_0(blocks: Bytes) -> Parts:
    return Parts(fields(blocks[:, 2:], 4, 16), half(blocks, 0))


def _q4_1(blocks: Bytes) -> Parts:
    return Parts(fields(blocks[:, 4:], 4, 16), half(blocks, 0), half(blocks, 2))


def _q5_0(blocks: Bytes) -> Parts:
    codes = fields(blocks[:, 6:], 4, 16) | single_bits(blocks[:, 2:6]) << np.uint8(4)
    return Parts(codes, half(blocks, 0))


def _q5_1(blocks: Bytes) -> Parts:
    codes = fields(blocks[:, 8:], 4, 16) | single_bits(blocks[:, 4:8]) << np.uint8(4)
    return Parts(codes, half(blocks, 0), half(blocks, 2))


def _q8_0(blocks: Bytes) -> Parts:
    return Parts(signed_codes(blocks[:, 2:].view(np.int8)), half(blocks, 0))


def _q2_k(blocks: Bytes) -> Parts:
    sub_scales, sub_minima = _signed(blocks[:, :16] & np.uint8(15)), _signed(blocks[:, :16] >> np.uint8(4))
    return Parts(fields(blocks[:, 16:80], 2, 32), half(blocks, 80), -half(blocks, 82), sub_scales, sub_minima)


def _q3_k(blocks: Bytes) -> Parts:
    codes = fields(blocks[:, 32:96], 2, 32) | fields(blocks[:, :32], 1, 32) << np.uint8(2)
    six_bits = fields(blocks[:, 96:104], 4, 8) | fields(blocks[:, 104:108], 2, 4) << np.uint8(4)
    return Parts(codes, half(blocks, 108), sub_scales=_signed(six_bits) - np.int8(32))


def _q4_k(blocks: Bytes) -> Parts:
    return _with_minima(fields(blocks[:, 16:], 4, 32), blocks)


def _q5_k(blocks: Bytes) -> Parts:
    return _with_minima(fields(blocks[:, 48:], 4, 32) | fields(blocks[:, 16:48], 1, 32) << np.uint8(4), blocks)


def _q6_k(blocks: Bytes) -> Parts:
    codes = fields(blocks[:, :128], 4, 64) | fields(blocks[:, 128:192], 2, 32) << np.uint8(4)
    return Parts(codes, half(blocks, 208), sub_scales=_signed(blocks[:, 192:208]))


def _iq4_nl(blocks: Bytes) -> Parts:
    return Parts(fields(blocks[:, 2:], 4, 16), half(blocks, 0))


def _iq4_xs(blocks: Bytes) -> Parts:
    six_bits = fields(blocks[:, 4:8], 4, 1) | fields(blocks[:, 2:4], 2, 1) << np.uint8(4)
    return Parts(fields(blocks[:, 8:], 4, 16), half(blocks, 0), sub_scales=_signed(six_bits) - np.int8(32))


def _mxfp4(blocks: Bytes) -> Parts:
    """Scales are half the powers of two that the format means, for levels are twice its values."""
    exponents = blocks[:, :1]
    return Parts(fields(blocks[:, 1:], 4, 16), exponents - np.minimum(exponents, np.uint8(1)))


def _nvfp4(blocks: Bytes) -> Parts:
    """As MXFP4, with a scale of 4 bits of exponent and 3 of mantissa for 16 values; 127 is no number, and read as 0."""
    scales = np.where(blocks[:, :4] == 127, np.uint8(0), blocks[:, :4] & np.uint8(127))
    return Parts(fields(blocks[:, 4:], 4, 8), scales)


def _tq1_0(blocks: Bytes) -> Parts:
    """Five digits of base 3 in a byte, read from the highest by multiplying what is left of it."""
    parts = ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4))
    digits = [_ternary_digits(packed, count) for packed, count in parts]
    return Parts(np.hstack(digits), half(blocks, 52).repeat(2, axis=1))


def _tq2_0(blocks: Bytes) -> Parts:
    return Parts(fields(blocks[:, :64], 2, 32), half(blocks, 64).repeat(2, axis=1))


def _ternary_digits(packed: Bytes, count: int) -> Bytes:
    """The first digits of all bytes, then the second ones, up to `count`."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
    rest = packed[:, None, :] * powers  # modulo 256: what the digits before were worth is gone
    return (rest.astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.uint8).reshape(len(packed), -1)


def _signed(few_bits: Bytes) -> NDArray[np.int8]:
    return np.ascontiguousarray(few_bits).view(np.int8)


def _with_minima(codes: Bytes, blocks: Bytes) -> Parts:
    """Eight scales and minima of 6 bits in 12 bytes, beside the block's two float16 (get_scale_min_k4)."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.hstack([first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)])
    minima = np.hstack([second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)])
    return Parts(codes, half(blocks, 0), -half(blocks, 2), _signed(scales), _signed(minima))


_PLAIN: dict[str, tuple[WeightKind, np.dtype[Any]]] = {
    "F32": (F32, np.dtype("<f4")),
    "F16": (F16, np.dtype("<f2")),
    "BF16": (BF16, np.dtype(ml_dtypes.bfloat16)),
}
_NESTED, _NESTED16 = Scales(32, nested=True), Scales(16, nested=True)
_NESTED_MINIMUM, _NESTED16_MINIMUM = Scales(32, "minimum", nested=True), Scales(16, "minimum", nested=True)
_BLOCKS: dict[str, tuple[WeightKind, int, Callable[[Bytes], Parts]]] = {
    "Q4_0": (Q4, 18, _q4_0),
    "Q4_1": (Q4_MINIMUM, 20, _q4_1),
    "Q5_0": (Q5, 22, _q5_0),
    "Q5_1": (Q5_MINIMUM, 24, _q5_1),
    "Q8_0": (Q8, 34, _q8_0),
    "Q2_K": (WeightKind("q2", _NESTED16_MINIMUM), 84, _q2_k),
    "Q3_K": (WeightKind("q3", _NESTED16), 110, _q3_k),
    "Q4_K": (WeightKind("q4", _NESTED_MINIMUM), 144, _q4_k),
    "Q5_K": (WeightKind("q5", _NESTED_MINIMUM), 176, _q5_k),
    "Q6_K": (WeightKind("q6", _NESTED16), 210, _q6_k),
    "IQ1_S": (WeightKind("q8", _NESTED), 50, iq1_s),
    "IQ1_M": (WeightKind("q8", _NESTED16), 56, iq1_m),
    "IQ2_XXS": (WeightKind("q8", _NESTED), 66, iq2_xxs),
    "IQ2_XS": (WeightKind("q8", _NESTED16), 74, iq2_xs),
    "IQ2_S": (WeightKind("q8", _NESTED16), 82, iq2_s),
    "IQ3_XXS": (WeightKind("q8", _NESTED), 98, iq3_xxs),
    "IQ3_S": (WeightKind("q8", _NESTED), 110, iq3_s),
    "IQ4_NL": (WeightKind("iq4", Scales(32)), 18, _iq4_nl),
    "IQ4_XS": (WeightKind("iq4", _NESTED), 136, _iq4_xs),
    "MXFP4": (WeightKind("fp4", Scales(32, dtype="e8m0")), 17, _mxfp4),
    "NVFP4": (WeightKind("fp4", Scales(16, dtype="e4m3")), 36, _nvfp4),
    "TQ1_0": (WeightKind("q2", Scales(128)), 54, _tq1_0),
    "TQ2_0": (WeightKind("q2", Scales(128)), 66, _tq2_0),
}
PLAIN_TYPES = frozenset(_PLAIN)
BLOCK_TYPES = PLAIN_TYPES | frozenset(_BLOCKS)
