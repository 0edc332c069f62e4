"""A safetensors file, memory-mapped; its header is checked strictly before any tensor is touched.

Knows the format (8 bytes of length, a JSON header, the data), not what the tensors mean. Own parser because
the library's NumPy side has no bfloat16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.errors import CorruptSource, SourceNotFound

MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class StoredTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of the header; `data_offsets` is the half-open interval of its bytes in the data section."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class SafetensorsFile:
    """An open file: `tensors` by name, `header` as stored, `size` in bytes."""

    def __init__(self, path: Path) -> None:
        """Raises SourceNotFound for a file that cannot be read, CorruptSource where sizes disagree."""
        self.path = path
        try:
            self.size = path.stat().st_size
            self._data: NDArray[np.uint8] = np.memmap(path, np.uint8, "r") if self.size else np.empty(0, np.uint8)
        except OSError as error:
            raise SourceNotFound(f"{path} cannot be read: {error.strerror or error}") from error
        self.header = self._read_header()
        self._data_start = 8 + len(self.header)
        self.tensors = self._parse(self.header)

    def values(self, name: str) -> NDArray[Any]:
        """A view of a tensor in the mapping, as stored; raises KeyError for dtypes not in `DTYPES`."""
        tensor = self.tensors[name]
        start, stop = (self._data_start + offset for offset in tensor.data_offsets)
        return self._data[start:stop].view(DTYPES[tensor.dtype]).reshape(tensor.shape)

    def sample(self, name: str, num_bytes: int) -> bytes:
        """The first bytes of a tensor."""
        start, stop = (self._data_start + offset for offset in self.tensors[name].data_offsets)
        return self._data[start : min(stop, start + num_bytes)].tobytes()

    def close(self) -> None:
        """Drop the mapping; arrays that came from it keep it alive until they go."""
        self.tensors = {}
        self._data = np.empty(0, np.uint8)

    def _read_header(self) -> bytes:
        length = int.from_bytes(self._data[:8].tobytes(), "little") if self.size >= 8 else -1
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise CorruptSource(f"{self.path} is no safetensors file; fetch it again")
        if 8 + length > self.size:
            raise self._truncated(8 + length)
        return self._data[8 : 8 + length].tobytes()

    def _parse(self, header: bytes) -> dict[str, StoredTensor]:
        try:
            entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
            entries.pop("__metadata__", None)
            tensors = {name: msgspec.json.decode(raw, type=StoredTensor) for name, raw in entries.items()}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CorruptSource(f"{self.path} has a damaged header ({error}); fetch it again") from error
        end = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
            start, stop = tensor.data_offsets
            num_bytes = _num_bytes(tensor)
            if start != end or stop < start or min(tensor.shape, default=0) < 0:
                raise CorruptSource(f"{self.path}: {name} begins at {start}, not at {end} where the last one ends")
            if num_bytes is not None and stop - start != num_bytes:
                raise CorruptSource(f"{self.path}: {name} has {stop - start} bytes, its shape needs {num_bytes}")
            end = stop
        if self._data_start + end > self.size:
            raise self._truncated(self._data_start + end)
        return tensors

    def _truncated(self, needed: int) -> CorruptSource:
        return CorruptSource(f"{self.path} is truncated: it has {self.size} bytes, {needed} are needed; fetch it again")


def _num_bytes(tensor: StoredTensor) -> int | None:
    """What the shape asks for; None for dtypes that are not read here."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        return None
    num_bytes = dtype.itemsize
    for dimension in tensor.shape:
        num_bytes *= dimension
    return num_bytes


DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
