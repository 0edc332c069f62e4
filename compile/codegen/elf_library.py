"""Write the headers and tables of an ELF shared library. Knows ranges of a file, and no machine code.

Every address is an offset in the file as well. The format is in the System V ABI (gABI, "Program Loading and Dynamic
Linking").
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

HEADER_BYTES, SEGMENT_BYTES = 64, 56
_SECTION_BYTES = 64
_SHARED = 3  # e_type: ET_DYN


class Kind(IntEnum):
    """Content of a range of the file (sh_type)."""

    CONTENT = 1
    NAMES = 3
    RELOCATIONS = 4
    HASH_TABLE = 5
    DYNAMIC = 6
    ZEROS = 8
    SYMBOLS = 11


class Use(IntEnum):
    """Memory access of a range (sh_flags)."""

    READ = 2
    WRITE = 3
    EXECUTE = 6


class SegmentKind(IntEnum):
    """Type of a segment, as the dynamic linker reads it (p_type)."""

    LOAD = 1
    DYNAMIC = 2
    EH_FRAME = 0x6474E550
    STACK = 0x6474E551


_ACCESS = {Use.READ: 4, Use.WRITE: 6, Use.EXECUTE: 5}  # p_flags


@dataclass(frozen=True)
class Range:
    """Bytes of the library that have a name in its section table.

    `link` names the range that holds its symbols or names.
    """

    name: str
    begin: int
    size: int
    kind: Kind
    use: Use
    link: str = ""
    item_bytes: int = 0

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.begin + self.size


@dataclass(frozen=True)
class Segment:
    """Bytes `[begin, end)` of memory; the first `file_bytes` of them are in the file."""

    kind: SegmentKind
    use: Use
    begin: int
    end: int
    file_bytes: int
    align: int


class Names:
    """A string table: names, each ended by a zero byte."""

    def __init__(self, names: Iterable[str]) -> None:
        self._offsets: dict[str, int] = {}
        content = bytearray(1)
        for name in names:
            if name not in self._offsets:
                self._offsets[name] = len(content)
                content += name.encode() + b"\0"
        self.content = bytes(content)

    def offset(self, name: str) -> int:
        """Return the offset at which a name begins."""
        return self._offsets[name]


def hash_table(names: Sequence[str]) -> bytes:
    """Return the hash table of the dynamic linker for symbols, with as many buckets as names."""
    buckets, chain = [0] * len(names), [0] * len(names)
    for index in range(len(names) - 1, 0, -1):
        bucket = _hash(names[index]) % len(names)
        chain[index] = buckets[bucket]
        buckets[bucket] = index
    return struct.pack(f"<{2 + 2 * len(names)}I", len(names), len(names), *buckets, *chain)


def with_headers(content: bytes, machine: int, segments: Sequence[Segment], ranges: Sequence[Range]) -> bytes:
    """Return `content` with headers in the room left for them, and with the section table appended."""
    names = Names([*(part.name for part in ranges), ".shstrtab"])
    index_of = {part.name: index for index, part in enumerate(ranges, 1)}
    file = bytearray(content)
    _pad(file)
    names_begin = len(file)
    file += names.content
    _pad(file)
    sections_begin = len(file)
    file += bytes(_SECTION_BYTES)
    for part in (*ranges, Range(".shstrtab", names_begin, len(names.content), Kind.NAMES, Use.READ)):
        is_loaded = part.name in index_of
        place = (part.use, part.begin, part.begin) if is_loaded else (0, 0, part.begin)
        info = int(part.kind == Kind.SYMBOLS)  # symbols from this index on are global
        link = index_of.get(part.link, 0)
        row = (names.offset(part.name), part.kind, *place, part.size, link, info, 1, part.item_bytes)
        file += struct.pack("<IIQQQQIIQQ", *row)
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    counts = (HEADER_BYTES, SEGMENT_BYTES, len(segments), _SECTION_BYTES, len(ranges) + 2, len(ranges) + 1)
    numbers = (_SHARED, machine, 1, 0, HEADER_BYTES, sections_begin, 0, *counts)
    header = struct.pack("<16sHHIQQQIHHHHHH", ident, *numbers)
    for one in segments:
        sizes = (one.file_bytes, one.end - one.begin, one.align)
        header += struct.pack("<IIQQQQQQ", one.kind, _ACCESS[one.use], *[one.begin] * 3, *sizes)
    file[: len(header)] = header
    return bytes(file)


def _pad(file: bytearray) -> None:
    """Append zeros up to a multiple of 8 bytes."""
    file += bytes(-len(file) % 8)


def _hash(name: str) -> int:
    """Return the ABI's hash of a name, 28 bits."""
    number = 0
    for byte in name.encode():
        number = (number << 4) + byte
        high = number & 0xF0000000
        number = (number ^ high >> 24) & ~high & 0xFFFFFFFF
    return number
