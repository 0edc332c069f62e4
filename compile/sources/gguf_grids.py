"""GGUF's block types whose values come from a grid: IQ1, IQ2 and IQ3.

Such a type stores indices of points of 4 or 8 values, signs apart, and a sub-scale for 16 or 32 values. The points are
those of the `gguf` package. As weights they are 8-bit codes; the sub-scales are odd.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from gguf import quants
from numpy.typing import NDArray

from .gguf_bits import Bytes, Parts, Scaling, fields, half, signed_codes, single_bits, words

Indices = NDArray[np.unsignedinteger[Any]]

# Blocks [B, bytes] -> codes [B, 256], scales [B, 1], sub-scales [B, groups]. Offsets are those of ggml-common.h.


def iq2_xxs(blocks: Bytes) -> Parts:
    """Of 32 values four indices of a byte, then four sets of signs of 7 bits and the sub-scale in 32 bits."""
    groups = blocks[:, 2:66].reshape(len(blocks), 8, 8)
    signs = np.ascontiguousarray(groups[:, :, 4:]).view("<u4")[:, :, 0]
    points = _points("IQ2_XXS", groups[:, :, :4].reshape(len(blocks), -1))
    return _odd_parts(_codes(points, _packed_signs(signs)), half(blocks, 0), signs >> np.uint32(28), 8)


def iq2_xs(blocks: Bytes) -> Parts:
    """A 16-bit word for 8 values: 9 bits of index, 7 of signs."""
    entries = words(blocks, 2, 66, "<u2")
    points = _points("IQ2_XS", entries & np.uint16(511))
    codes = _codes(points, _signs_of_eight(entries >> np.uint16(9)))
    return _odd_parts(codes, half(blocks, 0), fields(blocks[:, 66:74], 4, 1), 8)


def iq2_s(blocks: Bytes) -> Parts:
    """10 bits of index, 2 of them apart; a bit of sign for each value."""
    indices = _with_high_bits(blocks[:, 2:34], fields(blocks[:, 66:74], 2, 1))
    codes = _codes(_points("IQ2_S", indices), single_bits(blocks[:, 34:66]))
    return _odd_parts(codes, half(blocks, 0), fields(blocks[:, 74:82], 4, 1), 8)


def iq3_xxs(blocks: Bytes) -> Parts:
    """Indices of a byte; then, for 32 values, four sets of signs of 7 bits and the sub-scale in 32 bits."""
    signs = words(blocks, 66, 98, "<u4")
    points = _points("IQ3_XXS", blocks[:, 2:66])
    return _odd_parts(_codes(points, _packed_signs(signs)), half(blocks, 0), signs >> np.uint32(28), 4)


def iq3_s(blocks: Bytes) -> Parts:
    """9 bits of index, one of them apart; a bit of sign for each value."""
    indices = _with_high_bits(blocks[:, 2:66], single_bits(blocks[:, 66:74]))
    codes = _codes(_points("IQ3_S", indices), single_bits(blocks[:, 74:106]))
    return _odd_parts(codes, half(blocks, 0), fields(blocks[:, 106:110], 4, 1), 1)


def iq1_s(blocks: Bytes) -> Parts:
    """For 32 values a 16-bit word: the high 3 bits of four indices, the sub-scale, and which way values are shifted."""
    high = words(blocks, 34, 50, "<u2")
    indices = _with_high_bits(blocks[:, 2:34], high[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7))
    codes = _shifted(_points("IQ1_S", indices), np.repeat(high >> np.uint16(15), 4, axis=1))
    return _odd_parts(codes, half(blocks, 0), high >> np.uint16(12) & np.uint16(7), 8)


def iq1_m(blocks: Bytes) -> Parts:
    """For 8 values the high 3 bits of the index and a shift; four words hold sub-scales, and the scale in parts."""
    high = fields(blocks[:, 32:48], 4, 1)
    indices = _with_high_bits(blocks[:, :32], high & np.uint8(7))
    sub_scales = words(blocks, 48, 56, "<u2")
    scale = np.bitwise_or.reduce(sub_scales >> np.uint16(12) << np.arange(0, 16, 4, dtype=np.uint16), axis=1)
    each = sub_scales[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7)
    codes = _shifted(_points("IQ1_M", indices), high >> np.uint8(3))
    return _odd_parts(codes, scale.view(np.float16)[:, None], each.reshape(len(blocks), -1), 8)


@functools.cache
def _grid(type_name: str) -> NDArray[np.int8]:
    """The points of a type, `[points, values of one]`."""
    type_ = getattr(quants, type_name)
    type_.init_grid()
    grid: NDArray[np.int8] = type_.grid.reshape(type_.grid_shape).astype(np.int8)
    return grid


def _points(type_name: str, indices: Indices) -> NDArray[np.int8]:
    """The values at some indices, one point after another."""
    return _grid(type_name)[indices].reshape(len(indices), -1)


def _with_high_bits(low: Bytes, high: Indices) -> Indices:
    return low | high.reshape(low.shape).astype(np.uint16) << np.uint16(8)


def _odd_parts(codes: Bytes, scale: NDArray[np.float16], sub_scales: Indices, divisor: int) -> Parts:
    """Codes whose scale is `scale * (2 * sub_scale + 1) / divisor`."""
    odd = (2 * sub_scales + 1).astype(np.int8)
    return Parts(codes, Scaling(scale.astype(np.float32) / np.float32(divisor), sub_scales=odd))


def _packed_signs(of_groups: Indices) -> Bytes:
    """A bit of sign for each value, from 32-bit words that hold four sets of 7 bits for 32 values."""
    sets = of_groups[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & np.uint32(127)
    return _signs_of_eight(sets.reshape(len(sets), -1))


def _signs_of_eight(sets: Indices) -> Bytes:
    """Signs of 8 values from 7 bits each: the eighth makes the number of negative ones even."""
    return single_bits(np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)[sets])


def _codes(points: NDArray[np.int8], are_negative: Bytes) -> Bytes:
    return signed_codes(np.where(are_negative, -points, points))


def _shifted(points: NDArray[np.int8], are_lowered: Indices) -> Bytes:
    """Codes of values moved by an eighth: 8 times a point, and one more or less for each 8 values."""
    shift = (1 - 2 * are_lowered.astype(np.int8)).repeat(8, axis=1)
    return signed_codes(np.int8(8) * points + shift)
