"""Read the tensors of an adapter's file, safetensors or GGUF, as float32.

A file is mapped. Its header is read at once, and a tensor's numbers when they are first asked for. Every offset is
checked against the file's size. Knows bytes, not what a tensor is for.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import InvalidAdapter

Float32Array = npt.NDArray[np.float32]
GGUF_MAGIC: Final = b"GGUF"
_MAX_TEXT_BYTES = 1 << 20
_MAX_COUNT = 1 << 20  # of tensors, of keys, and of items of an array
_MAX_DIMENSIONS = 4
_ALIGNMENT = "general.alignment"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def _from_bfloat16(values: npt.NDArray[np.uint16]) -> Float32Array:
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _from_float(values: npt.NDArray[Any]) -> Float32Array:
    return values.astype(np.float32)


_Stored = tuple[np.dtype[Any], Callable[[npt.NDArray[Any]], Float32Array]]
_FLOATS: dict[str, _Stored] = {
    "F32": (np.dtype("<f4"), _from_float),
    "F16": (np.dtype("<f2"), _from_float),
    "BF16": (np.dtype("<u2"), _from_bfloat16),
}
_GGUF_TYPES = {0: "F32", 1: "F16", 30: "BF16"}


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of a file that is open."""

    shape: tuple[int, ...]
    _dtype: str
    _data: memoryview

    @cached_property
    def values(self) -> Float32Array:
        """Its numbers, converted once."""
        stored, convert = _FLOATS[self._dtype]
        return convert(np.frombuffer(self._data, stored)).reshape(self.shape)


class _Tensor(msgspec.Struct):
    """A tensor, as the header of a safetensors file lists it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a safetensors file by name.

    Raises:
        InvalidAdapter: the file cannot be read, is truncated, or has a tensor that is not F32, F16 or BF16.
    """
    data = _mapped(path)
    start = 8 + int.from_bytes(data[:8], "little")
    try:
        header = json.loads(bytes(data[8:start]))
        header.pop("__metadata__", None)
        listed = msgspec.convert(header, dict[str, _Tensor])
    except (ValueError, AttributeError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidAdapter(f"{path} is no whole safetensors file ({error}); fetch it again") from None
    return {
        name: _stored(path, name, tensor.dtype, tensor.shape, data[start:], tensor.data_offsets[0])
        for name, tensor in listed.items()
    }


def read_gguf(
    path: Path, check: Callable[[Mapping[str, Any]], None]
) -> tuple[Mapping[str, Any], dict[str, StoredTensor]] | None:
    """Return the metadata of a GGUF file by key, and its tensors by name, in NumPy's order of dimensions.

    Returns None if the file does not begin as GGUF does.

    Args:
        check: raises InvalidAdapter for metadata of another kind of file, whose tensors are then not looked at.

    Raises:
        InvalidAdapter: the file cannot be read, is truncated, or has a tensor that is not F32, F16 or BF16.
    """
    data = _mapped(path)
    if bytes(data[:4]) != GGUF_MAGIC:
        return None
    try:
        cursor = _Cursor(data, 4)
        if (version := cursor.number("I")) not in (2, 3):
            raise ValueError(f"it has version {version}; versions 2 and 3 are read")
        num_tensors, num_keys = cursor.count(), cursor.count()
        metadata = {cursor.string(): cursor.value(cursor.number("I")) for _ in range(num_keys)}
        listed = [cursor.tensor() for _ in range(num_tensors)]
        alignment = int(metadata.get(_ALIGNMENT, 32))
        start = -(-cursor.at // alignment) * alignment
    except (ValueError, TypeError, ArithmeticError, struct.error) as error:
        raise InvalidAdapter(f"{path} is no whole GGUF file ({error}); fetch it again") from None
    check(metadata)
    tensors = {
        name: _stored(path, name, _GGUF_TYPES.get(type_, f"type {type_}"), shape, data[start:], offset)
        for name, shape, type_, offset in listed
    }
    return metadata, tensors


def read_text(path: Path) -> bytes:
    """Return the bytes of a small file.

    Raises:
        InvalidAdapter: it cannot be read, or has more than a MiB.
    """
    data = _mapped(path)
    if len(data) > _MAX_TEXT_BYTES:
        raise InvalidAdapter(f"{path} has {len(data)} bytes, at most {_MAX_TEXT_BYTES} are read; give an adapter")
    return bytes(data)


def _mapped(path: Path) -> memoryview:
    """Return the bytes of a file, which the system reads when they are used."""
    try:
        with path.open("rb") as file:
            is_empty = not os.fstat(file.fileno()).st_size  # which cannot be mapped
            return memoryview(b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        message = f"{path} cannot be read ({error.strerror}); give an adapter's file or folder"
        raise InvalidAdapter(message) from None


def _stored(path: Path, name: str, dtype: str, shape: tuple[int, ...], data: memoryview, start: int) -> StoredTensor:
    """Return a tensor whose numbers are all in the file."""
    if dtype not in _FLOATS:
        raise InvalidAdapter(f"{path}: {name} is stored as {dtype}; adapters are read in {', '.join(_FLOATS)}")
    end = start + math.prod(shape) * _FLOATS[dtype][0].itemsize
    if len(shape) > _MAX_DIMENSIONS or any(size > len(data) for size in shape):
        raise InvalidAdapter(f"{path}: {name} of {len(shape)} dimensions is no matrix; fetch it again")
    if min(start, *shape, 0) < 0 or end > len(data):
        raise InvalidAdapter(f"{path}: {name} of shape {list(shape)} ends after the file; fetch it again")
    return StoredTensor(shape, dtype, data[start:end])


@dataclass
class _Cursor:
    """A place in the header of a GGUF file. Reading after the end raises struct.error or ValueError."""

    data: memoryview
    at: int

    def number(self, code: str) -> Any:
        """Return the next number of a format of `struct`."""
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def count(self) -> int:
        """Return the next length."""
        count: int = self.number("Q")
        if count > _MAX_COUNT:
            raise ValueError(f"{count} items at byte {self.at}")
        return count

    def string(self) -> str:
        """Return the next string."""
        length = self.count()
        text = bytes(self.data[self.at : self.at + length])
        if len(text) < length:
            raise ValueError(f"a text of {length} bytes at byte {self.at}")
        self.at += length
        return text.decode()

    def value(self, type_: int) -> Any:
        """Return the next value of metadata."""
        if type_ == _STRING:
            return self.string()
        if type_ == _ARRAY:
            item = self.number("I")
            if item == _ARRAY:
                raise ValueError("an array of arrays")
            return [self.value(item) for _ in range(self.count())]
        if type_ not in _SCALARS:
            raise ValueError(f"a value of type {type_}")
        return self.number(_SCALARS[type_])

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return the name, the shape, the type and the offset of the next tensor."""
        name, num_dimensions = self.string(), self.number("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"{name} has {num_dimensions} dimensions")
        dimensions = [self.number("Q") for _ in range(num_dimensions)]
        return name, tuple(reversed(dimensions)), self.number("I"), self.number("Q")
