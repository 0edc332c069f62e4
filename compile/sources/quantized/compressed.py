"""Matrices of compressed-tensors, which llm-compressor writes: a matrix's arrays show its format.

- `pack-quantized`: `weight_packed` int32 `[N, K * bits / 32]` holds `q + 2^(bits - 1)`; `weight_scale` is `[N, K /
group]`, `weight_zero_point` int32 packed down columns, `weight_g_idx` the group of each input.
- `int-quantized`: `weight` and `weight_zero_point` are int8.
- `float-quantized`, `nvfp4-` and `mxfp4-pack-quantized`: as in `floats.py`, and `weight_global_scale` divides.
- `mxfp8-quantized`: `weight` is E4M3, `weight_scale` the exponent of each 32, plus 127.

A weight is `(q - zero) * scale` (`dequantize` in quantization/lifecycle/forward.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.errors import CorruptSource, UnsupportedTensor

from ..source import TensorInfo
from .floats import fp4_tensor, fp8_tensor
from .grouped import GroupedRows, num_words, order_of_groups, unpacked, whole_spans
from .tensors import FLOATS, WORDS, Array, GroupedTensor, Index, Tensor, group_of, only_number, part

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
)
_BITS = (2, 4, 8)
_INDICES = ("I32", "I64")
_MXFP8_GROUP = 32


@dataclass(frozen=True)
class CompressedTensors:
    """The compressed-tensors format; `bits` are those of all its matrices in the configuration."""

    bits: frozenset[int]
    marker: str = ".weight_scale"
    endings: tuple[str, ...] = (
        ".weight",
        ".weight_packed",
        ".weight_scale",
        ".weight_shape",
        ".weight_zero_point",
        ".weight_g_idx",
        ".weight_global_scale",
    )
    unused: tuple[str, ...] = (
        *(".input_scale", ".input_zero_point", ".input_global_scale", ".input_g_idx"),
        *(".output_scale", ".output_zero_point", ".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point"),
    )

    @classmethod
    def of(cls, label: str, config: Mapping[str, Any]) -> CompressedTensors:
        """Return the format of a `quantization_config`. Raises UnsupportedTensor for an unsupported layout."""
        groups = config.get("config_groups")
        groups = (
            [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
        )
        for layout in (config.get("format"), *(group.get("format") for group in groups)):
            if layout is not None and layout not in FORMATS:
                raise UnsupportedTensor(
                    f"{label}: compressed-tensors' format {layout!r} is not read, only {', '.join(FORMATS)}; "
                    "take such a checkpoint, or a GGUF file of the same model"
                )
        sparsity = config.get("sparsity_config")
        if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
            raise UnsupportedTensor(
                f"{label}: compressed-tensors' sparsity format {sparsity.get('format')!r} is not read; "
                "take a checkpoint that is not sparse, or a GGUF file of the same model"
            )
        transforms = config.get("transform_config")
        if isinstance(transforms, Mapping) and transforms.get("config_groups"):
            raise UnsupportedTensor(
                f"{label}: compressed-tensors' rotations of activations (transform_config) are not computed; "
                "take a checkpoint without them, or a GGUF file of the same model"
            )
        weights = [group.get("weights") for group in groups]
        return cls(frozenset(entry.get("num_bits", 0) for entry in weights if isinstance(entry, Mapping)))

    def matrix(self, name: str, parts: Mapping[str, Array]) -> Tensor:
        """Return the matrix in the format that its arrays show."""
        scales = parts[".weight_scale"]
        if ".weight_packed" in parts and parts[".weight_packed"].dtype == "U8":
            packed, factor = part(name, parts, ".weight_packed"), None
            if ".weight_global_scale" in parts:
                divisor = only_number(name, parts, ".weight_global_scale")
                if divisor == 0:
                    raise CorruptSource(f"{name}.weight_global_scale is 0, and divides; fetch it again")
                factor = np.float32(1) / divisor
            return fp4_tensor(name, packed, scales, factor)
        if ".weight_packed" in parts:
            return self._packed(name, parts)
        weight = part(name, parts, ".weight")
        if weight.dtype == "I8":
            return self._bytes(name, parts)
        if scales.dtype == "U8":
            return fp8_tensor(name, weight, _Exponents(scales), (1, _MXFP8_GROUP))
        return fp8_tensor(name, weight, scales, (128, 128))

    def _packed(self, name: str, parts: Mapping[str, Array]) -> GroupedTensor:
        """Return the matrix of an array of packed words."""
        words = part(name, parts, ".weight_packed", dtypes=WORDS)
        scales = part(name, parts, ".weight_scale", dtypes=FLOATS)
        num_outputs, num_inputs = (int(size) for size in part(name, parts, ".weight_shape", (2,), dtypes=_INDICES)[:])
        bits = words.shape[-1] * 32 // max(1, num_inputs)
        if words.shape != (num_outputs, num_words(num_inputs, bits)) or bits not in _BITS or bits not in self.bits:
            raise CorruptSource(
                f"{name}: {list(words.shape)} words for {num_outputs} x {num_inputs} values are none of "
                f"{sorted(self.bits)} bits, which the configuration says; fetch it again"
            )
        part(name, parts, ".weight_scale", (num_outputs, scales.shape[1]))
        group, half = _group(name, num_inputs, scales), 1 << bits - 1
        if ".weight_zero_point" in parts:
            part(name, parts, ".weight_zero_point", (num_words(num_outputs, bits), scales.shape[1]), dtypes=WORDS)
        order = None
        if ".weight_g_idx" in parts:
            part(name, parts, ".weight_g_idx", (num_inputs,), dtypes=_INDICES)
        if ".weight_g_idx" in parts and (of_inputs := parts[".weight_g_idx"][:]).min() >= 0:
            order = order_of_groups(f"{name}.weight_g_idx", of_inputs, group)

        def decode(rows: slice) -> GroupedRows:
            codes = unpacked(words[rows], bits, num_inputs)
            zeros = _packed_zeros(parts[".weight_zero_point"], rows, bits) if ".weight_zero_point" in parts else half
            return GroupedRows(
                2 * half - 1, codes if order is None else codes[:, order], scales[rows], zeros, None, order
            )

        return GroupedTensor(name, TensorInfo((num_outputs, num_inputs), f"CT_{bits}"), decode)

    def _bytes(self, name: str, parts: Mapping[str, Array]) -> GroupedTensor:
        """Return the matrix of an array of int8."""
        weight, scales = parts[".weight"], parts[".weight_scale"]
        part(name, parts, ".weight_scale", scales.shape, dtypes=FLOATS)
        by_row = len(scales.shape) == 2
        if by_row:
            part(name, parts, ".weight_scale", (weight.shape[0], scales.shape[1]))
            _group(name, weight.shape[1], scales)
        elif scales.shape not in ((), (1,)):
            raise CorruptSource(f"{name} has scales of shape {list(scales.shape)}, not one or some for each row")
        zero_points = parts.get(".weight_zero_point")
        if zero_points is not None:
            part(name, parts, ".weight_zero_point", scales.shape, dtypes=("I8",))

        def of_rows(array: Array, rows: slice) -> NDArray[Any]:
            return array[rows] if by_row else np.broadcast_to(array[:].reshape(1, 1), (rows.stop - rows.start, 1))

        def decode(rows: slice) -> GroupedRows:
            codes = weight[rows].view(np.uint8) ^ np.uint8(0x80)
            zeros = 128 if zero_points is None else of_rows(zero_points, rows).astype(np.int16) + np.int16(128)
            return GroupedRows(255, codes, of_rows(scales, rows), zeros)

        return GroupedTensor(name, TensorInfo(weight.shape, "CT_8"), decode)


@dataclass(frozen=True)
class _Exponents:
    """Bytes that are exponents of powers of two."""

    array: Array

    @property
    def dtype(self) -> str:
        return "F8_E8M0"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def __getitem__(self, index: Index) -> NDArray[Any]:
        return np.ascontiguousarray(self.array[index]).view(ml_dtypes.float8_e8m0fnu)


def _group(name: str, num_inputs: int, scales: Array) -> int:
    """Return the group size that the scales imply."""
    return group_of(name, num_inputs, scales.shape[1], num_inputs // scales.shape[1])


def _packed_zeros(array: Array, rows: slice, bits: int) -> NDArray[np.uint8]:
    """Return the zeros of `rows`, `[rows, groups]`, from words that hold one group's zeros of several rows."""
    span = whole_spans(rows, rows.stop)
    words = array[slice(span.start * bits // 32, num_words(span.stop, bits))]
    return unpacked(words.T, bits, span.stop - span.start).T[rows.start - span.start :]
