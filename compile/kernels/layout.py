"""How weights lie in memory for the kernels, and how to bring them there.

A block is 16 outputs. Integer codes: `[block, K/32, chunk, 64]`, where a chunk's 64 bytes are 16 outputs times 4
neighbouring inputs; in 4 bits, a byte holds chunk 2j in its low and chunk 2j+1 in its high half. Scales and minima:
`[block, K/group, 16]`. Floats: `[block, K, 16]`. Outputs are padded to blocks and inputs to groups with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..quantization import Weight, WeightKind

ROW_BLOCK = 16
GROUP = 32  # activations are quantized in groups of 32 inputs, whatever the weights' group
ALIGNMENT = 64


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class LinearSpec:
    """All that a linear kernel is specialized to. Sizes are padded; `column` and `y_stride` place the output.

    `wide` tells an integer kernel that activations come in 16 bits (see `quantized_rows.py`).
    """

    kind: WeightKind
    num_outputs: int
    num_inputs: int
    y_stride: int
    column: int = 0
    has_bias: bool = False
    add_to_output: bool = False
    wide: bool = False


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
        return PackedShape(outputs * inputs * (4 if kind.name == "f32" else 2), 0, 0)
    codes = outputs * inputs // (2 if kind.name == "q4" else 1)
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
    chunks = codes.reshape(blocks, ROW_BLOCK, inputs // GROUP, 8, 4).transpose(0, 2, 3, 1, 4)
    if kind.name == "q4":
        chunks = chunks[:, :, 0::2] + chunks[:, :, 1::2] * np.uint8(16)
    return PackedWeight(
        np.ascontiguousarray(chunks),
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
