"""Pack weights into kernel layout, size them there, and read them back.

Reading is written independently of packing, so that it can detect errors of it. It takes whole blocks of 16 outputs, as
uint8 `[blocks, bytes of a block]`. Knows `layout.py`'s shapes, no files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .codes import CODES
from .kinds import DTYPES, SUPER_GROUP, TABLES, CodesName, WeightKind
from .layout import CHUNK, CHUNKS, GROUP, ROW_BLOCK, round_up
from .quantization import Float32, Weight, WeightPlanes, scale_values

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class PackedShape:
    """Sizes in bytes of the arrays that `pack` makes of a matrix; 0 if there is no such array."""

    codes: int
    scales: int
    offsets: int


def padded_inputs(kind: WeightKind, num_inputs: int) -> int:
    """Return the number of inputs of the packed matrix."""
    return round_up(num_inputs, GROUP) if kind.is_quantized else num_inputs


def packed_shape(kind: WeightKind, num_outputs: int, num_inputs: int) -> PackedShape:
    """Return the sizes in bytes of a matrix in kernel layout."""
    outputs, inputs = round_up(num_outputs, ROW_BLOCK), padded_inputs(kind, num_inputs)
    if kind.scales is None:
        return PackedShape(outputs * inputs * DTYPES[kind.codes].itemsize, 0, 0)
    codes = outputs // ROW_BLOCK * (inputs // GROUP) * CODES[kind.codes].group_bytes
    groups = -(-inputs // kind.group)
    if kind.is_nested:
        scales = outputs * (groups + inputs // SUPER_GROUP * 2)
        return PackedShape(codes, scales, scales if kind.has_minimum else 0)
    offsets = groups * outputs * (2 if kind.has_minimum else 1 if kind.has_zeros else 0)
    return PackedShape(codes, outputs * groups * (2 if kind.scales.dtype == "f16" else 1), offsets)


@dataclass(frozen=True)
class PackedWeight:
    """Whole blocks in kernel layout; blocks are outermost, so that parts of a matrix can be packed one by one.

    `offsets` are minima or integer zeros.
    """

    codes: npt.NDArray[np.generic]
    scales: npt.NDArray[np.generic] | None
    offsets: npt.NDArray[np.generic] | None


def pack(weight: Weight) -> PackedWeight:
    """Return `weight`, `[N, K]`, in kernel layout."""
    kind = weight.kind
    codes = _padded(weight.codes, ROW_BLOCK, GROUP if kind.is_quantized else 1)
    blocks, inputs = codes.shape[0] // ROW_BLOCK, codes.shape[1]
    if not kind.is_quantized:
        return PackedWeight(np.ascontiguousarray(codes.reshape(blocks, ROW_BLOCK, inputs).swapaxes(1, 2)), None, None)
    chunks = codes.reshape(blocks, ROW_BLOCK, inputs // GROUP, CHUNKS, GROUP // CHUNKS).transpose(0, 2, 3, 1, 4)
    packed = np.ascontiguousarray(CODES[kind.codes].pack(chunks))
    if kind.is_nested:
        assert inputs % SUPER_GROUP == 0, f"rows of {inputs} values are not whole groups of {SUPER_GROUP}"
        return PackedWeight(
            packed, _nest(weight.scales, weight.sub_scales, inputs), _nest(weight.minima, weight.sub_minima, inputs)
        )
    groups = -(-inputs // kind.group)
    offsets = weight.minima if kind.has_minimum else weight.zeros
    return PackedWeight(packed, _by_block(weight.scales, groups), _by_block(offsets, groups))


def pack_planes(weight: WeightPlanes, num_inputs: int) -> PackedWeight:
    """Return the same as `pack` for codes that are already in planes: one copy of every plane."""
    kind, groups = weight.kind, num_inputs // GROUP
    blocks = round_up(weight.num_rows, ROW_BLOCK) // ROW_BLOCK
    whole = weight.num_rows // ROW_BLOCK
    words = np.empty((blocks, groups, CODES[kind.codes].group_bytes // CHUNK, ROW_BLOCK), np.uint32)
    words[whole:] = 0
    first = 0
    for plane in weight.planes:
        last = first + plane[0].size // groups
        shape = (blocks, *plane.shape[1:], ROW_BLOCK)
        stored = words[:, :, first:last].reshape(shape)
        assert np.may_share_memory(stored, words), f"a plane of {shape} cuts through groups of words"
        in_blocks = plane[: whole * ROW_BLOCK].reshape(whole, ROW_BLOCK, *plane.shape[1:])
        stored[:whole] = np.moveaxis(in_blocks, 1, -1)
        stored[whole:, ..., : weight.num_rows % ROW_BLOCK] = np.moveaxis(plane[None, whole * ROW_BLOCK :], 1, -1)
        first = last
    if len(weight.planes) > 1:
        words = words[:, :, np.argsort(CODES[kind.codes].lines)]
    codes = words.view(np.uint8).reshape(blocks, groups, -1)
    if kind.is_nested:
        scales = _nest(weight.scales, weight.sub_scales, num_inputs)
        return PackedWeight(codes, scales, _nest(weight.minima, weight.sub_minima, num_inputs))
    num_scales = num_inputs // kind.group
    return PackedWeight(codes, _by_block(weight.scales, num_scales), _by_block(weight.minima, num_scales))


def _padded(matrix: npt.NDArray[Any], outputs: int, inputs: int) -> npt.NDArray[Any]:
    """Return a matrix padded with zeros to multiples of `outputs` and `inputs`."""
    pad = [(0, round_up(size, multiple) - size) for size, multiple in zip(matrix.shape, (outputs, inputs), strict=True)]
    return matrix if pad == [(0, 0), (0, 0)] else np.pad(matrix, pad)


def _by_block(numbers: npt.NDArray[Any] | None, groups: int) -> npt.NDArray[Any] | None:
    """Return `[N, K / group]` as `[block, groups, 16]`, padded with zeros."""
    if numbers is None:
        return None
    blocks = round_up(numbers.shape[0], ROW_BLOCK) // ROW_BLOCK
    padded = np.zeros((blocks * ROW_BLOCK, groups), numbers.dtype)
    padded[: numbers.shape[0], : numbers.shape[1]] = numbers
    return np.ascontiguousarray(padded.reshape(blocks, ROW_BLOCK, -1).swapaxes(1, 2))


def _nest(outer: npt.NDArray[Any] | None, inner: npt.NDArray[Any] | None, inputs: int) -> Bytes | None:
    """Return bytes `[block, K/256, ...]`: 16 float16, then 16 int8 for each of the groups."""
    if outer is None or inner is None:
        return None
    supers, num_groups = inputs // SUPER_GROUP, inner.shape[1]
    of_supers, of_groups = _by_block(outer, supers), _by_block(inner, num_groups)
    assert of_supers is not None and of_groups is not None
    shape = (len(of_supers), supers, -1)
    return np.concatenate([of_supers.view(np.uint8).reshape(shape), of_groups.view(np.uint8).reshape(shape)], axis=-1)


_CODE_BYTES = CHUNK // ROW_BLOCK  # bytes of a chunk that belong to one output
# For each word of a group, the index of its plane. A plane has as many words as bits.
_PLANES: dict[CodesName, tuple[int, ...]] = {
    "q2": (0, 0),
    "q3": (0, 1, 0),
    "q4": (0, 0, 0, 0),
    "q5": (0, 1, 0, 0, 0),
    "q6": (0, 1, 0, 0, 1, 0),
    "q8": (0, 0, 0, 0, 0, 0, 0, 0),
    "fp4": (0, 0, 0, 0),
    "iq4": (0, 0, 0, 0),
}


def _widths(codes: CodesName) -> list[int]:
    """Return the bits of each plane."""
    return [_PLANES[codes].count(plane) for plane in range(max(_PLANES[codes]) + 1)]


@dataclass(frozen=True)
class PackedBlocks:
    """Some blocks of a matrix as a file holds them; `scales` and `offsets` are empty if the kind has none."""

    kind: WeightKind
    codes: Bytes
    scales: Bytes
    offsets: Bytes

    def values(self, lane: int, num_inputs: int) -> Float32:
        """Return the weights of output `lane` of each block, `[blocks, num_inputs]`, inputs in stored order."""
        kind = self.kind
        if not kind.is_quantized:
            plain: npt.NDArray[Any] = self.codes.view(DTYPES[kind.codes]).reshape(len(self.codes), -1, ROW_BLOCK)
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
        """Return whether the outputs equal those of `weight`, bit for bit, from the first one on."""
        first, words = 0, self._words().view(np.uint32)[..., 0]  # [blocks, groups, words, outputs]
        for width, plane in zip(_widths(self.kind.codes), weight.planes, strict=True):
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
        """Return codes as `[blocks, K / 32, words, 16 outputs, 4]`, plane by plane."""
        planes = _PLANES[self.kind.codes]
        words = self.codes.reshape(len(self.codes), -1, len(planes), ROW_BLOCK, _CODE_BYTES)
        return words[:, :, np.argsort(planes, kind="stable")] if any(planes) else words

    def _levels(self, lane: int) -> Bytes:
        """Return the levels of one output of each block, `[blocks, K / 32, 32]`."""
        words = self._words()[:, :, :, lane]
        codes = np.zeros((*words.shape[:2], CHUNKS, _CODE_BYTES), np.uint8)
        first, low = 0, 0
        for width in _widths(self.kind.codes):
            for chunk in range(CHUNKS):
                word, field = divmod(chunk, 8 // width)
                bits = words[:, :, first + word] >> np.uint8(field * width) & np.uint8((1 << width) - 1)
                codes[:, :, chunk] |= bits << np.uint8(low)
            first, low = first + width, low + width
        levels = codes.reshape(*words.shape[:2], GROUP)
        return np.array(TABLES[self.kind.codes], np.uint8)[levels] if self.kind.codes in TABLES else levels

    def _scales(self, stored: Bytes, lane: int) -> Float32:
        """Return the scale of each group of one output of each block, `[blocks, groups, 1]`."""
        outer, inner = self._by_block(stored)
        numbers = scale_values(self.kind, outer[:, :, lane])
        if inner is not None:
            numbers = numbers[:, :, None] * inner[..., lane].astype(np.float32)
        return numbers.reshape(len(numbers), -1)[..., None]

    def _rows(self, stored: Bytes, num_rows: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int8] | None]:
        """Return scales, and nested ones of groups, by rows: `[num_rows, ...]`."""
        outer, inner = self._by_block(stored)
        by_row = outer.swapaxes(1, 2).reshape(-1, outer.shape[1])[:num_rows]
        if inner is None:
            return by_row, None
        of_groups = np.moveaxis(inner, -1, 1)
        return by_row, of_groups.reshape(-1, of_groups.shape[2] * of_groups.shape[3])[:num_rows]

    def _by_block(self, stored: Bytes) -> tuple[npt.NDArray[Any], npt.NDArray[np.int8] | None]:
        """Return scales `[blocks, n, 16]`; and nested ones of groups `[blocks, n, groups, 16]`, or None."""
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


def _by_outputs(
    plane: npt.NDArray[np.uint32], stored: npt.NDArray[np.uint32]
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Yield rows of a plane paired with outputs of blocks: whole blocks first, then the remaining rows."""
    whole, rest = divmod(len(plane), ROW_BLOCK)
    blocks = plane[: whole * ROW_BLOCK].reshape(whole, ROW_BLOCK, *plane.shape[1:])
    yield np.moveaxis(blocks, 1, -1), stored[:whole]
    yield np.moveaxis(plane[None, whole * ROW_BLOCK :], 1, -1), stored[whole:, ..., :rest]


def _are_equal(ours: npt.NDArray[Any] | None, theirs: npt.NDArray[Any] | None) -> bool:
    """Return whether two arrays, or Nones, have the same bits."""
    if ours is None or theirs is None:
        return ours is theirs
    ours, theirs = np.ascontiguousarray(ours), np.ascontiguousarray(theirs)
    return np.array_equal(ours.view(np.uint8), theirs.view(np.uint8))
