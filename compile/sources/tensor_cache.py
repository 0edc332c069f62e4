"""MLC's weights: `tensor-cache.json` (older: `ndarray-cache.json`) and the shards of raw arrays that it lists.

Knows where an array lies in which shard; not what arrays mean. Source: `dump_tensor_cache` of TVM's tvmjs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.errors import CorruptSource, SourceNotFound, UnsupportedTensor

from .checkpoint import checked

INDEXES = ("tensor-cache.json", "ndarray-cache.json")
_DTYPES: dict[str, tuple[str, np.dtype[Any]]] = {  # safetensors' name for each
    "uint32": ("U32", np.dtype("<u4")),
    "int32": ("I32", np.dtype("<i4")),
    "float16": ("F16", np.dtype("<f2")),
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
    "float32": ("F32", np.dtype("<f4")),
}

Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _Record(msgspec.Struct, rename="camel"):
    name: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 40)], ...]
    dtype: str
    format: str
    nbytes: Annotated[int, msgspec.Meta(ge=0)] = msgspec.field(name="nbytes")
    byte_offset: Size


class _Shard(msgspec.Struct, rename="camel"):
    data_path: str
    format: str
    nbytes: Annotated[int, msgspec.Meta(ge=0)] = msgspec.field(name="nbytes")
    records: list[_Record]


class _Index(msgspec.Struct):
    records: list[_Shard]


@dataclass(frozen=True)
class CachedArray:
    """An array in a shard."""

    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    stored: np.dtype[Any]

    def __getitem__(self, index: slice | tuple[slice, ...]) -> NDArray[Any]:
        return np.array(np.memmap(self.path, self.stored, "r", self.offset, self.shape)[index])


def cached_arrays(directory: Path, index: Mapping[str, Any]) -> dict[str, CachedArray]:
    """The arrays by name that `index`, the content of one of `INDEXES`, says are in the directory.

    Raises CorruptSource for a shard that is missing or of another size, and for an array that reaches over its shard's
    end or has other bytes than its shape asks for; UnsupportedTensor for a type that is not read.
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
