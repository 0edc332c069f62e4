"""Matrices of 4-bit and 8-bit floats: MXFP4, NVFP4, gpt-oss's blocks of MXFP4, and E4M3 with scales.

A byte holds two numbers of E2M1, the even one in the low half. MXFP4 has a power of two (E8M0) for each 32, NVFP4 an
8-bit float (E4M3) for each 16. Sources: OCP Microscaling Formats 1.0; `_convert_moe_packed_tensors` in transformers'
integrations/mxfp4.py.

Matrices of 8-bit floats have one scale, or one for each row, or for each block of rows and inputs. DeepSeek and Qwen
have blocks of 128 x 128 (`weight_scale_inv`, which multiplies: transformers' integrations/finegrained_fp8.py).
compressed-tensors has any of the three (`weight_scale`).

The largest E4M3 number is 2^17 times the smallest, which no integer kernel can hold. Matrices are therefore rounded to
8-bit codes with a scale for each 32 of a row. The error is at most 0.4 % of a group's largest value; E4M3 itself rounds
each value by up to 6 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.errors import CorruptSource, UnsupportedTensor

from ...weights.kinds import Scales, WeightKind
from ...weights.quantization import Float32, Weight
from ..source import TensorInfo
from .grouped import unpacked
from .tensors import FLOATS, Array, GroupedTensor, RequantizedTensor, StackedArray, only_number, part

_GROUPS = {32: "MXFP4", 16: "NVFP4"}
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_SIGNED = np.concatenate([_VALUES, -_VALUES])
_NOT_A_NUMBER = {32: 255, 16: 127}  # this byte and all above are not numbers: scales have no sign


@dataclass(frozen=True)
class FP4Rows:
    """Rows of codes uint8 `[N, K]` with their scales' bytes `[N, K / group]`, times `factor` if it is not None.

    Scales are powers of two for groups of 32, and E4M3 for groups of 16.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    factor: np.float32 | None = None

    @property
    def group(self) -> int:
        """Number of values that share a scale."""
        return int(self.codes.shape[1] // self.scales.shape[1])

    def values(self) -> Float32:
        """Return the values, float32 `[N, K]`, by the formula of the format."""
        groups: Float32 = _SIGNED[self.codes].reshape(*self.scales.shape, self.group) * self._scale_values()[..., None]
        return (groups if self.factor is None else groups * self.factor).reshape(self.codes.shape)

    def weight(self) -> Weight:
        """Return the weight for kernels: exact, except that a scale times `factor` is rounded to float16.

        Levels are twice the values, so scales are half; a power of two below 2**-126 becomes 0.
        """
        if self.factor is not None:
            with np.errstate(over="ignore"):
                halves = (self._scale_values() * self.factor / 2).astype(np.float16)
            return Weight(WeightKind("fp4", Scales(self.group)), self.codes, halves)
        if self.group == 16:
            return Weight(WeightKind("fp4", Scales(16, dtype="e4m3")), self.codes, self.scales)
        lower = self.scales - np.minimum(self.scales, np.uint8(1))
        return Weight(WeightKind("fp4", Scales(32, dtype="e8m0")), self.codes, lower)

    def _scale_values(self) -> Float32:
        """Return the scales as float32."""
        if self.group == 32:
            return np.ldexp(np.float32(1), self.scales.astype(np.int32) - 127)
        values: Float32 = self.scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return values


def fp4_tensor(name: str, data: Array, scales: Array, factor: np.float32 | None = None) -> GroupedTensor:
    """Return a matrix of rows `data`, bytes `[N, K / 2]` or words `[N, K / 8]`, with `scales` `[N, K / group]`."""
    shape = (data.shape[0], data.shape[1] * (8 if data.dtype == "U32" else 2))
    group = shape[1] // max(1, scales.shape[-1]) if scales.shape else 0
    if group not in _GROUPS or scales.shape != (shape[0], shape[1] // group):
        raise UnsupportedTensor(
            f"{name}: scales of shape {list(scales.shape)} for {list(shape)} numbers of 4 bits are neither MXFP4's "
            "(groups of 32) nor NVFP4's (16); take a GGUF file of the same model"
        )

    def decode(rows: slice) -> FP4Rows:
        packed, of_groups = data[rows], scales[rows].view(np.uint8)
        if (of_groups >= _NOT_A_NUMBER[group]).any():
            raise CorruptSource(f"{name} has scales that are no numbers, or negative; fetch it again")
        return FP4Rows(unpacked(packed, 4, shape[1]), of_groups, factor)

    return GroupedTensor(name, TensorInfo(shape, _GROUPS[group]), decode)


@dataclass(frozen=True)
class GptOssBlocks:
    """gpt-oss's experts: `NAME_blocks` `[experts, rows, K / 32, 16]`, `NAME_scales` `[experts, rows, K / 32]`, bytes.

    The matrix is `[experts * rows, K]`: the experts' rows are concatenated.
    """

    marker: str = "_blocks"
    endings: tuple[str, ...] = ("_blocks", "_scales")
    unused: tuple[str, ...] = ()

    def matrix(self, name: str, parts: Mapping[str, Array]) -> GroupedTensor:
        """Return the matrix of all experts."""
        blocks = part(name, parts, "_blocks", ndim=4, dtypes=("U8",))
        part(name, parts, "_blocks", (*blocks.shape[:3], 16))
        part(name, parts, "_scales", blocks.shape[:3], dtypes=("U8",))
        num_experts, num_rows, groups, _ = blocks.shape
        data = StackedArray(blocks, (num_experts * num_rows, groups * 16))
        return fp4_tensor(name, data, StackedArray(parts["_scales"], (num_experts * num_rows, groups)))


@dataclass(frozen=True)
class ModelOptFP4:
    """NVFP4 of ModelOpt: `weight` bytes, `weight_scale` E4M3, and `weight_scale_2`, a factor of the whole matrix."""

    marker: str = ".weight_scale_2"
    endings: tuple[str, ...] = (".weight", ".weight_scale", ".weight_scale_2")
    unused: tuple[str, ...] = (".input_scale", ".k_scale", ".v_scale")

    def matrix(self, name: str, parts: Mapping[str, Array]) -> GroupedTensor:
        """Return the matrix with its factor."""
        data = part(name, parts, ".weight", dtypes=("U8",))
        scales = part(name, parts, ".weight_scale", dtypes=("F8_E4M3",))
        return fp4_tensor(name, data, scales, only_number(name, parts, ".weight_scale_2"))


TYPES = ("F8_E4M3", "F8_E5M2")
SCALE_TYPES = (*FLOATS, "F8_E8M0")


@dataclass(frozen=True)
class FP8:
    """The FP8 format; `marker` is the suffix of the scales' names, `block` the rows and inputs of a block."""

    marker: str = ".weight_scale_inv"
    block: tuple[int, int] = (128, 128)
    unused: tuple[str, ...] = (".input_scale", ".input_scale_ub", ".activation_scale", ".k_scale", ".v_scale")

    @property
    def endings(self) -> tuple[str, ...]:
        return (".weight", self.marker)

    def matrix(self, name: str, parts: Mapping[str, Array]) -> RequantizedTensor:
        """Return the matrix, which is requantized."""
        return fp8_tensor(name, part(name, parts, ".weight"), parts[self.marker], self.block)


def fp8_tensor(name: str, weight: Array, scales: Array, block: tuple[int, int]) -> RequantizedTensor:
    """Return the matrix; `scales` are `[]` or `[1]`, `[N]` or `[N, 1]`, or one for each block."""
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

    return RequantizedTensor(name, TensorInfo((num_rows, num_inputs), weight.dtype), decode)
