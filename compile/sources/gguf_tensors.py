"""The tensors of a GGUF file as weights, under llama.cpp's names and in its row order: `StoredTensors`.

`gguf_file.py` reads the file, `gguf_blocks.py` its blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from radixlm.runtime.errors import CorruptSource, UnsupportedTensor

from ..weights.kinds import Scales, WeightKind
from ..weights.quantization import Float32, Weight, WeightPlanes, scale_values
from ..weights.view import Rows
from .gguf_blocks import BLOCK_TYPES, PLAIN_TYPES, planes_from_blocks, weight_from_blocks
from .gguf_file import NOT_READ, GGUFFile
from .source import TensorInfo


class GGUFTensors:
    """Tensors of `file`, without those that say how others are scaled."""

    def __init__(self, file: GGUFFile) -> None:
        """Raises CorruptSource where a scale of a whole tensor is not one number."""
        self._file = file
        self._factors, self._scales = _whole_tensor_scales(file)

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the file; matrices are `[out, in]`."""
        return {
            name: TensorInfo(tuple(int(n) for n in reversed(tensor.shape)), tensor.tensor_type.name)
            for name, tensor in self._file.tensors.items()
            if name not in self._scales
        }

    def read(self, name: str, rows: Rows) -> Weight:
        """Rows as the kernels can hold them. Raises CorruptSource where scales are not finite."""
        weight = weight_from_blocks(self._type_of(name), self._blocks(name, rows))
        factor = self._factors.get(name)
        if factor is not None and weight.scales is not None:
            with np.errstate(over="ignore"):
                scales = (scale_values(weight.kind, weight.scales) * factor).astype(np.float16)
            kind = WeightKind(weight.kind.codes, Scales(weight.kind.group))
            weight = replace(weight, kind=kind, scales=scales, is_exact=False)
        self._check_scales(name, weight)
        return weight

    def read_planes(self, name: str, rows: Rows) -> WeightPlanes | None:
        """See `StoredTensors`. Raises CorruptSource where scales are not finite."""
        if name in self._factors:
            return None
        planes = planes_from_blocks(self._type_of(name), self._blocks(name, rows))
        if planes is not None:
            self._check_scales(name, planes)
        return planes

    def read_float32(self, name: str, rows: Rows) -> Float32:
        """The same numbers in float32, before any rounding by `read`."""
        values: Float32 = dequantize(self._blocks(name, rows), GGMLQuantizationType[self._type_of(name)])
        factor = self._factors.get(name)
        return values if factor is None else values * factor

    def _check_scales(self, name: str, weight: Weight | WeightPlanes) -> None:
        for parts in (weight.scales, weight.minima):
            if parts is not None and not np.isfinite(parts).all():
                raise CorruptSource(
                    f"{self._file.path}: {name} ({self._type_of(name)}) has scales that are no numbers or larger than "
                    "float16 holds; fetch it again, or take a Q8_0 or F16 file of the same model"
                )

    def check_type(self, name: str) -> None:
        """Raise UnsupportedTensor where a tensor's type cannot be read."""
        type_name, is_vector = self._type_of(name), self._is_vector(name)
        if type_name not in (PLAIN_TYPES if is_vector else BLOCK_TYPES):
            stored = f"is a vector stored as {type_name}" if is_vector else f"is stored as {type_name}"
            raise UnsupportedTensor(f"{self._file.path}: {name} {stored}, {NOT_READ}")

    def _type_of(self, name: str) -> str:
        return str(self._file.tensors[name].tensor_type.name)

    def _is_vector(self, name: str) -> bool:
        return len(self._file.tensors[name].shape) == 1

    def _blocks(self, name: str, rows: Rows) -> NDArray[np.uint8]:
        """Bytes of some rows; a view of the file where these are a slice."""
        blocks = self._file.blocks(name)
        if self._is_vector(name):  # plain values, since `check_type` refuses quantized vectors
            values = blocks.reshape(int(self._file.tensors[name].shape[0]), -1)
            return values[rows].reshape(-1)
        return blocks[rows]


def _whole_tensor_scales(file: GGUFFile) -> tuple[dict[str, np.float32], set[str]]:
    """What multiplies all of an NVFP4 matrix, by its name, and the names of the tensors that say so.

    `blk.0.attn_q.scale` belongs to `blk.0.attn_q.weight`. `input_scale` is for kernels that round activations to 4
    bits, which these do not.
    """
    factors, names = {}, set[str]()
    for name, tensor in file.tensors.items():
        if tensor.tensor_type.name != "NVFP4":
            continue
        stem = name.removesuffix("weight")
        names |= {stem + "scale", stem + "input_scale"}
        scale = file.tensors.get(stem + "scale")
        if scale is None:
            continue
        if scale.tensor_type.name != "F32" or scale.n_elements != 1:
            raise CorruptSource(f"{file.path}: {stem}scale is not one number in F32")
        factors[name] = np.float32(file.blocks(scale.name).view("<f4")[0])
    return factors, names
