"""Matrices of 8-bit floats with a scale for all, for each row, or for each block of rows and inputs.

DeepSeek and Qwen have blocks of 128 x 128 (`weight_scale_inv`, which multiplies: transformers' integrations/
finegrained_fp8.py); compressed-tensors has any of the three (`weight_scale`). No kernel of integers holds such numbers,
whose largest is 2^17 times the smallest, so that a matrix is rounded to 8-bit codes with a scale for each 32 of a row:
by at most 0.4 % of a group's largest value, where E4M3 itself rounds each value by up to 6 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from radixlm.runtime.errors import CorruptSource

from ...weights.quantization import Float32
from ..source import TensorInfo
from .tensors import FLOATS, Array, RoundedTensor, part

TYPES = ("F8_E4M3", "F8_E5M2")
SCALE_TYPES = (*FLOATS, "F8_E8M0")


@dataclass(frozen=True)
class FP8:
    """The format; `marker` is how the scales' names end, `block` the rows and inputs of a block."""

    marker: str = ".weight_scale_inv"
    block: tuple[int, int] = (128, 128)
    unused: tuple[str, ...] = (".input_scale", ".input_scale_ub", ".activation_scale", ".k_scale", ".v_scale")

    @property
    def endings(self) -> tuple[str, ...]:
        return (".weight", self.marker)

    def matrix(self, name: str, parts: Mapping[str, Array]) -> RoundedTensor:
        return fp8_tensor(name, part(name, parts, ".weight"), parts[self.marker], self.block)


def fp8_tensor(name: str, weight: Array, scales: Array, block: tuple[int, int]) -> RoundedTensor:
    """The matrix; `scales` are `[]` or `[1]`, `[N]` or `[N, 1]`, or one for each block."""
    num_rows, num_inputs = weight.shape
    blocks = (-(-num_rows // block[0]), -(-num_inputs // block[1]))
    if weight.dtype not in TYPES:
        raise CorruptSource(f"{name}.weight is stored as {weight.dtype}, the scales beside it ask for {TYPES[0]}")
    if scales.dtype not in SCALE_TYPES:
        raise CorruptSource(f"{name} has scales stored as {scales.dtype}, not as {' or '.join(SCALE_TYPES)}")
    if scales.shape in ((), (1,), (1, 1)):
        height, width = num_rows, num_inputs
    elif scales.shape in ((num_rows,), (num_rows, 1)):
        height, width = 1, num_inputs
    elif scales.shape == blocks:
        height, width = block
    else:
        raise CorruptSource(
            f"{name} has scales of shape {list(scales.shape)}, {list(weight.shape)} in blocks of {list(block)} asks "
            f"for {list(blocks)}; fetch it again"
        )

    def decode(rows: slice) -> Float32:
        factors = np.asarray(scales[:], np.float32).reshape(-(-num_rows // height), -1)
        of_rows = factors[np.arange(rows.start, rows.stop) // height].repeat(width, axis=1)[:, :num_inputs]
        values: Float32 = weight[rows].astype(np.float32) * of_rows
        return values

    return RoundedTensor(name, TensorInfo((num_rows, num_inputs), weight.dtype), decode)
