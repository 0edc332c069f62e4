"""A safetensors file, memory-mapped: the `safetensors` library reads it and checks its header before any tensor.

Knows how the library's errors become one line, and which bytes identify a file. Not what the tensors mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.errors import CorruptSource, SourceNotFound
from safetensors import SafetensorError, safe_open

from .checkpoint import one_line, require_content

_open: Any = safe_open  # whose methods have no types
_FLOAT8 = {  # which the library does not make arrays of
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}

Index = slice | tuple[slice, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's type by the format's name, such as "BF16", its shape, and its values, read when they are asked for."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[Index], NDArray[Any]]

    def __getitem__(self, index: Index) -> NDArray[Any]:
        return self.read(index)


class SafetensorsFile:
    """An open file: `tensors` by name, `header` as stored, `size` in bytes."""

    def __init__(self, path: Path) -> None:
        """Raises SourceNotFound for a file that cannot be read, CorruptSource where header and size disagree."""
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
        """A copy of a tensor, or of a part of one such as the rows `[start, stop)`, of the type that is stored."""
        tensor, values = self.tensors[name], None
        if tensor.dtype in _FLOAT8:
            values = self._float8(name, tensor)[index or slice(None)] if tensor.shape else self._float8(name, tensor)
        elif tensor.shape and all(tensor.shape):
            values = self._slices[name][index or slice(None)]
        else:  # the library cuts nothing out of nothing
            values = self._file.get_tensor(name)
        return np.array(values)

    def _float8(self, name: str, tensor: StoredTensor) -> NDArray[Any]:
        """The bytes where the header says, which the library has checked."""
        dtype, (begin, _) = _FLOAT8[tensor.dtype], self._entries[name]["data_offsets"]
        if not all(tensor.shape):
            return np.empty(tensor.shape, dtype)
        at = 8 + len(self.header) + begin
        return np.memmap(self.path, dtype, "r", at, tensor.shape or (1,)).reshape(tensor.shape)

    @cached_property
    def _entries(self) -> dict[str, Any]:
        entries: dict[str, Any] = json.loads(self.header)
        return entries

    def close(self) -> None:
        """Drop the mapping."""
        self._slices = {}
        self._file.__exit__(None, None, None)
