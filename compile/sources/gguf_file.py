"""Read a GGUF file's metadata and tensors, so that a truncated or hostile file raises an error and does no harm.

The `gguf` package parses. Here every read is checked against the file's size, and every error becomes one sentence.
Arrays are read at once instead of element by element: SmolLM2's 49,152 tokens take 35 MB of memory, not 180 MB.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.artifact.gguf_header import GGUF_MAGIC, MAX_STRINGS, MAX_TENSORS, require_gguf
from radixlm.runtime.artifact.model_names import part_paths
from radixlm.runtime.errors import CorruptSource, SourceError, SourceNotFound, UnsupportedTensor
from radixlm.runtime.system import expect_reads

from .source import one_line

NOT_READ = "which cannot be read here; take a Q4_K_M, Q8_0 or F16 file of the same model"  # message for a tensor's type
_LENGTH = struct.Struct("<Q").unpack_from  # length of a string
_SPLIT_COUNT, _SPLIT_NUMBER, _SPLIT_TENSORS = "split.count", "split.no", "split.tensors.count"
_SAMPLE_BYTES = 1024  # bytes of each tensor that are part of the fingerprint
_EXPECTED_BYTES = 16 << 10  # first bytes of each tensor that are prefetched: a row shows how a matrix is stored
_TYPE_IDS = frozenset(gguf.GGML_QUANT_SIZES)


class GGUFFile:
    """An open GGUF file, or all parts of a split one: `metadata` by key, `tensors` by name."""

    def __init__(self, path: Path) -> None:
        """Open a file, and the other parts of its model; any part can be given.

        Raises:
            SourceNotFound: a file cannot be read, or a part is missing.
            CorruptSource: a file is invalid, or parts do not belong together.
            UnsupportedTensor: the `gguf` package does not know a type of tensor.
        """
        paths = part_paths(path)
        first = _Part(paths[0])
        count = first.metadata.get(_SPLIT_COUNT, 1)
        if count not in (0, 1, len(paths)):
            raise SourceNotFound(
                f"{paths[0]} is one of {count!r:.40} parts, and its name says {len(paths)}; give the files the names "
                f"that they were made with, such as model-00001-of-{count!r:0>5.5}.gguf"
            )
        self._parts = [first, *map(_Part, paths[1:])]
        for number, part in enumerate(self._parts[1:], 1):
            if part.metadata.get(_SPLIT_NUMBER) != number or part.metadata.get(_SPLIT_COUNT) != count:
                raise CorruptSource(f"{part.path} is not part {number + 1} of {paths[0]}; fetch it again")
        self.path, self.metadata = first.path, first.metadata
        self.tensors: dict[str, gguf.ReaderTensor] = {}
        self._part_of: dict[str, _Part] = {}
        for part in self._parts:
            for tensor in part.tensors:
                self._part_of.setdefault(tensor.name, part)
                self.tensors[tensor.name] = tensor
        num_tensors = sum(len(part.tensors) for part in self._parts)
        expected = self.metadata.get(_SPLIT_TENSORS, num_tensors)
        if len(paths) > 1 and not num_tensors == len(self.tensors) == expected:
            raise CorruptSource(
                f"{paths[0]} and its parts have {num_tensors} tensors with {len(self.tensors)} names, and it says "
                f"{expected!r:.40}; fetch them again"
            )

    def blocks(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor's bytes, memory-mapped: uint8 `[rows, bytes of a row]`, or `[bytes]` for a vector."""
        tensor = self.tensors[name]
        at = tensor.data_offset
        data = self._part_of[name].data[at : at + tensor.n_bytes]
        return data if len(tensor.shape) == 1 else data.reshape(int(np.prod(tensor.shape[1:])), -1)

    def fingerprint(self) -> str:
        """Return a digest of each file's header and size, and of the beginning of each tensor."""
        digest = hashlib.sha256()
        for part in self._parts:
            part.sample(digest)
        return digest.hexdigest()

    def release(self) -> None:
        """Release the memory pages that have been read; they are read again on the next access."""
        for part in self._parts:
            memory = getattr(part.data, "base", None)
            while isinstance(memory, np.ndarray):
                memory = memory.base
            if isinstance(memory, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                memory.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Drop the mapping; arrays read from it keep it alive until they are freed."""
        self.tensors, self._part_of, self._parts = {}, {}, []


class _Part:
    """One file, mapped and parsed; the data of its tensors begin after `header_bytes`."""

    def __init__(self, path: Path) -> None:
        require_gguf(path)
        _require_version(path)
        try:
            with np.errstate(over="raise"):
                reader = _BoundedReader(path)
                self.metadata = {key: _contents(field) for key, field in reader.fields.items()}
        except OSError as error:
            raise SourceNotFound(f"{path} cannot be read: {error.strerror or error}") from error
        except SourceError:
            raise
        except Exception as error:  # the parser raises any exception, depending on the bytes
            raise CorruptSource(f"{path} is no valid GGUF file ({one_line(error)}); fetch it again") from error
        self.path = path
        self.data: NDArray[np.uint8] = np.asarray(reader.data)
        self.header_bytes = int(reader.data_offset)
        self.tensors: list[gguf.ReaderTensor] = reader.tensors

    def sample(self, digest: hashlib._Hash) -> None:
        """Add the header, the size and the beginning of each tensor to a digest."""
        digest.update(self.data[: self.header_bytes].data)
        digest.update(len(self.data).to_bytes(8, "little"))
        samples = [(tensor.data_offset, min(tensor.n_bytes, _SAMPLE_BYTES)) for tensor in self.tensors]
        self._expect((start, _EXPECTED_BYTES) for start, _ in samples)
        for start, size in samples:
            digest.update(self.data[start:][:size].data)

    def _expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Prefetch ranges of bytes, `(start, size)`, in one request instead of one per access."""
        with self.path.open("rb") as file:
            for start, size in ranges:
                expect_reads(file.fileno(), start, size)


def _contents(field: gguf.ReaderField) -> Any:
    """Return the value of a field.

    Strings of an array are decoded here, because the package takes a microsecond for each.
    """
    if field.types != [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING]:
        return field.contents()
    return [bytes(field.parts[index]).decode() for index in field.data]


def _require_version(path: Path) -> None:
    """Raise CorruptSource for an unsupported version."""
    with path.open("rb") as file:
        version = int.from_bytes(file.read(8)[len(GGUF_MAGIC) :], "little")
    # a version whose low bytes are zero is of a big-endian file
    if version & 0xFFFF and version not in gguf.gguf_reader.READER_SUPPORTED_VERSIONS:
        known = " and ".join(map(str, gguf.gguf_reader.READER_SUPPORTED_VERSIONS))
        raise CorruptSource(f"{path} is GGUF version {version}, read are {known}; take a newer conversion of the model")


class _BoundedReader(gguf.GGUFReader):
    """The package's reader, with every read checked against the file's end and every tensor's type named."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(path)

    def _build_tensor_info(self, offs: int, count: int) -> tuple[int, list[gguf.ReaderField]]:
        """Read the tensors' descriptions, `MAX_TENSORS` at most."""
        if count > MAX_TENSORS:
            raise ValueError(f"{count} tensors; {MAX_TENSORS} at most are read")
        found: tuple[int, list[gguf.ReaderField]] = super()._build_tensor_info(offs, count)
        return found

    def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
        """Refuse tensors without dimensions and of types that are not read, then make the others."""
        for field in fields:
            _, _, num_dimensions, _, (type_id, *_), *_ = field.parts  # after the length of the name, and the name
            if not num_dimensions[0]:
                raise ValueError(f"{field.name!r} has no dimensions")
            if type_id not in _TYPE_IDS:
                raise UnsupportedTensor(f"{self._path}: {field.name!r} is stored as type {type_id}, {NOT_READ}")
        super()._build_tensors(start_offs, fields)

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> NDArray[Any]:
        """Return numbers at an offset of the file.

        Raises:
            EOFError: the file ends before them.
        """
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise EOFError(f"truncated: it has {len(self.data)} bytes and needs {end} at least")
        result: NDArray[Any] = super()._get(offset, dtype, count, override_order)
        return result

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        """Return a value's size, arrays, indices of its data and types, as the base class does; read arrays at once."""
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
        """Return `count` strings and their size in bytes; each string is a length of 8 bytes and its bytes."""
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
