"""A safetensors file, memory-mapped: the `safetensors` library reads it and checks its header before any tensor.

Knows how the library's errors become one line, and which bytes identify a file. Not what the tensors mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from radixlm.runtime.errors import CorruptSource, SourceNotFound
from safetensors import SafetensorError, safe_open

from .checkpoint import one_line

_open: Any = safe_open  # whose methods have no types


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's type by the format's name, such as "BF16", and its shape."""

    dtype: str
    shape: tuple[int, ...]


class SafetensorsFile:
    """An open file: `tensors` by name, `header` as stored, `size` in bytes."""

    def __init__(self, path: Path) -> None:
        """Raises SourceNotFound for a file that cannot be read, CorruptSource where header and size disagree."""
        self.path = path
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
            name: StoredTensor(part.get_dtype(), tuple(part.get_shape())) for name, part in self._slices.items()
        }

    def values(self, name: str, rows: slice | None = None) -> NDArray[Any]:
        """A copy of a tensor, or of the rows `[start, stop)` of one, of the type that is stored."""
        values: NDArray[Any] = self._slices[name][rows or slice(None)]
        return values

    def sample(self, name: str, num_bytes: int) -> bytes:
        """The first bytes of a tensor."""
        num_rows = -(-num_bytes // max(1, self.values(name, slice(0, 1)).nbytes))
        rows = slice(0, min(num_rows, self.tensors[name].shape[0]))
        return self.values(name, rows).tobytes()[:num_bytes]

    def close(self) -> None:
        """Drop the mapping."""
        self._slices = {}
        self._file.__exit__(None, None, None)
