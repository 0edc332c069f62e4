"""Tensors of a checkpoint, each read from one or several arrays of its files.

A file stores a quantized matrix as several arrays, whose names are its own with different endings. A `Format` knows the
endings and the arithmetic. This module combines arrays, and knows neither files nor formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.errors import CorruptSource, UnsupportedTensor

from ...weights.kinds import WeightKind
from ...weights.quantization import Float32, Weight, requantize
from ..source import TensorInfo

Index = slice | tuple[slice, ...]
WORDS = ("I32", "U32")
FLOATS = ("F16", "BF16", "F32")
KINDS = {"F32": WeightKind("f32"), "F16": WeightKind("f16"), "BF16": WeightKind("bf16")}


class Array(Protocol):
    """An array in a file: its type by safetensors' name, such as "I32", its shape, and parts of it, read on access."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, index: Index) -> NDArray[Any]: ...


class Tensor(Protocol):
    """A tensor of the model. Rows are `[start, stop)`; None means all of them."""

    @property
    def info(self) -> TensorInfo: ...
    def read(self, rows: slice | None = None) -> Weight:
        """Return rows in a form that kernels can hold."""
        ...

    def read_float32(self, rows: slice | None = None) -> Float32:
        """Return rows in float32, before any rounding by `read`."""
        ...


@dataclass(frozen=True)
class PlainTensor:
    """An array of floats as it is stored; a scalar counts as a row of one."""

    array: Array

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.array.shape or (1,), self.array.dtype)

    def read(self, rows: slice | None = None) -> Weight:
        rows = rows or slice(None)
        values = self.array[rows] if self.array.shape else self.array[:].reshape(1)[rows]
        return Weight(KINDS[self.array.dtype], values, is_exact=True)

    def read_float32(self, rows: slice | None = None) -> Float32:
        return self.read(rows).dequantize()


class CodedRows(Protocol):
    """Some rows of a matrix of codes."""

    def values(self) -> Float32:
        """Return the values by the format's own formula, `[N, K]`."""
        ...

    def weight(self) -> Weight:
        """Return the weight in a form that kernels can hold."""
        ...


@dataclass(frozen=True)
class GroupedTensor:
    """A matrix of codes; `decode` takes a slice of rows with start and stop. `name` is for messages."""

    name: str
    info: TensorInfo
    decode: Callable[[slice], CodedRows]

    def read(self, rows: slice | None = None) -> Weight:
        weight = self.decode(_bounded(rows, self.info.shape[0])).weight()
        for parts in (weight.scales, weight.minima):
            if parts is not None and not np.isfinite(parts).all():
                raise CorruptSource(
                    f"{self.name} ({self.info.type}) has scales that are no numbers or larger than float16 holds; "
                    "fetch it again, or take a GGUF file of the same model"
                )
        return weight

    def read_float32(self, rows: slice | None = None) -> Float32:
        return self.decode(_bounded(rows, self.info.shape[0])).values()


@dataclass(frozen=True)
class RequantizedTensor:
    """A matrix that no kernel can hold; it is rounded to 8-bit codes with a scale for each 32 of a row."""

    name: str
    info: TensorInfo
    decode: Callable[[slice], Float32]

    def read(self, rows: slice | None = None) -> Weight:
        return requantize(self.read_float32(rows), "q8")

    def read_float32(self, rows: slice | None = None) -> Float32:
        values = self.decode(_bounded(rows, self.info.shape[0]))
        if not np.isfinite(values).all():
            raise CorruptSource(f"{self.name} ({self.info.type}) has values that are no numbers; fetch it again")
        return values


@dataclass(frozen=True)
class TensorRows:
    """Rows `[start, stop)` of a tensor: one of several matrices that a format joins."""

    whole: Tensor
    start: int
    stop: int

    @property
    def info(self) -> TensorInfo:
        return TensorInfo((self.stop - self.start, *self.whole.info.shape[1:]), self.whole.info.type)

    def read(self, rows: slice | None = None) -> Weight:
        return self.whole.read(self._rows(rows))

    def read_float32(self, rows: slice | None = None) -> Float32:
        return self.whole.read_float32(self._rows(rows))

    def _rows(self, rows: slice | None) -> slice:
        """Return rows of the whole tensor."""
        inside = _bounded(rows, self.stop - self.start)
        return slice(self.start + inside.start, self.start + inside.stop)


