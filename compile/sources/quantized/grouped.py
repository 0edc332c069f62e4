"""Integer codes with a scale for each group of a row, to which most formats of quantized weights are converted.

Knows their values, the kernels' kind for them, and the packing of small integers into words. In all formats a word is
little-endian, and value `i` of a row begins at bit `i * bits` of the row's words. Knows no format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.errors import CorruptSource

from ...weights.kinds import CodesName, Scales, WeightKind
from ...weights.quantization import Float32, Weight

Codes = NDArray[np.uint8]
SPAN = 32  # values that fill whole words of 32 bits, whatever their number of bits


def unpacked(words: NDArray[Any], bits: int, count: int) -> Codes:
    """Return the first `count` values of each row of `words`, integers `[..., W]`, one a byte: `[..., count]`."""
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
    """Return the number of 32-bit words that hold `count` values."""
    return -(-count * bits // 32)


def whole_spans(rows: slice, count: int) -> slice:
    """Return the least span of rows with `rows` that begins and ends at a word, or ends at the last row, `count`."""
    return slice(rows.start // SPAN * SPAN, min(-(-rows.stop // SPAN) * SPAN, count))


_GROUPS = (128, 64, 32, 16)  # group sizes of the kernels; larger ones repeat their scales
_CODES: dict[CodesName, int] = {"q2": 3, "q3": 7, "q4": 15, "q5": 31, "q6": 63, "q8": 255}


@dataclass(frozen=True)
class GroupedRows:
    """Some rows of a matrix: a value is `scale * (code - zero)`, or `scale * code + minimum`.

    `codes`: uint8 `[N, K]`, at most `max_code`.
    `scales`: floats `[N, K / group]`.
    `zeros`: one for all, or integers in the shape of the scales; `minima`: floats in the shape of the scales.
    `input_order`: int32 `[K]`, the model's input that each column multiplies, if the format sorts them; None if column
    `k` is input `k`.
    """

    max_code: int
    codes: Codes
    scales: NDArray[Any]
    zeros: int | NDArray[Any] = 0
    minima: NDArray[Any] | None = None
    input_order: NDArray[np.int32] | None = None

    @property
    def group(self) -> int:
        """Number of values that share a scale."""
        return int(self.codes.shape[1] // self.scales.shape[1])

    def values(self) -> Float32:
        """Return the values, float32 `[N, K]`, inputs in the model's order.

        This is the format's own formula, with nothing rounded to float16.
        """
        groups = self.codes.reshape(*self.scales.shape, self.group).astype(np.float32)
        if isinstance(self.zeros, int):
            groups -= np.float32(self.zeros)
        else:
            groups -= self.zeros.astype(np.float32)[..., None]
        groups *= self.scales.astype(np.float32)[..., None]
        if self.minima is not None:
            groups += self.minima.astype(np.float32)[..., None]
        values = groups.reshape(self.codes.shape)
        return values if self.input_order is None else values[:, np.argsort(self.input_order)]

    def weight(self) -> Weight:
        """Return the weight for kernels: codes are only shifted; scales and minima are rounded to float16."""
        group = next(size for size in _GROUPS if self.group % size == 0)
        name, most = next((name, most) for name, most in _CODES.items() if self.max_code <= most)

        def spread(numbers: NDArray[Any]) -> NDArray[Any]:
            return numbers.repeat(self.group // group, axis=1)

        with np.errstate(over="ignore"):  # the caller refuses infinite scales, naming the tensor
            scales = spread(self.scales.astype(np.float16))
            if self.minima is not None:
                kind = WeightKind(name, Scales(group, "minimum"))
                minima = spread(self.minima.astype(np.float16))
                return Weight(kind, self.codes, scales, minima, input_order=self.input_order)
        kind = WeightKind(name, Scales(group))
        if isinstance(self.zeros, int) and 0 <= kind.zero - self.zeros <= most - self.max_code:
            codes = self.codes + np.uint8(kind.zero - self.zeros)
            return Weight(kind, codes, scales, input_order=self.input_order)
        zeros = np.broadcast_to(np.asarray(self.zeros, np.uint8), self.scales.shape)
        kind = WeightKind(name, Scales(group, "integers"))
        return Weight(kind, self.codes, scales, zeros=spread(zeros), input_order=self.input_order)


def order_of_groups(name: str, groups: NDArray[Any], group: int) -> NDArray[np.int32] | None:
    """Return inputs `[K]` sorted by their group in `groups`, stable within a group; None if they are sorted.

    Raises CorruptSource if a group does not have `group` inputs; `name` is the array's.
    """
    num_groups = len(groups) // group
    # otherwise counting them would take memory for the largest
    is_known = groups.min() >= 0 and groups.max() < num_groups
    if not is_known or (np.bincount(groups, minlength=num_groups) != group).any():
        raise CorruptSource(f"{name} does not put {group} inputs into each of {num_groups} groups; fetch it again")
    if (np.diff(groups) >= 0).all():
        return None
    return np.argsort(groups, kind="stable").astype(np.int32)
