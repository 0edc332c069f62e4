"""How ggml lays numbers of a few bits into bytes, and how to regroup them without one byte per number.

Knows no type of block. Blocks are uint8 `[B, bytes of a block]`; what comes out of them keeps the first axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Half = NDArray[np.float16]
Words = NDArray[np.uint32]  # each of four neighbouring bytes


@dataclass(frozen=True)
class Scaling:
    """What the codes of blocks are scaled by, `[B, ...]`: `Weight`'s arrays, floats still to be rounded."""

    scales: NDArray[Any]
    minima: NDArray[Any] | None = None
    sub_scales: NDArray[Any] | None = None
    sub_minima: NDArray[Any] | None = None


@dataclass(frozen=True)
class Parts:
    """All numbers of blocks: a code a byte, `[B, values]`, and what they are scaled by."""

    codes: Bytes
    scaling: Scaling


def half(blocks: Bytes, at: int) -> Half:
    """The float16 at byte `at` of each block, `[B, 1]`."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")


def words(blocks: Bytes, start: int, stop: int, dtype: str) -> NDArray[np.unsignedinteger[Any]]:
    """Bytes `[start, stop)` of each block as unsigned integers such as "<u2"."""
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype)


def fields(packed: Bytes, bits: int, span: int) -> Bytes:
    """Of each `span` bytes, first the lowest `bits` bits of all, then the next, up to the highest."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    spans = packed.reshape(len(packed), -1, 1, span) >> shifts
    return (spans & np.uint8((1 << bits) - 1)).reshape(len(packed), -1)


def single_bits(packed: Bytes) -> Bytes:
    """The bits of each byte, the lowest first."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def signed_codes(values: NDArray[np.int8]) -> Bytes:
    """Numbers from -128 to 127 as 8-bit codes: the code that means zero is 128."""
    return values.view(np.uint8) ^ np.uint8(0x80)  # adding 128 flips the sign bit


def transposed(words: Words, bits: int) -> Words:
    """Exchange fields of each byte with words: field `j` of word `i` becomes field `i` of word `j`, in place.

    Args:
        words: contiguous `[..., n]`; bytes have `n` fields.
        bits: of a field, 8 / n.
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
    """Exchange the bits of `mask` with those `distance` above them, in place."""
    shift = numbers.dtype.type(distance)
    moved = numbers >> shift
    moved ^= numbers
    moved &= mask
    numbers ^= moved
    moved <<= shift
    numbers ^= moved


_LOW_FIELDS = {4: 0x0F0F0F0F, 2: 0x33333333, 1: 0x55555555}  # by how far the others are moved


def nibble_words(packed: Bytes) -> Words:
    """The codes of 4 bits of bytes `[B, n]` as `[B, n / 8, 2]`: low halves of 8 bytes, and then their high halves.

    Byte `i` of a word holds code `i` in its low half and code `4 + i` in its high half.
    """
    return transposed(_words(packed, -1, 2), 4)


def pair_words(packed: Bytes) -> Words:
    """Codes of 2 bits of bytes `[B, n]` as `[B, n / 16, 4]`, a word for each field of 16 bytes.

    Byte `i` of a word holds codes `i`, `4 + i`, `8 + i` and `12 + i`, the first in its lowest bits.
    """
    return transposed(_words(packed, -1, 4), 2)


def bit_words(packed: Bytes) -> Words:
    """Single bits of bytes `[B, n]` as `[B, n / 32, 8]`, a word for each field of 32 bytes."""
    return transposed(_words(packed, -1, 8), 1)


def bit_words_of_32(packed: Bytes) -> Words:
    """The 32 bits of `[B, 4]` bytes, bit `i` of code `i`, as `bit_words` gives those of a field: `[B, 1]`."""
    found = _words(packed, 1)
    for mask, distance in _CHUNKS_INTO_BYTES:
        swap_bits(found, mask, distance)
    return found


def byte_words(packed: Bytes) -> Words:
    """Bytes `[B, n]` as words, `[B, n / 4]`."""
    return _words(packed, -1)


def _words(packed: Bytes, *shape: int) -> Words:
    """A copy of bytes as words in another shape."""
    return packed.copy(order="C").view("<u4").reshape(len(packed), *shape)


def _index_swap(high: int, low: int) -> tuple[np.uint32, int]:
    """Mask and distance that exchange two bits of the indices of a word's bits."""
    moved = [i for i in range(32) if not i >> high & 1 and i >> low & 1]
    return np.uint32(sum(1 << i for i in moved)), (1 << high) - (1 << low)


# Bit `4 * chunk + byte` becomes bit `8 * byte + chunk`: the five bits of its index turn by two.
_CHUNKS_INTO_BYTES = [_index_swap(*pair) for pair in ((4, 1), (3, 0), (2, 1), (1, 0))]
