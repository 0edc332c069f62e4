"""Weights brought into kernel layout, and how many bytes they take there. Knows `layout.py`'s shapes, no files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .codes import CODES
from .kinds import DTYPES, SUPER_GROUP, WeightKind
from .layout import CHUNK, CHUNKS, GROUP, ROW_BLOCK, round_up
from .quantization import Weight, WeightPlanes

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class PackedShape:
    """Bytes of each array that `pack` makes of `num_outputs` x `num_inputs` weights (0: there is none)."""

    codes: int
    scales: int
    offsets: int


def padded_inputs(kind: WeightKind, num_inputs: int) -> int:
    """Inputs of the packed matrix."""
    return round_up(num_inputs, GROUP) if kind.is_quantized else num_inputs


def packed_shape(kind: WeightKind, num_outputs: int, num_inputs: int) -> PackedShape:
    """How many bytes a matrix takes in kernel layout."""
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
    """`weight`, `[N, K]`, in kernel layout."""
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
    """The same as `pack`, of codes that need only their rows side by side: one copy of every plane."""
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
    codes = words.view(np.uint8).reshape(blocks, groups, -1)
    if kind.is_nested:
        scales = _nest(weight.scales, weight.sub_scales, num_inputs)
        return PackedWeight(codes, scales, _nest(weight.minima, weight.sub_minima, num_inputs))
    num_scales = num_inputs // kind.group
    return PackedWeight(codes, _by_block(weight.scales, num_scales), _by_block(weight.minima, num_scales))


def _padded(matrix: npt.NDArray[Any], outputs: int, inputs: int) -> npt.NDArray[Any]:
    pad = [(0, round_up(size, multiple) - size) for size, multiple in zip(matrix.shape, (outputs, inputs), strict=True)]
    return matrix if pad == [(0, 0), (0, 0)] else np.pad(matrix, pad)


def _by_block(numbers: npt.NDArray[Any] | None, groups: int) -> npt.NDArray[Any] | None:
    """`[N, K / group]` as `[block, groups, 16]`, padded with zeros."""
    if numbers is None:
        return None
    blocks = round_up(numbers.shape[0], ROW_BLOCK) // ROW_BLOCK
    padded = np.zeros((blocks * ROW_BLOCK, groups), numbers.dtype)
    padded[: numbers.shape[0], : numbers.shape[1]] = numbers
    return np.ascontiguousarray(padded.reshape(blocks, ROW_BLOCK, -1).swapaxes(1, 2))


def _nest(outer: npt.NDArray[Any] | None, inner: npt.NDArray[Any] | None, inputs: int) -> Bytes | None:
    """Bytes `[block, K/256, ...]`: 16 float16, and then 16 int8 for each of the groups."""
    if outer is None or inner is None:
        return None
    supers, num_groups = inputs // SUPER_GROUP, inner.shape[1]
    of_supers, of_groups = _by_block(outer, supers), _by_block(inner, num_groups)
    assert of_supers is not None and of_groups is not None
    shape = (len(of_supers), supers, -1)
    return np.concatenate([of_supers.view(np.uint8).reshape(shape), of_groups.view(np.uint8).reshape(shape)], axis=-1)
