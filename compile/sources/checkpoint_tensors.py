"""Read the tensors of a checkpoint as weights, under its names: `StoredTensors` for any kind of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.errors import CorruptSource

from ..layers.part_names import hub_name, language_names, parts_of
from ..weights.quantization import Float32, Weight, WeightPlanes
from ..weights.view import RowIndex
from .quantized.tensors import KINDS, Array, Index, PlainTensor, Tensor, TensorRows
from .source import TensorInfo


class CheckpointTensors:
    """The `StoredTensors` of `tensors`. To read rows at intervals, rows in between are read, too, and dropped."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def infos(self) -> Mapping[str, TensorInfo]:
        """Return the type and shape of every tensor."""
        return {name: tensor.info for name, tensor in self._tensors.items()}

    def read(self, name: str, rows: RowIndex) -> Weight:
        """Return rows in a form that kernels can hold."""
        between, chosen = _cover(rows)
        tensor = self._tensors[name]
        if isinstance(tensor, PlainTensor) and len(tensor.array.shape) > 2:
            values = _rows_of_stack(tensor.array, between)[chosen]
            return Weight(KINDS[tensor.array.dtype], values, is_exact=True)
        return _taken(tensor.read(between), chosen)

    def read_planes(self, name: str, rows: RowIndex) -> WeightPlanes | None:
        """Return None, because planes are unknown for these formats."""
        return None

    def read_float32(self, name: str, rows: RowIndex) -> Float32:
        """Return the rows that `read` returns, in float32, and without the rounding that `read` may do."""
        between, chosen = _cover(rows)
        tensor = self._tensors[name]
        if isinstance(tensor, PlainTensor):
            return self.read(name, rows).dequantize()
        return tensor.read_float32(between)[chosen]


def of_language_model(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the language model alone, under names without the prefixes of multimodal models."""
    return {usual: tensors[name] for name, usual in language_names(tensors).items()}


def with_hub_names(tensors: Mapping[str, Tensor], rows: Mapping[str, int]) -> dict[str, Tensor]:
    """Rename tensors of other tools to the hub's names; `rows` are those of the tensors that the model may have."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        usual = hub_name(name, rows)
        found[name if usual in tensors else usual] = tensor
    return found


def separated(tensors: Mapping[str, Tensor], rows: Mapping[str, int]) -> dict[str, Tensor]:
    """Split matrices and biases that a checkpoint stores as one, such as q, k and v; `rows` are those of each part.

    Raises CorruptSource if a tensor does not have all rows of its parts.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = parts_of(name)
        if name in rows or not all(part in rows for part in parts):
            found[name] = tensor
            continue
        start = 0
        for part in parts:
            found[part] = TensorRows(tensor, start, start + rows[part])
            start += rows[part]
        if start != tensor.info.shape[0]:
            raise CorruptSource(f"{name} has {tensor.info.shape[0]} rows, the configuration asks for {start}")
    return found


def reshaped(tensors: Mapping[str, Tensor], transposed: Iterable[str], flat: Iterable[str]) -> dict[str, Tensor]:
    """Transpose stacks that match a pattern of `transposed`, and flatten tensors that match one of `flat`.

    Transposed stacks are named `NAME.weight`, and flat ones become vectors. Raises CorruptSource if a tensor is not a
    stack.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, PlainTensor) and any(fnmatch(name, pattern) for pattern in transposed):
            if len(tensor.array.shape) != 3:
                shape = list(tensor.array.shape)
                raise CorruptSource(f"{name} has shape {shape}, a stack of matrices is expected; fetch it again")
            found[f"{name}.weight"] = PlainTensor(_TransposedStack(tensor.array))
        elif isinstance(tensor, PlainTensor) and any(fnmatch(name, pattern) for pattern in flat):
            found[name] = PlainTensor(_FlatMatrix(tensor.array))
        else:
            found[name] = tensor
    return found


@dataclass(frozen=True)
class _TransposedStack:
    """A stack `[E, K, N]` read as `[E, N, K]`."""

    array: Array

    @property
    def dtype(self) -> str:
        return self.array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        *outer, inputs, outputs = self.array.shape
        return (*outer, outputs, inputs)

    def __getitem__(self, index: Index) -> NDArray[Any]:
        experts, rows = index if isinstance(index, tuple) else (index, slice(None))
        return np.ascontiguousarray(self.array[experts, slice(None), rows].swapaxes(1, 2))


@dataclass(frozen=True)
class _FlatMatrix:
    """A matrix read as a vector, with concatenated rows. It is small, and always read whole."""

    array: Array

    @property
    def dtype(self) -> str:
        return self.array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (prod(self.array.shape),)

    def __getitem__(self, index: Index) -> NDArray[Any]:
        values: NDArray[Any] = self.array[:].reshape(-1)[index]
        return values


def _cover(rows: RowIndex) -> tuple[slice, RowIndex]:
    """Return the range from the first to the last row, and the requested rows relative to it."""
    if isinstance(rows, slice):
        return slice(rows.start, rows.stop), slice(None, None, rows.step)
    first = int(rows.min())
    return slice(first, int(rows.max()) + 1), rows - first


def _taken(weight: Weight, rows: RowIndex) -> Weight:
    """Return the requested rows of a weight."""
    if isinstance(rows, slice) and rows.step in (None, 1):
        return weight
    # `Weight.rows` returns a vector whole; here its numbers are the rows
    return replace(weight, codes=weight.codes[rows]) if weight.codes.ndim == 1 else weight.rows(rows)


def _rows_of_stack(stack: Array, rows: slice) -> NDArray[Any]:
    """Return rows of a stack `[E, N, K]`, which counts as `E * N` rows."""
    size = prod(stack.shape[1:-1])
    parts = []
    for index in range(rows.start // size, -(-rows.stop // size)):
        inside = slice(max(rows.start - index * size, 0), min(rows.stop - index * size, size))
        parts.append(stack[slice(index, index + 1), inside][0])
    return np.concatenate(parts)
