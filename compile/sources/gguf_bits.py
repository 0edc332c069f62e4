"""How ggml lays numbers of a few bits into bytes. Knows no type of block.

Blocks are uint8 `[B, bytes of a block]`; what comes out of them keeps the first axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Half = NDArray[np.float16]


@dataclass(frozen=True)
class Parts:
    """What a function that unpacks blocks finds in them, `[B, ...]`: `Weight`'s arrays, floats still to be rounded."""

    codes: Bytes
    scales: NDArray[Any]
    minima: NDArray[Any] | None = None
    sub_scales: NDArray[Any] | None = None
    sub_minima: NDArray[Any] | None = None


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
