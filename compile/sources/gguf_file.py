"""A GGUF file's metadata and tensors, read so that a truncated or hostile file is an error and nothing worse.

The `gguf` package parses. Here every read is checked against the file's size, and every error becomes one sentence.
Arrays are read at once instead of element by element: SmolLM2's 49,152 tokens take 35 MB of memory, not 180 MB.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.errors import CorruptSource, SourceError, SourceNotFound, UnsupportedTensor

from .source import one_line, require_content

MAX_STRINGS = 1 << 20  # in one array: twice as many as the merges of the largest vocabulary, Gemma's
MAX_TENSORS = 1 << 16
NOT_READ = "which cannot be read here; take a Q4_K_M, Q8_0 or F16 file of the same model"  # said of a tensor's type
_LENGTH = struct.Struct("<Q").unpack_from  # of a string
_MAGIC = b"GGUF"
_OF_DIRECTORIES = (".safetensors", ".json", ".bin", ".model")  # files that make a model together
_TYPE_IDS = frozenset(gguf.GGML_QUANT_SIZES)


class GGUFFile:
    """An open GGUF file: `metadata` by key, `tensors` by name, `header_bytes` before their data."""

    def __init__(self, path: Path) -> None:
        """Raises SourceNotFound for a file that cannot be read, CorruptSource for one that makes no sense, and
        UnsupportedTensor for a type of tensor that the `gguf` package does not know."""
        _require_gguf(path)
        try:
            with np.errstate(over="raise"):
                reader = _BoundedReader(path)
                self.metadata = {key: _contents(field) for key, field in reader.fields.items()}
        except OSError as error:
            raise SourceNotFound(f"{path} cannot be read: {error.strerror or error}") from error
        except SourceError:
            raise
        except Exception as error:  # the parser throws whatever the bytes make it throw
            raise CorruptSource(f"{path} is no valid GGUF file ({one_line(error)}); fetch it again") from error
        self.path = path
        self.data: NDArray[np.uint8] = np.asarray(reader.data)
        self.header_bytes = int(reader.data_offset)
        self.tensors: dict[str, gguf.ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}

    def blocks(self, name: str) -> NDArray[np.uint8]:
        """A tensor's bytes, memory-mapped: uint8 `[rows, bytes of a row]`, or `[bytes]` for a vector."""
        tensor = self.tensors[name]
        at = tensor.data_offset
        data = self.data[at : at + tensor.n_bytes]
        return data if len(tensor.shape) == 1 else data.reshape(int(np.prod(tensor.shape[1:])), -1)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Have the disk read ranges of bytes, `(start, size)`, all at once rather than each when it is needed."""
        if hasattr(os, "posix_fadvise"):
            with self.path.open("rb") as file:
                for start, size in ranges:
                    os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_WILLNEED)

    def release(self) -> None:
        """Let go of the pages that have been read; they are read again when they are asked for."""
        memory = getattr(self.data, "base", None)
        while isinstance(memory, np.ndarray):
            memory = memory.base
        if isinstance(memory, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            memory.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Drop the mapping; arrays that came from it keep it alive until they go."""
        self.tensors = {}
        self.data = np.empty(0, np.uint8)


def _contents(field: gguf.ReaderField) -> Any:
    """The value of a field; strings of an array are decoded here, since the package takes a microsecond for each."""
    if field.types != [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING]:
        return field.contents()
    return [bytes(field.parts[index]).decode() for index in field.data]


def _require_gguf(path: Path) -> None:
    """Raise SourceNotFound for a file of another kind, CorruptSource for a version that is not read."""
    require_content(path)
    with path.open("rb") as file:
        magic, version = file.read(4), int.from_bytes(file.read(4), "little")
    if not _MAGIC.startswith(magic):
        whole = f"give its directory, {path.parent}" if path.suffix in _OF_DIRECTORIES else "give a .gguf file"
        raise SourceNotFound(f"{path} is no valid GGUF file (it begins with {magic!r}); {whole}, or a model directory")
    # one with nothing below is of a big-endian file
    if version & 0xFFFF and version not in gguf.gguf_reader.READER_SUPPORTED_VERSIONS:
        known = " and ".join(map(str, gguf.gguf_reader.READER_SUPPORTED_VERSIONS))
        raise CorruptSource(f"{path} is GGUF version {version}, read are {known}; take a newer conversion of the model")


class _BoundedReader(gguf.GGUFReader):
    """The package's reader, with every read checked against the file's end and every tensor's type named."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(path)

    def _build_tensor_info(self, offs: int, count: int) -> tuple[int, list[gguf.ReaderField]]:
        if count > MAX_TENSORS:
            raise ValueError(f"{count} tensors; {MAX_TENSORS} at most are read")
        found: tuple[int, list[gguf.ReaderField]] = super()._build_tensor_info(offs, count)
        return found

    def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
        for field in fields:
            _, _, num_dimensions, _, (type_id, *_), *_ = field.parts  # after the name's length and the name
            if not num_dimensions[0]:
                raise ValueError(f"{field.name!r} has no dimensions")
            if type_id not in _TYPE_IDS:
                raise UnsupportedTensor(f"{self._path}: {field.name!r} is stored as type {type_id}, {NOT_READ}")
        super()._build_tensors(start_offs, fields)

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> NDArray[Any]:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise EOFError(f"truncated: it has {len(self.data)} bytes and needs {end} at least")
        result: NDArray[Any] = super()._get(offset, dtype, count, override_order)
        return result

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if self.byte_order == "S":
            raise ValueError("it is big-endian; convert it with gguf-convert-endian")
        if raw_type != gguf.GGUFValueType.ARRAY:
            result: tuple[int, list[Any], list[int], list[Any]] = super()._get_field_parts(orig_offs, raw_type)
            return result
        item_type = gguf.GGUFValueType(self._get(orig_offs, np.uint32)[0])
        length = int(self._get(orig_offs + 4, np.uint64)[0])
        types = [gguf.GGUFValueType.ARRAY, item_type]
        if item_type == gguf.GGUFValueType.STRING:
            size, strings = self._strings(orig_offs + 12, length)
            return 12 + size, strings, list(range(length)), types
        if item_type not in self.gguf_scalar_to_np:
            raise ValueError(f"an array of {item_type.name}")
        values = self._get(orig_offs + 12, self.gguf_scalar_to_np[item_type], length)
        return 12 + values.nbytes, [values], [0], types

    def _strings(self, start: int, count: int) -> tuple[int, list[memoryview]]:
        """`count` strings, each a length of 8 bytes and its bytes; and how many bytes they take."""
        if count > MAX_STRINGS:
            raise ValueError(f"an array of {count} strings; {MAX_STRINGS} at most are read")
        strings, at, data, end = list[memoryview](), start, memoryview(self.data.data), len(self.data)
        for _ in range(count):
            if at + 8 > end:
                raise EOFError(f"truncated: it has {end} bytes and needs {at + 8} at least")
            begin = at + 8
            at = begin + _LENGTH(data, at)[0]
            if at > end:
                raise EOFError(f"truncated: it has {end} bytes and needs {at} at least")
            strings.append(data[begin:at])
        return at - start, strings
