"""The tensors of a checkpoint as weights, under its names: `StoredTensors`, whatever arrays they are made of."""

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
from ..weights.view import Rows
from .quantized.tensors import KINDS, Array, Index, PlainTensor, RowsOf, Tensor
from .source import TensorInfo


class CheckpointTensors:
    """Reads rows of `tensors`; of rows with others between them, those are read, too, and dropped."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor."""
        return {name: tensor.info for name, tensor in self._tensors.items()}

    def read(self, name: str, rows: Rows) -> Weight:
        """Rows as the kernels can hold them."""
        between, chosen = _cover(rows)
        tensor = self._tensors[name]
        if isinstance(tensor, PlainTensor) and len(tensor.array.shape) > 2:
            values = _rows_of_stack(tensor.array, between)[chosen]
            return Weight(KINDS[tensor.array.dtype], values, is_exact=True)
        return _taken(tensor.read(between), chosen)

    def read_planes(self, name: str, rows: Rows) -> WeightPlanes | None:
        """See `StoredTensors`: not known of these formats."""
        return None

    def read_float32(self, name: str, rows: Rows) -> Float32:
        """The same numbers in float32, before any rounding by `read`."""
        between, chosen = _cover(rows)
        tensor = self._tensors[name]
        if isinstance(tensor, PlainTensor):
            return self.read(name, rows).dequantize()
        return tensor.read_float32(between)[chosen]


def of_language_model(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the language model alone, under names without the prefixes of models that see and hear, too."""
    return {usual: tensors[name] for name, usual in language_names(tensors).items()}


def with_hub_names(tensors: Mapping[str, Tensor], rows: Mapping[str, int]) -> dict[str, Tensor]:
    """Names that the hub gives what other tools have named, where `rows` are those of the tensors that it may have."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        usual = hub_name(name, rows)
        found[name if usual in tensors else usual] = tensor
    return found


def separated(tensors: Mapping[str, Tensor], rows: Mapping[str, int]) -> dict[str, Tensor]:
    """Matrices and biases apart that a checkpoint keeps as one, such as q, k and v; `rows` are those of each.

    Raises CorruptSource where they are not all that one has.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = parts_of(name)
        if name in rows or not all(part in rows for part in parts):
            found[name] = tensor
            continue
        start = 0
        for part in parts:
            found[part] = RowsOf(tensor, start, start + rows[part])
            start += rows[part]
        if start != tensor.info.shape[0]:
            raise CorruptSource(f"{name} has {tensor.info.shape[0]} rows, the configuration asks for {start}")
    return found


def reshaped(tensors: Mapping[str, Tensor], transposed: Iterable[str], flat: Iterable[str]) -> dict[str, Tensor]:
    """Stacks whose names match a pattern of `transposed` turned, under `NAME.weight`, those of `flat` as vectors.

    Raises CorruptSource where one is no stack.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, PlainTensor) and any(fnmatch(name, pattern) for pattern in transposed):
            if len(tensor.array.shape) != 3:
                shape = list(tensor.array.shape)
                raise CorruptSource(f"{name} has shape {shape}, a stack of matrices is expected; fetch it again")
            found[f"{name}.weight"] = PlainTensor(_Transposed(tensor.array))
        elif isinstance(tensor, PlainTensor) and any(fnmatch(name, pattern) for pattern in flat):
            found[name] = PlainTensor(_Flat(tensor.array))
        else:
            found[name] = tensor
    return found


@dataclass(frozen=True)
class _Transposed:
    """A stack `[E, K, N]` as `[E, N, K]`."""

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
class _Flat:
    """A matrix as a vector, its rows one behind the other. Small: all of it is read."""

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


def _cover(rows: Rows) -> tuple[slice, Rows]:
    """The rows from the first to the last, and which of them are meant."""
    if isinstance(rows, slice):
        return slice(rows.start, rows.stop), slice(None, None, rows.step)
    first = int(rows.min())
    return slice(first, int(rows.max()) + 1), rows - first


def _taken(weight: Weight, rows: Rows) -> Weight:
    if isinstance(rows, slice) and rows.step in (None, 1):
        return weight
    # `Weight.rows` takes a vector for that of all rows; here its numbers are the rows
    return replace(weight, codes=weight.codes[rows]) if weight.codes.ndim == 1 else weight.rows(rows)


def _rows_of_stack(stack: Array, rows: slice) -> NDArray[Any]:
    """Rows of a stack `[E, N, K]`, which counts as `E * N`."""
    size = prod(stack.shape[1:-1])
    parts = []
    for index in range(rows.start // size, -(-rows.stop // size)):
        inside = slice(max(rows.start - index * size, 0), min(rows.stop - index * size, size))
        parts.append(stack[slice(index, index + 1), inside][0])
    return np.concatenate(parts)
