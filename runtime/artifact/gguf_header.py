"""Check a GGUF file by its header: whether it is one, and whether the file ends before its last tensor.

Reads no tensor, and knows no type of tensors. `compile/sources` reads the whole file.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from ..errors import CorruptSource, SourceNotFound

GGUF_MAGIC = b"GGUF"
MAX_STRINGS = 1 << 20  # maximum of one array: twice the merges of the largest vocabulary, Gemma's
MAX_TENSORS = 1 << 16
_POINTER = b"version https://git-lfs"  # beginning of a pointer file of git
_OF_DIRECTORIES = (".safetensors", ".json", ".bin", ".model")  # files of models in a directory
_VERSIONS = (2, 3)  # with lengths of 64 bits
_STRING, _ARRAY = 8, 9
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of a value, by its type
_HEADER = struct.Struct("<4sIQQ")  # magic, version, number of tensors and of keys
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


def require_content(path: Path) -> None:
    """Raise SourceNotFound for an unreadable file, CorruptSource for a pointer file of git."""
    try:
        with path.open("rb") as file:
            begin = file.read(len(_POINTER))
    except OSError as error:
        raise SourceNotFound(f"{path} cannot be read: {error.strerror or error}") from error
    if begin == _POINTER:
        raise CorruptSource(
            f"{path} is a Git LFS pointer, not the file that it stands for; run git lfs pull in {path.parent}"
        )


def require_gguf(path: Path) -> None:
    """Raise SourceNotFound for a file of another kind, CorruptSource for an empty one; else as `require_content`."""
    require_content(path)
    with path.open("rb") as file:
        magic = file.read(len(GGUF_MAGIC))
    if not magic:
        raise CorruptSource(f"{path} is no valid GGUF file (it is empty); fetch it again")
    if not GGUF_MAGIC.startswith(magic):
        whole = f"give its directory, {path.parent}" if path.suffix in _OF_DIRECTORIES else "give a .gguf file"
        raise SourceNotFound(f"{path} is no valid GGUF file (it begins with {magic!r}); {whole}, or a model directory")


def check_gguf_header(path: Path) -> None:
    """Raise CorruptSource if a file ends before its last tensor begins; else as `require_gguf`.

    A header that cannot be followed is left to the compiler, which says more.
    """
    require_gguf(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        size = len(data)
        try:
            needed = _least_bytes(data)
        except (struct.error, OverflowError):  # a read past the end
            raise CorruptSource(
                f"{path} is no valid GGUF file (its header goes beyond its {size:,} bytes); fetch it again"
            ) from None
    if needed > size:
        raise CorruptSource(f"{path} is truncated: it has {size:,} bytes and needs {needed:,} at least; fetch it again")


def _least_bytes(data: mmap.mmap) -> int:
    """Return the offset at which the last tensor begins, 0 if the header cannot be followed.

    Raises:
        struct.error, OverflowError: the header ends beyond the file.
    """
    _, version, num_tensors, num_keys = _HEADER.unpack_from(data)
    if version not in _VERSIONS or max(num_tensors, num_keys) > MAX_TENSORS:
        return 0
    at = _HEADER.size
    for _ in range(num_keys):
        at = _after_string(data, at)
        (type_id,) = _U32.unpack_from(data, at)
        end = _after_value(data, at + _U32.size, type_id)
        if end is None:
            return 0
        at = end
    last = 0
    for _ in range(num_tensors):
        at = _after_string(data, at)
        at += _U32.size + _U64.size * _U32.unpack_from(data, at)[0] + _U32.size  # its dimensions and its type
        last = max(last, _U64.unpack_from(data, at)[0])
        at += _U64.size
    return at + last


def _after_value(data: mmap.mmap, at: int, type_id: int) -> int | None:
    """Return the offset after a value; None for an unknown type, or too many strings."""
    if type_id == _STRING:
        return _after_string(data, at)
    if type_id != _ARRAY:
        return at + _BYTES[type_id] if type_id in _BYTES else None
    (element,), (count,) = _U32.unpack_from(data, at), _U64.unpack_from(data, at + _U32.size)
    at += _U32.size + _U64.size
    if element in _BYTES:
        return at + int(count) * _BYTES[element]
    if element != _STRING or count > MAX_STRINGS:
        return None
    length_at = _U64.unpack_from
    for _ in range(count):  # hundreds of thousands: without a call for each
        at += _U64.size + length_at(data, at)[0]
    return at


def _after_string(data: mmap.mmap, at: int) -> int:
    """Return the offset after a string: a length and its bytes."""
    return at + _U64.size + int(_U64.unpack_from(data, at)[0])
