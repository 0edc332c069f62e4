"""Numbers of 4 bits with an exponent (E2M1): MXFP4 and NVFP4, and gpt-oss's blocks of the former.

Two numbers a byte, the even one in the low half. MXFP4 has for each 32 a power of two (E8M0), NVFP4 for each 16
an 8-bit float (E4M3). Sources: OCP Microscaling Formats 1.0; `_convert_moe_packed_tensors` in transformers'
integrations/mxfp4.py.
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
from .tensors import Array, GroupedTensor, Stacked, only_number, part

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
