"""ggml's packing of small integers into bytes, and the block types whose values are from a grid: IQ1, IQ2 and IQ3.

Blocks are uint8 `[B, bytes of a block]`; results keep the first axis. Numbers are regrouped without one byte per
number. A type with a grid stores indices of points of 4 or 8 values, separate signs, and a sub-scale for 16 or 32
values. The points are those of the `gguf` package. As weights they are 8-bit codes with odd sub-scales.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import quants
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Half = NDArray[np.float16]
Words = NDArray[np.uint32]  # each holds four neighbouring bytes


@dataclass(frozen=True)
class BlockScales:
    """Scales of the codes of blocks, `[B, ...]`: `Weight`'s arrays, as floats before rounding."""

    scales: NDArray[Any]
    minima: NDArray[Any] | None = None
    sub_scales: NDArray[Any] | None = None
    sub_minima: NDArray[Any] | None = None


@dataclass(frozen=True)
class DecodedBlocks:
    """All numbers of blocks: a code a byte, `[B, values]`, and their scales."""

    codes: Bytes
    scaling: BlockScales


def half(blocks: Bytes, at: int) -> Half:
    """Return the float16 at byte `at` of each block, `[B, 1]`."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")


def words(blocks: Bytes, start: int, stop: int, dtype: str) -> NDArray[np.unsignedinteger[Any]]:
    """Return bytes `[start, stop)` of each block as unsigned integers such as "<u2"."""
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype)


def fields(packed: Bytes, bits: int, span: int) -> Bytes:
    """Return fields of `bits` bits: of each `span` bytes, the lowest field of all, then the next, and so on."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    spans = packed.reshape(len(packed), -1, 1, span) >> shifts
    return (spans & np.uint8((1 << bits) - 1)).reshape(len(packed), -1)


def single_bits(packed: Bytes) -> Bytes:
    """Return the bits of each byte, the lowest first."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def signed_codes(values: NDArray[np.int8]) -> Bytes:
    """Return numbers from -128 to 127 as 8-bit codes; the code of zero is 128."""
    return values.view(np.uint8) ^ np.uint8(0x80)  # adding 128 flips the sign bit


def transposed(words: Words, bits: int) -> Words:
    """Exchange fields of each byte with words: field `j` of word `i` becomes field `i` of word `j`, in place.

    Args:
        words: contiguous `[..., n]`; bytes have `n` fields.
        bits: bits of a field, 8 / n.
    """
    num_words = words.shape[-1]
    step = num_words // 2
    while step:
        shift = step * bits
        low = _LOW_FIELDS[shift]
        if step > 1:
            pairs = words.reshape(*words.shape[:-1], -1, 2, step)
            first, second = pairs[..., 0, :], pairs[..., 1, :]
            moved = first >> np.uint32(shift)
            moved ^= second
            moved &= np.uint32(low)
            second ^= moved
            moved <<= np.uint32(shift)
            first ^= moved
        else:  # two neighbours are one number of 64 bits
            swap_bits(words.view(np.uint64), np.uint64(low << shift), 32 - shift)
        step //= 2
    return words


def swap_bits(numbers: NDArray[Any], mask: np.unsignedinteger[Any], distance: int) -> None:
    """Exchange the bits of `mask` with the bits `distance` above them, in place."""
    shift = numbers.dtype.type(distance)
    moved = numbers >> shift
    moved ^= numbers
    moved &= mask
    numbers ^= moved
    moved <<= shift
    numbers ^= moved


_LOW_FIELDS = {4: 0x0F0F0F0F, 2: 0x33333333, 1: 0x55555555}  # by the distance of the other fields


def nibble_words(packed: Bytes) -> Words:
    """Return the 4-bit codes of bytes `[B, n]` as `[B, n / 8, 2]`: low halves of 8 bytes, then their high halves.

    Byte `i` of a word holds code `i` in its low half and code `4 + i` in its high half.
    """
    return transposed(_words(packed, -1, 2), 4)


def pair_words(packed: Bytes) -> Words:
    """Return the 2-bit codes of bytes `[B, n]` as `[B, n / 16, 4]`, a word for each field of 16 bytes.

    Byte `i` of a word holds codes `i`, `4 + i`, `8 + i` and `12 + i`, the first in its lowest bits.
    """
    return transposed(_words(packed, -1, 4), 2)


def bit_words(packed: Bytes) -> Words:
    """Return the single bits of bytes `[B, n]` as `[B, n / 32, 8]`, a word for each field of 32 bytes."""
    return transposed(_words(packed, -1, 8), 1)


def bit_words_of_32(packed: Bytes) -> Words:
    """Return the 32 bits of `[B, 4]` bytes, bit `i` of code `i`, in the format of `bit_words`: `[B, 1]`."""
    found = _words(packed, 1)
    for mask, distance in _CHUNKS_INTO_BYTES:
        swap_bits(found, mask, distance)
    return found


def byte_words(packed: Bytes) -> Words:
    """Return bytes `[B, n]` as words, `[B, n / 4]`."""
    return _words(packed, -1)


def _words(packed: Bytes, *shape: int) -> Words:
    """Return a copy of bytes as words in another shape."""
    return packed.copy(order="C").view("<u4").reshape(len(packed), *shape)


def _index_swap(high: int, low: int) -> tuple[np.uint32, int]:
    """Return mask and distance that exchange two bits of the indices of a word's bits."""
    moved = [i for i in range(32) if not i >> high & 1 and i >> low & 1]
    return np.uint32(sum(1 << i for i in moved)), (1 << high) - (1 << low)


