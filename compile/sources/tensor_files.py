"""Files of arrays: safetensors, memory-mapped, and MLC's shards with their index.

The `safetensors` library reads its files and checks their headers before any tensor. This module turns its errors into
one line, and knows the bytes that identify a file. MLC's index is `tensor-cache.json` (older: `ndarray-cache.json`), as
`dump_tensor_cache` of TVM's tvmjs writes it. Does not know what arrays mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.artifact.gguf_header import require_content
from radixlm.runtime.errors import CorruptSource, SourceNotFound, UnsupportedTensor
from safetensors import SafetensorError, safe_open

from .source import checked, one_line

_open: Any = safe_open  # its methods have no types
_FLOAT8 = {  # types that the library does not convert to arrays
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}

Index = slice | tuple[slice, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's type by the format's name, such as "BF16", its shape, and its values, which are read on access."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[Index], NDArray[Any]]

    def __getitem__(self, index: Index) -> NDArray[Any]:
        return self.read(index)


class SafetensorsFile:
    """An open file: `tensors` by name, `header` as stored, `size` in bytes."""

    def __init__(self, path: Path) -> None:
        """Open a file. Raises SourceNotFound if it is unreadable, CorruptSource if header and size disagree."""
        self.path = path
        require_content(path)
        try:
            self._file = _open(path, framework="np")
            self._slices = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118
            self.size = path.stat().st_size
            with path.open("rb") as file:
                self.header = file.read(int.from_bytes(file.read(8), "little"))
        except OSError as error:
            raise SourceNotFound(f"{path} cannot be read: {error.strerror or error}") from error
        except SafetensorError as error:
            raise CorruptSource(f"{path} is no whole safetensors file ({one_line(error)}); fetch it again") from error
        self.tensors = {
            name: StoredTensor(part.get_dtype(), tuple(part.get_shape()), partial(self.values, name))
            for name, part in self._slices.items()
        }

    def values(self, name: str, index: Index | None = None) -> NDArray[Any]:
        """Return a copy of a tensor, or of a part such as rows `[start, stop)`, in its stored type."""
        tensor, values = self.tensors[name], None
        if tensor.dtype in _FLOAT8:
            values = self._float8(name, tensor)[index or slice(None)] if tensor.shape else self._float8(name, tensor)
        elif tensor.shape and all(tensor.shape):
            values = self._slices[name][index or slice(None)]
        else:  # the library cannot slice an empty tensor
            values = self._file.get_tensor(name)
        return np.array(values)

    def _float8(self, name: str, tensor: StoredTensor) -> NDArray[Any]:
        """Return the bytes at the header's offsets, which the library has checked."""
        dtype, (begin, _) = _FLOAT8[tensor.dtype], self._entries[name]["data_offsets"]
        if not all(tensor.shape):
            return np.empty(tensor.shape, dtype)
        at = 8 + len(self.header) + begin
        return np.memmap(self.path, dtype, "r", at, tensor.shape or (1,)).reshape(tensor.shape)

    @cached_property
    def _entries(self) -> dict[str, Any]:
        """The entries of the header, by tensor name."""
        entries: dict[str, Any] = json.loads(self.header)
        return entries

    def close(self) -> None:
        """Drop the mapping."""
        self._slices = {}
        self._file.__exit__(None, None, None)


INDEXES = ("tensor-cache.json", "ndarray-cache.json")
_DTYPES: dict[str, tuple[str, np.dtype[Any]]] = {  # safetensors' name and NumPy's type of each
    "uint32": ("U32", np.dtype("<u4")),
    "int32": ("I32", np.dtype("<i4")),
    "float16": ("F16", np.dtype("<f2")),
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
    "float32": ("F32", np.dtype("<f4")),
}

Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _Record(msgspec.Struct, rename="camel"):
    """An array of a shard, as the index lists it."""

    name: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 40)], ...]
    dtype: str
    format: str
    nbytes: Annotated[int, msgspec.Meta(ge=0)] = msgspec.field(name="nbytes")
    byte_offset: Size


class _Shard(msgspec.Struct, rename="camel"):
    """A shard, as the index lists it."""

    data_path: str
    format: str
    nbytes: Annotated[int, msgspec.Meta(ge=0)] = msgspec.field(name="nbytes")
    records: list[_Record]


class _Index(msgspec.Struct):
    """The content of an index of shards."""

    records: list[_Shard]


@dataclass(frozen=True)
class CachedArray:
    """An array in a shard file."""

    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    stored: np.dtype[Any]

    def __getitem__(self, index: slice | tuple[slice, ...]) -> NDArray[Any]:
        return np.array(np.memmap(self.path, self.stored, "r", self.offset, self.shape)[index])


def cached_arrays(directory: Path, index: Mapping[str, Any]) -> dict[str, CachedArray]:
    """Return the arrays in the directory, by name, from `index`, the content of one of `INDEXES`.

    Raises:
        CorruptSource: a shard is missing or has another size, or an array exceeds its shard or does not match its
            shape.
        UnsupportedTensor: a type is unsupported.
    """
    arrays = {}
    for shard in checked(str(directory / INDEXES[0]), index, _Index).records:
        path = directory / shard.data_path
        if Path(shard.data_path).name != shard.data_path or shard.format != "raw-shard":
            raise CorruptSource(f"{directory}: {shard.data_path!r} ({shard.format}) is no shard beside {INDEXES[0]}")
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise CorruptSource(
                f"{directory}: {shard.data_path} is missing, {INDEXES[0]} asks for it; fetch it again"
            ) from None
        except OSError as error:
            raise SourceNotFound(f"{path} cannot be read: {error.strerror or error}") from error
        if size != shard.nbytes:
            raise CorruptSource(f"{path} has {size} bytes, {INDEXES[0]} says {shard.nbytes}; fetch it again")
        for record in shard.records:
            arrays[record.name] = _array(path, record, size)
    return arrays


def _array(path: Path, record: _Record, size: int) -> CachedArray:
    """Return the array of a record. Raises if it does not fit its shard or its type is unsupported."""
    known = record.dtype in _DTYPES and record.format in ("raw", "f32-to-bf16")
    if not known:
        raise UnsupportedTensor(
            f"{path}: {record.name} is stored as {record.dtype} ({record.format}), which is not read; "
            f"take the same model as q4f16_1, or a GGUF file"
        )
    halved = record.format == "f32-to-bf16" and record.dtype == "float32"  # the upper 16 bits of each
    dtype, stored = _DTYPES["bfloat16" if halved else record.dtype]
    num_bytes = prod(record.shape) * stored.itemsize
    if num_bytes != record.nbytes or record.byte_offset + num_bytes > size:
        raise CorruptSource(
            f"{path}: {record.name} of shape {list(record.shape)} has {num_bytes} bytes from {record.byte_offset} on, "
            f"its record says {record.nbytes} and the shard has {size}; fetch it again"
        )
    return CachedArray(dtype, record.shape, path, record.byte_offset, stored)
