"""Integers of a few bits, out of the words that hold them. Knows no format.

In all formats a word is little-endian, and value `i` of a row begins at bit `i * bits` of the row's words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint8]
SPAN = 32  # values that fill whole words of 32 bits, however many bits each has


def unpacked(words: NDArray[Any], bits: int, count: int) -> Codes:
    """The first `count` values of each row of `words`, integers `[..., W]`, one a byte: `[..., count]`."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data[..., :count]
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        values = data[..., None] >> shifts & np.uint8((1 << bits) - 1)
        return values.reshape(*data.shape[:-1], -1)[..., :count]
    digits = np.unpackbits(data, axis=-1, count=count * bits, bitorder="little")
    return np.packbits(digits.reshape(*data.shape[:-1], count, bits), axis=-1, bitorder="little")[..., 0]


def num_words(count: int, bits: int) -> int:
    """Words of 32 bits that hold `count` values."""
    return -(-count * bits // 32)


def whole_spans(rows: slice, count: int) -> slice:
    """The least span of rows that holds `rows`, begins at a word and ends at one, or at the last row, `count`."""
    return slice(rows.start // SPAN * SPAN, min(-(-rows.stop // SPAN) * SPAN, count))