# Bit `4 * chunk + byte` becomes bit `8 * byte + chunk`: the five bits of its index rotate by two.
_CHUNKS_INTO_BYTES = [_index_swap(*pair) for pair in ((4, 1), (3, 0), (2, 1), (1, 0))]


Indices = NDArray[np.unsignedinteger[Any]]

# Readers of blocks: [B, bytes] -> codes [B, 256], scales [B, 1], sub-scales [B, groups]. Offsets are those of
# ggml-common.h.


def iq2_xxs(blocks: Bytes) -> DecodedBlocks:
    """Read IQ2_XXS: for 32 values four 8-bit indices, then four sets of 7-bit signs and the sub-scale in 32 bits."""
    groups = blocks[:, 2:66].reshape(len(blocks), 8, 8)
    signs = np.ascontiguousarray(groups[:, :, 4:]).view("<u4")[:, :, 0]
    points = _points("IQ2_XXS", groups[:, :, :4].reshape(len(blocks), -1))
    return _odd_parts(_codes(points, _packed_signs(signs)), half(blocks, 0), signs >> np.uint32(28), 8)


def iq2_xs(blocks: Bytes) -> DecodedBlocks:
    """Read IQ2_XS: a 16-bit word for 8 values has 9 bits of index and 7 of signs."""
    entries = words(blocks, 2, 66, "<u2")
    points = _points("IQ2_XS", entries & np.uint16(511))
    codes = _codes(points, _signs_of_eight(entries >> np.uint16(9)))
    return _odd_parts(codes, half(blocks, 0), fields(blocks[:, 66:74], 4, 1), 8)


def iq2_s(blocks: Bytes) -> DecodedBlocks:
    """Read IQ2_S: 10 bits of index, 2 of them stored separately; a sign bit for each value."""
    indices = _with_high_bits(blocks[:, 2:34], fields(blocks[:, 66:74], 2, 1))
    codes = _codes(_points("IQ2_S", indices), single_bits(blocks[:, 34:66]))
    return _odd_parts(codes, half(blocks, 0), fields(blocks[:, 74:82], 4, 1), 8)


def iq3_xxs(blocks: Bytes) -> DecodedBlocks:
    """Read IQ3_XXS: 8-bit indices; then, for 32 values, four sets of 7-bit signs and the sub-scale in 32 bits."""
    signs = words(blocks, 66, 98, "<u4")
    points = _points("IQ3_XXS", blocks[:, 2:66])
    return _odd_parts(_codes(points, _packed_signs(signs)), half(blocks, 0), signs >> np.uint32(28), 4)


