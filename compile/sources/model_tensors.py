"""The tensors of a model, as views of stored tensors: checked once, then read by the model's names.

Knows views and shapes; a file format implements `StoredTensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from math import prod
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.artifact.model_config import ModelConfig
from radixlm.runtime.errors import CorruptSource, UnsupportedArchitecture, UnsupportedTensor

from ..families.family import Format, Views
from ..families.registry import FAMILIES
from ..layers.attention import LatentSelfAttention
from ..layers.decoder import Decoder
from ..layers.part_names import KEYS_AND_VALUES
from ..weights.kinds import F32
from ..weights.layout import GROUP
from ..weights.quantization import Float32, Weight, WeightPlanes, joined, requantize
from ..weights.view import RowIndex, StoredRows, View, pieces
from .source import TensorInfo

_LARGEST = 1e30  # of a weight; sums of a few thousand products of larger ones can overflow float32


class StoredTensors(Protocol):
    """The tensors of a file, under its own names.

    A stack of matrices `[E, N, K]` counts as `E * N` rows; rows are a slice with a positive step, or indices.
    """

    def infos(self) -> Mapping[str, TensorInfo]:
        """Return every tensor of the file."""

    def read(self, name: str, rows: RowIndex) -> Weight:
        """Return rows of a tensor in a form that kernels can hold."""

    def read_planes(self, name: str, rows: RowIndex) -> WeightPlanes | None:
        """Return the same rows as `read`, codes in bit planes; None if there are no planes, or `read` rounds."""

    def read_float32(self, name: str, rows: RowIndex) -> Float32:
        """Return the same numbers in float32, before any rounding by `read`."""


class ModelTensors:
    """Every tensor of the model of `config`, and no other, by its name in a Hugging Face checkpoint.

    `ignored` are additional patterns of stored names that are not part of the model. With `whole_gains`, no gains are
    stored minus one. `used` are the names of the stored tensors that are part of the model.

    Raises:
        CorruptSource: a tensor is missing, or has another shape than the configuration requires.
        UnsupportedArchitecture: the file has a tensor that the model has no part for.
    """

    def __init__(
        self,
        label: str,
        config: ModelConfig,
        format_: Format,
        stored: StoredTensors,
        ignored: Iterable[str] = (),
        *,
        whole_gains: bool = False,
    ) -> None:
        family = FAMILIES[config.architecture]
        decoder = family.decoder(config)
        self._views = family.views(decoder, format_, stored.infos().keys(), whole_gains=whole_gains)
        apart = _split_heads(label, stored, decoder, self._views, format_)
        self._stored: StoredTensors = _SplitHeads(stored, apart)
        self._label, self._infos = label, self._stored.infos()
        shapes = {name: shape for part in decoder.parts() for name, shape in part.tensors.items()}
        self._tensors = {name: self._checked(name, shape) for name, shape in shapes.items()}
        used = {view.name for name in shapes for view in self._views[name]}
        self.used = {apart[name].joined if name in apart else name for name in used}
        for name in self._infos:
            is_ignored = family.ignores(name, config) or any(fnmatch(name, pattern) for pattern in ignored)
            if name not in used and not is_ignored:
                raise UnsupportedArchitecture(
                    f"{label}: {name} has no place in the {config.architecture} architecture ({family.title}); "
                    "its configuration may be that of another model"
                )

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return every tensor of the model; shapes are the model's, types the file's."""
        return self._tensors

    def close(self) -> None:
        """Unmap the files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, name: str, rows: slice | None = None) -> Weight:
        """Return a tensor, or the rows `[start, stop)` of one."""
        parts = [self._read(view, rows) for view, rows in self._pieces(name, rows)]
        return parts[0] if len(parts) == 1 else joined(parts)

    def read_planes(self, name: str, rows: slice) -> WeightPlanes | None:
        """Return the same rows as `read`, codes in bit planes; None if there are no planes, or `read` rounds."""
        found = self._pieces(name, rows)
        if len(found) > 1:
            return None
        ((view, stored_rows),) = found
        return None if view.plus or view.minus_exp else self._stored.read_planes(view.name, stored_rows)

    def read_float32(self, name: str, rows: slice | None = None) -> Float32:
        """Return the same numbers in float32, before any rounding by `read`."""
        parts = [self._read_float32(view, rows) for view, rows in self._pieces(name, rows)]
        values = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return values.reshape(self._tensors[name].shape) if rows is None else values

    def _read(self, view: View, rows: RowIndex) -> Weight:
        """Return rows of a view, with its changes, checked."""
        weight = self._stored.read(view.name, rows)
        if weight.scales is not None:
            return _plus(weight, view)
        self._check_numbers(view, weight.codes)
        changed = _plus(weight, view)
        if changed is not weight:
            self._check_numbers(view, changed.codes)
        return changed

    def _read_float32(self, view: View, rows: RowIndex) -> Float32:
        """Return rows of a view as float32, with its changes, checked."""
        values = self._stored.read_float32(view.name, rows)
        self._check_numbers(view, values)
        changed = _changed(values, view)
        if changed is not values:
            self._check_numbers(view, changed)
        return changed

    def _check_numbers(self, view: View, values: NDArray[Any]) -> None:
        """Raise CorruptSource if a number is NaN, infinite, or so large that sums of it would be."""
        largest = _largest(values)
        if not largest <= _LARGEST:
            type_ = self._infos[view.name].type
            raise CorruptSource(
                f"{self._label}: {view.name} ({type_}) has numbers of {largest:g}, which no weight can have; "
                "the file is damaged, fetch it again or take another conversion"
            )

    def _pieces(self, name: str, rows: slice | None) -> list[tuple[View, RowIndex]]:
        """Return the stored rows of a tensor, or of some of its rows."""
        views = self._views[name]
        found: list[StoredRows] = list(pieces(views, [_num_rows(self._infos[view.name].shape) for view in views], rows))
        return [(piece.view, piece.rows) for piece in found]

    def _checked(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        """Return the type and shape of a tensor. Raises if the stored one does not match."""
        views = self._views[name]
        for view in views:
            if view.name not in self._infos:
                is_part = len(views) > 1 or not view.is_whole
                which = f"{view.name}, a part of {name}," if is_part else name
                raise CorruptSource(
                    f"{self._label}: {which} is missing; the file is incomplete, fetch it again or "
                    "take another conversion"
                )
        infos = [self._infos[view.name] for view in views]
        found = self._shape(views, infos)
        is_flat = 1 in (len(found), len(shape)) and prod(found) == prod(shape)  # biases of experts, gains of heads
        if not is_flat and (_num_rows(found), _width(found)) != (_num_rows(shape), _width(shape)):
            raise CorruptSource(
                f"{self._label}: {name} has shape {list(found)}, the configuration asks for {list(shape)}"
            )
        if len({info.type for info in infos}) > 1:
            raise UnsupportedTensor(
                f"{self._label}: the parts of {name} are stored as {', '.join(sorted({info.type for info in infos}))}; "
                "take a file that stores them alike"
            )
        return TensorInfo(shape, infos[0].type)

    @staticmethod
    def _shape(views: Sequence[View], infos: Sequence[TensorInfo]) -> tuple[int, ...]:
        """Return the shape of concatenated views."""
        if len(views) == 1 and views[0].is_whole:
            return infos[0].shape
        rows = sum(view.num_rows(_num_rows(info.shape)) for view, info in zip(views, infos, strict=True))
        return (rows,) if len(infos[0].shape) == 1 else (rows, infos[0].shape[-1])


@dataclass(frozen=True)
class _HeadRows:
    """A stack of rows `[start, stop)` of each head's `num_rows` in the tensor `joined`, optionally transposed."""

    joined: str
    num_heads: int
    num_rows: int
    start: int
    stop: int
    is_turned: bool

    def shape(self, width: int) -> tuple[int, ...]:
        """Return the shape of the stack, if rows of `joined` have this width."""
        size = self.stop - self.start
        return (self.num_heads, *((width, size) if self.is_turned else (size, width)))

    def stored_rows(self, rows: RowIndex) -> RowIndex:
        """Return the stored rows of a stack that is not transposed."""
        head, row = np.divmod(np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows, self._size)
        return head * self.num_rows + self.start + row

    def turned(self, rows: RowIndex, width: int, read: Callable[[RowIndex], NDArray[Any]]) -> NDArray[Any]:
        """Return rows of a transposed stack, which are columns of a head's rows."""
        index = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        parts = []
        for head in range(int(index.min()) // width, int(index.max()) // width + 1):
            first = head * self.num_rows
            columns = index[index // width == head] - head * width
            parts.append(read(slice(first + self.start, first + self.stop)).T[columns])
        return np.ascontiguousarray(np.concatenate(parts))

    @property
    def _size(self) -> int:
        """Number of rows of a head in the stack."""
        return self.stop - self.start


@dataclass(frozen=True)
class _SplitHeads:
    """The tensors of `stored`, with stacks of heads that it joins split up, under the usual names."""

    stored: StoredTensors
    parts: Mapping[str, _HeadRows]

    def infos(self) -> Mapping[str, TensorInfo]:
        """Return shapes and types by name, as if the stacks of heads were stored one by one.

        A tensor that joins several stacks, such as the `kv_b_proj` of latent attention, is left out, and its parts are
        listed.
        """
        infos = self.stored.infos()
        joined = {part.joined for part in self.parts.values()}
        found = {name: info for name, info in infos.items() if name not in joined}
        for name, part in self.parts.items():
            info = infos[part.joined]
            found[name] = TensorInfo(part.shape(info.shape[-1]), info.type)
        return found

    def read(self, name: str, rows: RowIndex) -> Weight:
        """Return rows as `StoredTensors` does.

        Transposed codes are quantized again, because their groups are along the other axis.
        """
        part = self.parts.get(name)
        if part is None:
            return self.stored.read(name, rows)
        if not part.is_turned:
            return self.stored.read(part.joined, part.stored_rows(rows))
        first = self.stored.read(part.joined, slice(0, 1))
        if first.kind.is_quantized:
            size = part.stop - part.start
            return requantize(self.read_float32(name, rows), "f16" if size % GROUP else "q8")
        width = first.shape[-1]
        return Weight(first.kind, part.turned(rows, width, lambda stored: self.stored.read(part.joined, stored).codes))

    def read_planes(self, name: str, rows: RowIndex) -> WeightPlanes | None:
        """Return rows of a tensor or stack as bit planes; None if it is not stored so, or the stack is transposed."""
        part = self.parts.get(name)
        if part is None:
            return self.stored.read_planes(name, rows)
        return None if part.is_turned else self.stored.read_planes(part.joined, part.stored_rows(rows))

    def read_float32(self, name: str, rows: RowIndex) -> Float32:
        """Return float32 as `StoredTensors` does."""
        part = self.parts.get(name)
        if part is None:
            return self.stored.read_float32(name, rows)
        if not part.is_turned:
            return self.stored.read_float32(part.joined, part.stored_rows(rows))
        width = self.stored.infos()[part.joined].shape[-1]
        return part.turned(rows, width, lambda stored: self.stored.read_float32(part.joined, stored))


def _split_heads(
    label: str, stored: StoredTensors, decoder: Decoder, views: Mapping[str, Views], format_: Format
) -> dict[str, _HeadRows]:
    """Find the joined matrices that make keys and values of latent vectors, and name their parts as others do.

    Raises CorruptSource if the shape is wrong.
    """
    found: dict[str, _HeadRows] = {}
    infos = stored.infos()
    for index, layer in enumerate(decoder.all_layers):
        joined = KEYS_AND_VALUES[format_].format(index)
        if not isinstance(layer.self_attn, LatentSelfAttention) or joined not in infos:
            continue
        keys, values = layer.self_attn.spec.keys, layer.self_attn.spec.values
        heads, plain, both = keys.num_heads, keys.num_inputs, keys.num_inputs + values.num_outputs
        expected = (heads * both, keys.num_outputs)
        if infos[joined].shape != expected:
            raise CorruptSource(
                f"{label}: {joined} has shape {list(infos[joined].shape)}, the configuration asks for {list(expected)}"
            )
        found[views[keys.name][0].name] = _HeadRows(joined, heads, both, 0, plain, is_turned=True)
        found[views[values.name][0].name] = _HeadRows(joined, heads, both, plain, both, is_turned=False)
    return found


def _num_rows(shape: tuple[int, ...]) -> int:
    """Return the number of rows: a stack of matrices has those of all, a vector one per number."""
    return shape[0] if len(shape) == 1 else prod(shape[:-1])


def _width(shape: tuple[int, ...]) -> int:
    """Return the number of inputs of a row; 1 for a vector."""
    return 1 if len(shape) == 1 else shape[-1]


def _largest(values: NDArray[Any]) -> float:
    """Return the largest magnitude; NaN if any number is NaN.

    Bits without the sign are in the order of the magnitudes.
    """
    if not values.size:
        return 0.0
    bits = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")
    sign = bits.dtype.type(1 << (8 * values.dtype.itemsize - 1))
    return float((bits & ~sign).max(keepdims=True).view(values.dtype).reshape(-1)[0])


def _plus(weight: Weight, view: View) -> Weight:
    """Return a weight with its view's changes, as float32 if there are any."""
    return Weight(F32, _changed(weight.dequantize(), view)) if view.plus or view.minus_exp else weight


def _changed(values: Float32, view: View) -> Float32:
    """Return numbers with their view's changes."""
    values = -np.exp(values) if view.minus_exp else values
    return values + np.float32(view.plus) if view.plus else values
