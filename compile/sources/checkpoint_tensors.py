"""The tensors of a checkpoint as weights, under its names: `StoredTensors`, whatever arrays they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.errors import CorruptSource

from ..families.family import PREFIXES
from ..layers.part_names import HUGGINGFACE, KEYS_AND_VALUES
from ..weights.layout import GROUP
from ..weights.quantization import Float32, Weight, requantize
from ..weights.view import Rows
from .quantized.tensors import KINDS, Array, Index, PlainTensor, Tensor
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
            return Weight(KINDS[tensor.array.dtype], _rows_of_stack(tensor.array, between)[chosen])
        return _taken(tensor.read(between), chosen)

    def read_float32(self, name: str, rows: Rows) -> Float32:
        """The same numbers in float32, before any rounding by `read`."""
        between, chosen = _cover(rows)
        tensor = self._tensors[name]
        if isinstance(tensor, PlainTensor):
            return self.read(name, rows).dequantize()
        return tensor.read_float32(between)[chosen]


def with_usual_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names without the prefixes of models that see and hear, too: `model.language_model.` is `model.`."""
    found = {}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
        found[PREFIXES.get(prefix, "") + name.removeprefix(prefix)] = tensor
    return found


def reshaped(tensors: Mapping[str, Tensor], transposed: Iterable[str], flat: Iterable[str]) -> dict[str, Tensor]:
    """Stacks whose names match a pattern of `transposed` turned, under `NAME.weight`, those of `flat` as vectors."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, PlainTensor) and any(fnmatch(name, pattern) for pattern in transposed):
            found[f"{name}.weight"] = PlainTensor(_Transposed(tensor.array))
        elif isinstance(tensor, PlainTensor) and any(fnmatch(name, pattern) for pattern in flat):
            found[name] = PlainTensor(_Flat(tensor.array))
        else:
            found[name] = tensor
    return found


def with_heads_keys(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """With what makes keys of latent vectors as a stack of its own, head by head and turned.

    `shapes` are those of the model's tensors, by its names. Raises CorruptSource where rows cannot be shared by heads.
    """
    found = dict(tensors)
    for name, tensor in tensors.items():
        own = name.removesuffix(KEYS_AND_VALUES) + HUGGINGFACE["k_b"]
        if name.endswith(KEYS_AND_VALUES) and own in shapes:
            heads, latent, plain = shapes[own]
            num_rows = tensor.info.shape[0]
            if tensor.info.shape[1:] != (latent,) or num_rows % heads or num_rows // heads < plain:
                raise CorruptSource(
                    f"{name} has shape {list(tensor.info.shape)}, the configuration asks for {heads} heads with keys "
                    f"of {plain} numbers, and {latent} columns"
                )
            found[own] = _HeadsKeys(tensor, heads, plain)
    return found


@dataclass(frozen=True)
class _HeadsKeys:
    """The keys' rows of `whole` `[heads * (plain + value), latent]` as `[heads, latent, plain]`."""

    whole: Tensor
    num_heads: int
    plain: int

    @property
    def info(self) -> TensorInfo:
        return TensorInfo((self.num_heads, self.whole.info.shape[1], self.plain), self.whole.info.type)

    def read(self, rows: slice | None = None) -> Weight:
        """Numbers as they are stored; codes are rounded again, for their groups lie across."""
        if self.whole.info.type in KINDS:
            kind = KINDS[self.whole.info.type]
            return Weight(kind, self._turned(rows, lambda stored: self.whole.read(stored).codes))
        return requantize(self.read_float32(rows), "f16" if self.plain % GROUP else "q8")

    def read_float32(self, rows: slice | None = None) -> Float32:
        """Of heads one below the other."""
        return self._turned(rows, self.whole.read_float32)

    def _turned(self, rows: slice | None, read: Callable[[slice], NDArray[Any]]) -> NDArray[Any]:
        stored, latent = self.whole.info.shape
        start, stop, _ = (rows or slice(None)).indices(self.num_heads * latent)
        parts = []
        for head in range(start // latent, -(-stop // latent)):
            first = head * (stored // self.num_heads)
            inside = slice(max(start - head * latent, 0), min(stop - head * latent, latent))
            parts.append(read(slice(first, first + self.plain)).T[inside])
        return np.ascontiguousarray(np.concatenate(parts))


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