@dataclass(frozen=True)
class StackedArray:
    """An array `[experts, rows, ...]` read as the matrix of all rows, of this shape."""

    array: Array
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return self.array.dtype

    def __getitem__(self, index: Index) -> NDArray[Any]:
        assert isinstance(index, slice)
        num_rows = self.array.shape[1]
        experts = slice(index.start // num_rows, -(-index.stop // num_rows))
        rows = self.array[experts].reshape(-1, self.shape[1])
        return rows[index.start - experts.start * num_rows : index.stop - experts.start * num_rows]


def as_matrices(parts: Mapping[str, Array]) -> dict[str, Array]:
    """Return stacks `[experts, rows, columns]` as matrices of all rows; other arrays unchanged."""
    return {
        ending: StackedArray(array, (array.shape[0] * array.shape[1], array.shape[2]))
        if len(array.shape) == 3
        else array
        for ending, array in parts.items()
    }


class Format(Protocol):
    """The storage format of quantized matrices.

    `marker` is the suffix of an array that every quantized matrix has. `endings` are the suffixes of all its arrays,
    the marker's included. Arrays with a suffix in `unused` describe the rounding of activations, which is the
    compiler's choice.
    """

    @property
    def marker(self) -> str: ...
    @property
    def endings(self) -> tuple[str, ...]: ...
    @property
    def unused(self) -> tuple[str, ...]: ...
    def matrix(self, name: str, parts: Mapping[str, Array]) -> Tensor:
        """Return the matrix `name` (no ending) from its arrays by ending.

        Raises CorruptSource if they disagree, UnsupportedTensor if no kernel can hold it.
        """
        ...


def tensors(label: str, arrays: Mapping[str, Array], format_: Format | None) -> dict[str, Tensor]:
    """Return all tensors by their names in the checkpoint: a quantized matrix as `NAME.weight`, others unchanged.

    `label` is the checkpoint's name in messages. Raises the errors of `Format.matrix`.
    """
    if format_ is None:
        return {name: PlainTensor(array) for name, array in arrays.items()}
    stems = [name.removesuffix(format_.marker) for name in arrays if name.endswith(format_.marker)]
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    for stem in stems:
        parts = {ending: arrays[stem + ending] for ending in format_.endings if stem + ending in arrays}
        for ending, array in parts.items():
            if not all(array.shape):
                raise CorruptSource(
                    f"{label}: {stem}{ending} has shape {list(array.shape)}, and so no numbers; fetch it again"
                )
        found[f"{stem}.weight"] = format_.matrix(f"{label}: {stem}", parts)
        used |= {stem + ending for ending in parts}
    rest = {name: array for name, array in arrays.items() if name not in used}
    return found | {name: PlainTensor(array) for name, array in rest.items() if not name.endswith(format_.unused)}


def part(
    name: str,
    parts: Mapping[str, Array],
    ending: str,
    shape: tuple[int, ...] | None = None,
    *,
    ndim: int = 2,
    dtypes: tuple[str, ...] = (),
) -> Array:
    """Return an array that a matrix must have. Raises CorruptSource if it is missing, or has another shape or type.

    A `shape` of None allows any with `ndim` axes; `dtypes` of () allow any type.
    """
    if ending not in parts:
        raise CorruptSource(f"{name}{ending} is missing; the checkpoint is incomplete, fetch it again")
    array = parts[ending]
    if array.shape != shape if shape is not None else len(array.shape) != ndim:
        expected = f"the other arrays ask for {list(shape)}" if shape is not None else f"{ndim} axes are expected"
        raise CorruptSource(f"{name}{ending} has shape {list(array.shape)}, {expected}; fetch it again")
    if dtypes and array.dtype not in dtypes:
        raise CorruptSource(f"{name}{ending} is stored as {array.dtype}, not as {' or '.join(dtypes)}; fetch it again")
    return array


def only_number(name: str, parts: Mapping[str, Array], ending: str) -> np.float32:
    """Return the number in an array of one, a factor of a whole matrix.

    Raises CorruptSource if the array has none or more, or a number that is not finite.
    """
    array = part(name, parts, ending, parts[ending].shape, dtypes=FLOATS)
    values = np.asarray(array[:], np.float32).reshape(-1)
    if values.size != 1 or not np.isfinite(values[0]):
        what = f"shape {list(array.shape)}" if values.size != 1 else f"the value {values[0]}"
        raise CorruptSource(f"{name}{ending} has {what}, one finite number is expected; fetch it again")
    return np.float32(values[0])


def first_bytes(array: Array, count: int) -> bytes:
    """Return at most `count` bytes of an array's beginning, which identify it."""
    if not all(array.shape):
        return b""
    if not array.shape:
        return array[:].tobytes()
    num_rows = -(-count // max(1, array[0:1].nbytes))
    return array[0 : min(num_rows, array.shape[0])].tobytes()[:count]


def number(label: str, config: Mapping[str, Any], key: str, allowed: tuple[int, ...] = ()) -> int:
    """Return a nonzero integer of a configuration. Raises UnsupportedTensor for others, or if not `allowed`."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value == 0 or (allowed and value not in allowed):
        expected = f"one of {', '.join(map(str, allowed))}" if allowed else "a number"
        raise UnsupportedTensor(
            f"{label}: {key} of the quantization is {value!r}, {expected} is read; take a GGUF file of the same model"
        )
    return value


def group_of(name: str, num_inputs: int, num_groups: int, wanted: int) -> int:
    """Return the inputs of a group: `wanted` (-1 for a whole row), checked against the number of groups of the scales.

    Raises UnsupportedTensor if they do not divide, or are not a multiple of 16, CorruptSource if they disagree.
    """
    group = num_inputs if wanted == -1 else wanted
    if group <= 0 or num_inputs % group or group % 16:
        raise UnsupportedTensor(
            f"{name}: {num_inputs} inputs cannot be cut into groups of {group} that are multiples of 16; "
            "take a GGUF file of the same model"
        )
    if num_inputs // group != num_groups:
        raise CorruptSource(
            f"{name} has scales for {num_groups} groups, {num_inputs} inputs in groups of {group} ask for "
            f"{num_inputs // group}; fetch it again"
        )
    return group


def _bounded(rows: slice | None, count: int) -> slice:
    """Return a slice of rows with start and stop, bounded by `count`."""
    start, stop, _ = (rows or slice(None)).indices(count)
    return slice(start, stop)
