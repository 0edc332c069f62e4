"""Weights read back from kernel layout: the inverse of `packing.py`, written by itself so that it can disagree.

Follows `layout.py`. Takes whole blocks of 16 outputs, as uint8 `[blocks, bytes of a block]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .kinds import DTYPES, SUPER_GROUP, TABLES, CodesName, WeightKind
from .layout import CHUNK, CHUNKS, GROUP, ROW_BLOCK
from .quantization import Float32, WeightPlanes, scale_values

Bytes = NDArray[np.uint8]

_CODE_BYTES = CHUNK // ROW_BLOCK  # of a chunk, one output's
_WIDTHS: dict[CodesName, tuple[int, ...]] = {  # bits of each plane
    "q2": (2,),
    "q3": (2, 1),
    "q4": (4,),
    "q5": (4, 1),
    "q6": (4, 2),
    "q8": (8,),
    "fp4": (4,),
    "iq4": (4,),
}


@dataclass(frozen=True)
class Blocks:
    """Some blocks of a matrix as a file holds them; `scales` and `offsets` are empty if there are none."""

    kind: WeightKind
    codes: Bytes
    scales: Bytes
    offsets: Bytes

    def values(self, lane: int, num_inputs: int) -> Float32:
        """What output `lane` of each block is worth, `[blocks, num_inputs]`, inputs in stored order."""
        kind = self.kind
        if not kind.is_quantized:
            plain: NDArray[Any] = self.codes.view(DTYPES[kind.codes]).reshape(len(self.codes), -1, ROW_BLOCK)
            return plain[:, :num_inputs, lane].astype(np.float32)
        levels = self._levels(lane).astype(np.float32)
        groups = levels.reshape(len(levels), -1)[:, :num_inputs].reshape(len(levels), -1, kind.group)
        groups = groups - np.float32(kind.zero)
        if kind.has_zeros:
            zeros = self.offsets.reshape(len(self.codes), -1, ROW_BLOCK)[:, :, lane]
            groups = groups - zeros.astype(np.float32)[..., None]
        values = groups * self._scales(self.scales, lane)
        if kind.has_minimum:
            values = values + self._scales(self.offsets, lane)
        return values.reshape(len(values), num_inputs)

    def hold(self, weight: WeightPlanes) -> bool:
        """Whether the outputs are those of `weight`, bit for bit, from the first one on."""
        first, words = 0, self._words().view(np.uint32)[..., 0]  # [blocks, groups, words, outputs]
        for width, plane in zip(_WIDTHS[self.kind.codes], weight.planes, strict=True):
            stored = words[:, :, first : first + width].reshape(len(words), *plane.shape[1:], ROW_BLOCK)
            if not all((ours == theirs).all() for ours, theirs in _by_outputs(plane, stored)):
                return False
            first += width
        outer, inner = self._rows(self.scales, weight.num_rows)
        if not (_are_equal(outer, weight.scales) and _are_equal(inner, weight.sub_scales)):
            return False
        if not self.kind.has_minimum:
            return True
        outer, inner = self._rows(self.offsets, weight.num_rows)
        return _are_equal(outer, weight.minima) and _are_equal(inner, weight.sub_minima)

    def _words(self) -> Bytes:
        """Codes as `[blocks, K / 32, words, 16 outputs, 4]`."""
        words = sum(_WIDTHS[self.kind.codes])
        return self.codes.reshape(len(self.codes), -1, words, ROW_BLOCK, _CODE_BYTES)

    def _levels(self, lane: int) -> Bytes:
        """Of one output of each block, `[blocks, K / 32, 32]`."""
        words = self._words()[:, :, :, lane]
        codes = np.zeros((*words.shape[:2], CHUNKS, _CODE_BYTES), np.uint8)
        first, low = 0, 0
        for width in _WIDTHS[self.kind.codes]:
            for chunk in range(CHUNKS):
                word, field = divmod(chunk, 8 // width)
                bits = words[:, :, first + word] >> np.uint8(field * width) & np.uint8((1 << width) - 1)
                codes[:, :, chunk] |= bits << np.uint8(low)
            first, low = first + width, low + width
        levels = codes.reshape(*words.shape[:2], GROUP)
        return np.array(TABLES[self.kind.codes], np.uint8)[levels] if self.kind.codes in TABLES else levels

    def _scales(self, stored: Bytes, lane: int) -> Float32:
        """Of one output of each block: what multiplies each group, `[blocks, groups, 1]`."""
        outer, inner = self._by_block(stored)
        numbers = scale_values(self.kind, outer[:, :, lane])
        if inner is not None:
            numbers = numbers[:, :, None] * inner[..., lane].astype(np.float32)
        return numbers.reshape(len(numbers), -1)[..., None]

    def _rows(self, stored: Bytes, num_rows: int) -> tuple[NDArray[Any], NDArray[np.int8] | None]:
        """Scales, and nested ones of groups, by rows: `[num_rows, ...]`."""
        outer, inner = self._by_block(stored)
        by_row = outer.swapaxes(1, 2).reshape(-1, outer.shape[1])[:num_rows]
        if inner is None:
            return by_row, None
        of_groups = np.moveaxis(inner, -1, 1)
        return by_row, of_groups.reshape(-1, of_groups.shape[2] * of_groups.shape[3])[:num_rows]

    def _by_block(self, stored: Bytes) -> tuple[NDArray[Any], NDArray[np.int8] | None]:
        """Scales `[blocks, n, 16]`; nested ones of groups `[blocks, n, groups, 16]`, or None."""
        assert self.kind.scales is not None
        num_blocks = len(stored)
        if not self.kind.is_nested:
            dtype = np.float16 if self.kind.scales.dtype == "f16" else np.uint8
            return stored.view(dtype).reshape(num_blocks, -1, ROW_BLOCK), None
        groups = SUPER_GROUP // self.kind.group
        records = stored.reshape(num_blocks, -1, (2 + groups) * ROW_BLOCK)
        outer = np.ascontiguousarray(records[:, :, : 2 * ROW_BLOCK]).view(np.float16)
        inner = records[:, :, 2 * ROW_BLOCK :].reshape(num_blocks, -1, groups, ROW_BLOCK)
        return outer, inner.view(np.int8)


def _by_outputs(plane: NDArray[np.uint32], stored: NDArray[np.uint32]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Rows of a plane beside the outputs of blocks: those of whole blocks, and then the rest."""
    whole, rest = divmod(len(plane), ROW_BLOCK)
    blocks = plane[: whole * ROW_BLOCK].reshape(whole, ROW_BLOCK, *plane.shape[1:])
    yield np.moveaxis(blocks, 1, -1), stored[:whole]
    yield np.moveaxis(plane[None, whole * ROW_BLOCK :], 1, -1), stored[whole:, ..., :rest]


def _are_equal(ours: NDArray[Any] | None, theirs: NDArray[Any] | None) -> bool:
    """Whether two have the same bits."""
    if ours is None or theirs is None:
        return ours is theirs
    ours, theirs = np.ascontiguousarray(ours), np.ascontiguousarray(theirs)
    return np.array_equal(ours.view(np.uint8), theirs.view(np.uint8))