def iq3_s(blocks: Bytes) -> DecodedBlocks:
    """Read IQ3_S: 9 bits of index, one of them stored separately; a sign bit for each value."""
    indices = _with_high_bits(blocks[:, 2:66], single_bits(blocks[:, 66:74]))
    codes = _codes(_points("IQ3_S", indices), single_bits(blocks[:, 74:106]))
    return _odd_parts(codes, half(blocks, 0), fields(blocks[:, 106:110], 4, 1), 1)


def iq1_s(blocks: Bytes) -> DecodedBlocks:
    """Read IQ1_S: for 32 values, a 16-bit word has the high bits of four indices, the sub-scale, and a shift."""
    high = words(blocks, 34, 50, "<u2")
    indices = _with_high_bits(blocks[:, 2:34], high[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7))
    codes = _shifted(_points("IQ1_S", indices), np.repeat(high >> np.uint16(15), 4, axis=1))
    return _odd_parts(codes, half(blocks, 0), high >> np.uint16(12) & np.uint16(7), 8)


def iq1_m(blocks: Bytes) -> DecodedBlocks:
    """Read IQ1_M: for 8 values, the high 3 bits of the index and a shift.

    Four words hold sub-scales, and the scale in parts.
    """
    high = fields(blocks[:, 32:48], 4, 1)
    indices = _with_high_bits(blocks[:, :32], high & np.uint8(7))
    sub_scales = words(blocks, 48, 56, "<u2")
    scale = np.bitwise_or.reduce(sub_scales >> np.uint16(12) << np.arange(0, 16, 4, dtype=np.uint16), axis=1)
    each = sub_scales[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7)
    codes = _shifted(_points("IQ1_M", indices), high >> np.uint8(3))
    return _odd_parts(codes, scale.view(np.float16)[:, None], each.reshape(len(blocks), -1), 8)


@functools.cache
def _grid(type_name: str) -> NDArray[np.int8]:
    """Return the points of a type, `[points, values of one]`."""
    type_ = getattr(quants, type_name)
    type_.init_grid()
    grid: NDArray[np.int8] = type_.grid.reshape(type_.grid_shape).astype(np.int8)
    return grid


def _points(type_name: str, indices: Indices) -> NDArray[np.int8]:
    """Return the values at some indices, one point after another."""
    return _grid(type_name)[indices].reshape(len(indices), -1)


def _with_high_bits(low: Bytes, high: Indices) -> Indices:
    """Return indices with their bits from 8 on added."""
    return low | high.reshape(low.shape).astype(np.uint16) << np.uint16(8)


def _odd_parts(codes: Bytes, scale: NDArray[np.float16], sub_scales: Indices, divisor: int) -> DecodedBlocks:
    """Return codes with scales `scale * (2 * sub_scale + 1) / divisor`."""
    odd = (2 * sub_scales + 1).astype(np.int8)
    return DecodedBlocks(codes, BlockScales(scale.astype(np.float32) / np.float32(divisor), sub_scales=odd))


def _packed_signs(of_groups: Indices) -> Bytes:
    """Return a sign bit for each value, from 32-bit words that hold four sets of 7 bits for 32 values."""
    sets = of_groups[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & np.uint32(127)
    return _signs_of_eight(sets.reshape(len(sets), -1))


def _signs_of_eight(sets: Indices) -> Bytes:
    """Return the signs of 8 values from 7 bits each: the eighth makes the number of negative ones even."""
    return single_bits(np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)[sets])


def _codes(points: NDArray[np.int8], are_negative: Bytes) -> Bytes:
    """Return codes of points, negated where a sign is set."""
    return signed_codes(np.where(are_negative, -points, points))


def _shifted(points: NDArray[np.int8], are_lowered: Indices) -> Bytes:
    """Return codes of values shifted by an eighth: 8 times a point, plus or minus one for each 8 values."""
    shift = (1 - 2 * are_lowered.astype(np.int8)).repeat(8, axis=1)
    return signed_codes(np.int8(8) * points + shift)
