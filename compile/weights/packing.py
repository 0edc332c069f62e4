"""Weights brought into kernel layout, and how many bytes they take there. Knows `layout.py`'s shapes, no files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .codes import CODES
from .layout import CHUNKS, GROUP, ROW_BLOCK, round_up
from .quantization import DTYPES, Weight, WeightKind


@dataclass(frozen=True)
class PackedShape:
    """Bytes of each array that `pack` makes of `num_outputs` x `num_inputs` weights (0: there is none)."""

    codes: int
    scales: int
    minima: int


def padded_inputs(kind: WeightKind, num_inputs: int) -> int:
    """Inputs of the packed matrix."""
    return round_up(num_inputs, GROUP) if kind.is_quantized else num_inputs


def packed_shape(kind: WeightKind, num_outputs: int, num_inputs: int) -> PackedShape:
    """How many bytes a matrix takes in kernel layout."""
    outputs, inputs = round_up(num_outputs, ROW_BLOCK), padded_inputs(kind, num_inputs)
    if not kind.is_quantized:
        return PackedShape(outputs * inputs * DTYPES[kind.name].itemsize, 0, 0)
    codes = outputs // ROW_BLOCK * (inputs // GROUP) * CODES[kind.name].group_bytes
    scales = outputs * (inputs // kind.group) * 2
    return PackedShape(codes, scales, scales if kind.has_minimum else 0)


@dataclass(frozen=True)
class PackedWeight:
    """Whole blocks in kernel layout; blocks are outermost, so that parts of a matrix can be packed one by one."""

    codes: npt.NDArray[np.generic]
    scales: npt.NDArray[np.float16] | None
    minima: npt.NDArray[np.float16] | None


def pack(weight: Weight) -> PackedWeight:
    """`weight`, `[N, K]`, in kernel layout."""
    kind = weight.kind
    codes = _padded(weight.codes, ROW_BLOCK, GROUP if kind.is_quantized else 1)
    blocks, inputs = codes.shape[0] // ROW_BLOCK, codes.shape[1]
    if not kind.is_quantized:
        return PackedWeight(np.ascontiguousarray(codes.reshape(blocks, ROW_BLOCK, inputs).swapaxes(1, 2)), None, None)
    chunks = codes.reshape(blocks, ROW_BLOCK, inputs // GROUP, CHUNKS, GROUP // CHUNKS).transpose(0, 2, 3, 1, 4)
    return PackedWeight(
        np.ascontiguousarray(CODES[kind.name].pack(chunks)),
        _pack_scales(weight.scales, inputs, kind),
        _pack_scales(weight.minima, inputs, kind),
    )


def _padded(matrix: npt.NDArray[Any], outputs: int, inputs: int) -> npt.NDArray[Any]:
    pad = [(0, round_up(size, multiple) - size) for size, multiple in zip(matrix.shape, (outputs, inputs), strict=True)]
    return matrix if pad == [(0, 0), (0, 0)] else np.pad(matrix, pad)


def _pack_scales(
    scales: npt.NDArray[np.float16] | None, inputs: int, kind: WeightKind
) -> npt.NDArray[np.float16] | None:
    if scales is None:
        return None
    blocks = round_up(scales.shape[0], ROW_BLOCK) // ROW_BLOCK
    padded = np.zeros((blocks * ROW_BLOCK, inputs // kind.group), np.float16)
    padded[: scales.shape[0], : scales.shape[1]] = scales
    return np.ascontiguousarray(padded.reshape(blocks, ROW_BLOCK, -1).swapaxes(1, 2))
