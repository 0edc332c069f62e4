"""Tensors of a checkpoint, whatever arrays of its files they are made of.

A quantized matrix lies in a file as several arrays, whose names are its own with different endings. A `Format` knows
the endings and the arithmetic; this module puts arrays together, and knows neither files nor formats.
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
    """An array in a file: its type by safetensors' name, such as "I32", its shape, and parts of it, read when asked."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, index: Index) -> NDArray[Any]: ...


class Tensor(Protocol):
    """A tensor of the model. Rows are `[start, stop)`, and None all of them."""

    @property
    def info(self) -> TensorInfo: ...
    def read(self, rows: slice | None = None) -> Weight:
        """As the kernels can hold it."""
        ...

    def read_float32(self, rows: slice | None = None) -> Float32:
        """Before any rounding by `read`."""
        ...


@dataclass(frozen=True)
class PlainTensor:
    """An array of floats as it is stored; a lone number counts as a row of one."""

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


class Rows(Protocol):
    """Some rows of a matrix of codes."""

    def values(self) -> Float32:
        """What they are worth by the format's own formula, `[N, K]`."""
        ...

    def weight(self) -> Weight:
        """The same as the kernels hold it."""
        ...


@dataclass(frozen=True)
class GroupedTensor:
    """A matrix of codes; `decode` takes whole rows, start and stop given. `name` is for messages."""

    name: str
    info: TensorInfo
    decode: Callable[[slice], Rows]

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
class RoundedTensor:
    """A matrix that no kernel holds as it is; it is rounded to 8-bit codes with a scale for each 32 of a row."""

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
class RowsOf:
    """Rows `[start, stop)` of a tensor: one of several matrices that a format keeps as one."""

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
        inside = _bounded(rows, self.stop - self.start)
        return slice(self.start + inside.start, self.start + inside.stop)


@dataclass(frozen=True)
class Stacked:
    """An array `[experts, rows, ...]` as the matrix of all rows, of this shape."""

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
    """Stacks `[experts, rows, columns]` as matrices of all rows; other arrays as they are."""
    return {
        ending: Stacked(array, (array.shape[0] * array.shape[1], array.shape[2])) if len(array.shape) == 3 else array
        for ending, array in parts.items()
    }


class Format(Protocol):
    """How a quantized matrix is stored.

    `marker` ends the name of an array that every quantized matrix has. `endings` are those of all its arrays, the
    marker's included; arrays with one of `unused` say how activations are rounded, which is not the format's choice
    here.
    """

    @property
    def marker(self) -> str: ...
    @property
    def endings(self) -> tuple[str, ...]: ...
    @property
    def unused(self) -> tuple[str, ...]: ...
    def matrix(self, name: str, parts: Mapping[str, Array]) -> Tensor:
        """The matrix `name` (no ending) from its arrays by ending.

        Raises CorruptSource where they disagree, UnsupportedTensor where nothing here can hold it.
        """
        ...


def tensors(label: str, arrays: Mapping[str, Array], format_: Format | None) -> dict[str, Tensor]:
    """All tensors by their names in the checkpoint: a quantized matrix as `NAME.weight`, others as they are.

    `label` is the checkpoint's, for messages. Raises what `Format.matrix` raises.
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
    """An array that a matrix must have: of `shape`, or of any with `ndim` axes, and of one of `dtypes`, where given.

    Raises CorruptSource where it is missing, or another.
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
    """What an array of one number holds, which multiplies a whole matrix.

    Raises CorruptSource where it holds none or more, or one that is not finite.
    """
    array = part(name, parts, ending, parts[ending].shape, dtypes=FLOATS)
    values = np.asarray(array[:], np.float32).reshape(-1)
    if values.size != 1 or not np.isfinite(values[0]):
        what = f"shape {list(array.shape)}" if values.size != 1 else f"the value {values[0]}"
        raise CorruptSource(f"{name}{ending} has {what}, one finite number is expected; fetch it again")
    return np.float32(values[0])


def first_bytes(array: Array, count: int) -> bytes:
    """At most `count` bytes of an array's beginning, to know it by."""
    if not all(array.shape):
        return b""
    if not array.shape:
        return array[:].tobytes()
    num_rows = -(-count // max(1, array[0:1].nbytes))
    return array[0 : min(num_rows, array.shape[0])].tobytes()[:count]


def number(label: str, config: Mapping[str, Any], key: str, allowed: tuple[int, ...] = ()) -> int:
    """A whole number of a configuration; raises UnsupportedTensor where it is none, zero, or not `allowed`."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value == 0 or (allowed and value not in allowed):
        expected = f"one of {', '.join(map(str, allowed))}" if allowed else "a number"
        raise UnsupportedTensor(
            f"{label}: {key} of the quantization is {value!r}, {expected} is read; take a GGUF file of the same model"
        )
    return value


def group_of(name: str, num_inputs: int, num_groups: int, wanted: int) -> int:
    """Inputs of a group, where `wanted` are asked for (-1: all of a row) and the scales are those of `num_groups`.

    Raises UnsupportedTensor where they do not divide, or are no multiple of 16, CorruptSource where they disagree.
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
    start, stop, _ = (rows or slice(None)).indices(count)
    return slice(start, stop)
