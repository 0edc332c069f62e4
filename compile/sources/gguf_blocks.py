"""GGUF's block types as weights: every code untouched, nested scales and minima multiplied out.

Knows how ggml lays bits into blocks (ggml-common.h), not files. A block of 32 or 256 values of one row
becomes codes in the order of the values, one a byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..weights.quantization import (
    BF16,
    F16,
    F32,
    Q4,
    Q4_MINIMUM,
    Q8,
    Q8_GROUP16,
    Q8_MINIMUM,
    Weight,
    WeightKind,
)

Bytes = NDArray[np.uint8]
Half = NDArray[np.float16]
Parts = tuple[Bytes, NDArray[np.floating[Any]], NDArray[np.floating[Any]] | None]  # codes, scales, minima


def weight_from_blocks(type_name: str, data: Bytes) -> Weight:
    """The weight stored in `data`, uint8 `[N, bytes of a row]` (or `[bytes]` for a vector of plain values).

    Scales that a type keeps as a product (Q4_K, Q5_K, Q6_K) are rounded to float16; everything else is
    exact. Raises KeyError for a type that is not in `BLOCK_TYPES`.
    """
    if type_name in _PLAIN:
        kind, dtype = _PLAIN[type_name]
        return Weight(kind, data.view(dtype))
    kind, block_bytes, unpack = _BLOCKS[type_name]
    codes, scales, minima = _unpack_rows(data, block_bytes, unpack)
    with np.errstate(over="ignore"):  # the caller refuses infinite scales, with the tensor's name
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
    return _nibbles(blocks[:, 2:], 16), _half(blocks, 0), None


def _q4_1(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Parts:
    codes = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return codes + np.uint8(128 - 16), _half(blocks, 0), None


def _q5_1(blocks: Bytes) -> Parts:
    codes = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return codes, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Parts:
    return blocks[:, 2:] ^ np.uint8(0x80), _half(blocks, 0), None  # int8 + 128 is a flipped sign bit


def _q4_k(blocks: Bytes) -> Parts:
    scales, minima = _nested_scales(blocks)
    return _nibbles(blocks[:, 16:], 32), scales, minima


def _q5_k(blocks: Bytes) -> Parts:
    scales, minima = _nested_scales(blocks)
    bit_of_group = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = ((blocks[:, 16:48][:, None, :] >> bit_of_group) & np.uint8(1)) << np.uint8(4)
    return _nibbles(blocks[:, 48:], 32) | fifth.reshape(len(blocks), 256), scales, minima


def _q6_k(blocks: Bytes) -> Parts:
    low = _nibbles(blocks[:, :128], 64)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    codes = low | ((pairs & np.uint8(3)) << np.uint8(4)).reshape(len(blocks), 256)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * _half(blocks, 208).astype(np.float32)
    return codes + np.uint8(128 - 32), scales, None


def _half(blocks: Bytes, at: int) -> Half:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _nibbles(packed: Bytes, span: int) -> Bytes:
    """Of each `span` bytes, first all low halves, then all high halves."""
    spans = packed.reshape(len(packed), -1, 1, span) >> np.array([0, 4], np.uint8)[None, None, :, None]
    return (spans & np.uint8(15)).reshape(len(packed), -1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """32 bits, the lowest first, each in the place of a code's fifth bit."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _nested_scales(blocks: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Eight scales and minima of 6 bits in 12 bytes, times the block's two float16 (get_scale_min_k4)."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.hstack([first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)])
    minima = np.hstack([second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)])
    scale, minimum = _half(blocks, 0).astype(np.float32), _half(blocks, 2).astype(np.float32)
    return scale * scales.astype(np.float32), -minimum * minima.astype(np.float32)


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
    "Q4_K": (Q4_MINIMUM, 144, _q4_k),
    "Q5_K": (Q8_MINIMUM, 176, _q5_k),
    "Q6_K": (Q8_GROUP16, 210, _q6_k),
}
BLOCK_TYPES = frozenset(_PLAIN) | frozenset(_BLOCKS)
