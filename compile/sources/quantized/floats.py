"""Matrices of floats of 4 and 8 bits: MXFP4, NVFP4, gpt-oss's blocks of the former, and E4M3 with scales.

Of E2M1, two numbers lie in a byte, the even one in the low half. MXFP4 has for each 32 a power of two (E8M0), NVFP4 for
each 16 an 8-bit float (E4M3). Sources: OCP Microscaling Formats 1.0; `_convert_moe_packed_tensors` in transformers'
integrations/mxfp4.py.

Matrices of 8-bit floats have a scale for all, for each row, or for each block of rows and inputs. DeepSeek and Qwen
have blocks of 128 x 128 (`weight_scale_inv`, which multiplies: transformers' integrations/finegrained_fp8.py);
compressed-tensors has any of the three (`weight_scale`). No kernel of integers holds such numbers, whose largest is
2^17 times the smallest, so that a matrix is rounded to 8-bit codes with a scale for each 32 of a row: by at most 0.4 %
of a group's largest value, where E4M3 itself rounds each value by up to 6 %.
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
from .tensors import FLOATS, Array, GroupedTensor, RoundedTensor, Stacked, only_number, part

_GROUPS = {32: "MXFP4", 16: "NVFP4"}
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_SIGNED = np.concatenate([_VALUES, -_VALUES])
_NOT_A_NUMBER = {32: 255, 16: 127}  # and all above: scales have no sign


@dataclass(frozen=True)
class FP4Rows:
    """Rows of codes uint8 `[N, K]` with their scales' bytes `[N, K / group]`, times `factor` where there is one.

    Groups of 32 have powers of two, groups of 16 have E4M3.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    factor: np.float32 | None = None

    @property
    def group(self) -> int:
        """Values that share a scale."""
        return int(self.codes.shape[1] // self.scales.shape[1])

    def values(self) -> Float32:
        """float32 `[N, K]`: the formula of the format."""
        groups: Float32 = _SIGNED[self.codes].reshape(*self.scales.shape, self.group) * self._scale_values()[..., None]
        return (groups if self.factor is None else groups * self.factor).reshape(self.codes.shape)

    def weight(self) -> Weight:
        """The same as the kernels hold it: exact, but that a scale times `factor` is rounded to float16.

        Levels are twice the values, so that scales are half; a power of two below 2**-126 becomes 0.
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
        if self.group == 32:
            return np.ldexp(np.float32(1), self.scales.astype(np.int32) - 127)
        values: Float32 = self.scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return values


def fp4_tensor(name: str, data: Array, scales: Array, factor: np.float32 | None = None) -> GroupedTensor:
    """A matrix whose rows are `data`, bytes `[N, K / 2]` or words `[N, K / 8]`, and `scales` `[N, K / group]`."""
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
    """gpt-oss's experts: bytes `NAME_blocks` `[experts, rows, K / 32, 16]` and `NAME_scales` `[experts, rows, K / 32]`.

    The matrix is `[experts * rows, K]`: the experts' rows one after another.
    """

    marker: str = "_blocks"
    endings: tuple[str, ...] = ("_blocks", "_scales")
    unused: tuple[str, ...] = ()

    def matrix(self, name: str, parts: Mapping[str, Array]) -> GroupedTensor:
        blocks = part(name, parts, "_blocks", ndim=4, dtypes=("U8",))
        part(name, parts, "_blocks", (*blocks.shape[:3], 16))
        part(name, parts, "_scales", blocks.shape[:3], dtypes=("U8",))
        num_experts, num_rows, groups, _ = blocks.shape
        data = Stacked(blocks, (num_experts * num_rows, groups * 16))
        return fp4_tensor(name, data, Stacked(parts["_scales"], (num_experts * num_rows, groups)))


@dataclass(frozen=True)
class ModelOptFP4:
    """NVFP4 as ModelOpt writes it: `weight` bytes, `weight_scale` E4M3, and `weight_scale_2`, which multiplies all."""

    marker: str = ".weight_scale_2"
    endings: tuple[str, ...] = (".weight", ".weight_scale", ".weight_scale_2")
    unused: tuple[str, ...] = (".input_scale", ".k_scale", ".v_scale")

    def matrix(self, name: str, parts: Mapping[str, Array]) -> GroupedTensor:
        data = part(name, parts, ".weight", dtypes=("U8",))
        scales = part(name, parts, ".weight_scale", dtypes=("F8_E4M3",))
        return fp4_tensor(name, data, scales, only_number(name, parts, ".weight_scale_2"))


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
