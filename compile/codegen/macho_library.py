"""Write the load commands and tables of a dynamic library for macOS on Arm (Mach-O). Knows no machine code.

The formats are those of Apple's <mach-o/loader.h>, <mach-o/nlist.h> and <kern/cs_blobs.h>. macOS runs signed code only,
so the library ends with an ad-hoc signature, which names no signer.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

PAGE_BYTES = 1 << 14  # of the system
HEADER_BYTES = 1 << 12  # room for the header and the load commands
_TEXT, _DATA, _LINKEDIT = "__TEXT", "__DATA", "__LINKEDIT"
_ARM64, _DYLIB = 0x0100000C, 6  # the CPU type and the file type
_FLAGS = 0x100084  # MH_DYLDLINK, MH_TWOLEVEL, MH_NO_REEXPORTED_DYLIBS
_CODE, _ZEROS = 0x80000400, 1  # section flags: instructions; zeros that are not in the file
_NAME = "@rpath/model.dylib"  # the install name, which is unused: the library is opened by path
_LIBSYSTEM = "/usr/lib/libSystem.B.dylib"
_MACOS, _VERSION = 1, 14 << 16 | 4 << 8  # 14.4: the first with os_sync_wait_on_address
_ANY_LIBRARY = -2 & 15  # BIND_SPECIAL_DYLIB_FLAT_LOOKUP
_TABLE_ALIGN = 16
_CODE_PAGE_BYTES, _DIRECTORY_BYTES, _SHA256 = 1 << 12, 88, 2  # sizes and the hash type of the signature
_IDENTITY = b"radixlm\0"


@dataclass(frozen=True)
class MachOSection:
    """A section: `size` bytes at address `begin`, which is its file offset, too, unless it is all zeros."""

    name: str
    segment: str
    begin: int
    size: int
    align: int
    flags: int = 0

    @classmethod
    def of(cls, name: str, begin: int, size: int) -> MachOSection:
        """Return the section of a range that the linker made."""
        section, segment, flags = _PARTS[name]
        return cls(section, segment, begin, size, min(begin & -begin, PAGE_BYTES), flags)

    @property
    def is_zeros(self) -> bool:
        """True if the section takes no room in the file."""
        return self.flags == _ZEROS


_PARTS = {
    ".rodata": ("__const", _TEXT, 0),
    ".text": ("__text", _TEXT, _CODE),
    ".plt": ("__stubs", _TEXT, _CODE),
    ".got": ("__got", _DATA, 0),
    ".data": ("__data", _DATA, 0),
    ".bss": ("__bss", _DATA, _ZEROS),
}


def write_library(
    content: bytes,
    parts: Sequence[MachOSection],
    *,
    exports: Mapping[str, int],
    imports: Mapping[str, Sequence[int]],
    rebased: Iterable[int],
) -> bytes:
    """Return the bytes of the library.

    Args:
        content: all sections but zeros, with room for the header; `__DATA` begins on a page.
        exports: addresses by C name.
        imports: by C name, the words in `__DATA` that receive the address.
        rebased: the words in `__DATA` that hold an address, to which the library's base is added.
    """
    data = min(part.begin for part in parts if part.segment == _DATA)
    linkedit = _padded(len(content), PAGE_BYTES)  # file offset of the segment of tables
    linkedit_address = max(linkedit, _padded(max(part.begin + part.size for part in parts), PAGE_BYTES))
    file = bytearray(content.ljust(linkedit, b"\0"))
    symbols, names = _symbols(exports, imports, parts)
    places: list[int] = []  # offset and size of each table
    for table in (_rebases(rebased, data), _binds(imports, data), _export_trie(exports), symbols, names):
        size = _padded(len(table), _TABLE_ALIGN)
        places += len(file), size
        file += table.ljust(size, b"\0")
    tables, symbols_begin, names_place = places[:6], places[6], places[8:]
    signed, signature_bytes = len(file), _signature_bytes(len(file))
    linkedit_bytes = signed + signature_bytes - linkedit
    of_segment = {name: [part for part in parts if part.segment == name] for name in (_TEXT, _DATA)}
    # first and number of the local, exported and imported symbols
    counts = (0, 0, 0, len(exports), len(exports), len(imports))
    commands = [
        _segment(_TEXT, (0, data, 0, data), 5, of_segment[_TEXT]),
        _segment(_DATA, (data, linkedit_address - data, data, linkedit - data), 3, of_segment[_DATA]),
        _segment(_LINKEDIT, (linkedit_address, _padded(linkedit_bytes, PAGE_BYTES), linkedit, linkedit_bytes), 1, ()),
        _command(0xD, "4I", 24, 1, 1 << 16, 1 << 16, text=_NAME),  # LC_ID_DYLIB
        _command(0x80000022, "10I", *tables[:4], 0, 0, 0, 0, *tables[4:]),  # LC_DYLD_INFO_ONLY
        _command(0x2, "4I", symbols_begin, len(exports) + len(imports), *names_place),  # LC_SYMTAB
        _command(0xB, "18I", *counts, *[0] * 12),  # LC_DYSYMTAB
        _command(0x1B, "16s", hashlib.sha256(file).digest()[:16]),  # LC_UUID
        _command(0x32, "4I", _MACOS, _VERSION, _VERSION, 0),  # LC_BUILD_VERSION
        _command(0xC, "4I", 24, 1, 1 << 16, 1 << 16, text=_LIBSYSTEM),  # LC_LOAD_DYLIB
        _command(0x1D, "2I", signed, signature_bytes),  # LC_CODE_SIGNATURE
    ]
    size = sum(map(len, commands))
    header = struct.pack("<8I", 0xFEEDFACF, _ARM64, 0, _DYLIB, len(commands), size, _FLAGS, 0) + b"".join(commands)
    assert len(header) <= HEADER_BYTES
    file[: len(header)] = header
    return bytes(file) + _signature(bytes(file), executable_bytes=data).ljust(signature_bytes, b"\0")


def _padded(size: int, align: int) -> int:
    """Return `size` rounded up to a multiple of `align`."""
    return size + -size % align


def _command(kind: int, layout: str, *values: int | bytes, text: str = "") -> bytes:
    """Return a load command: its kind and size, then `values`, then `text` padded to eight bytes."""
    body = struct.pack(f"<{layout}", *values)
    if text:
        body += text.encode().ljust(_padded(len(text) + 1, 8), b"\0")
    return struct.pack("<II", kind, 8 + len(body)) + body


def _segment(name: str, place: tuple[int, int, int, int], access: int, parts: Sequence[MachOSection]) -> bytes:
    """Return a segment and its sections. `place`: address and bytes in memory, offset and bytes in the file."""
    sections = b""
    for part in parts:
        where = (part.begin, part.size, 0 if part.is_zeros else part.begin, part.align.bit_length() - 1)
        names = (part.name.encode(), part.segment.encode())
        sections += struct.pack("<16s16sQQII5I4x", *names, *where, 0, 0, part.flags, 0, 0)
    values = (name.encode(), *place, access, access, len(parts), 0)
    return _command(0x19, f"16s4QiiII{len(sections)}s", *values, sections)


def _symbols(exports: Mapping[str, int], imports: Iterable[str], parts: Sequence[MachOSection]) -> tuple[bytes, bytes]:
    """Return the symbol table, for debuggers, and its string table."""
    rows, names = b"", b" \0"
    for name, address in exports.items():
        home = next(number for number, part in enumerate(parts, 1) if address <= part.begin + part.size)
        rows += struct.pack("<IBBHQ", len(names), 0xF, home, 0, address)
        names += f"_{name}".encode() + b"\0"
    for name in imports:
        rows += struct.pack("<IBBHQ", len(names), 1, 0, (_ANY_LIBRARY | 0xF0) << 8, 0)
        names += f"_{name}".encode() + b"\0"
    return rows, names


def _rebases(words: Iterable[int], data_begin: int) -> bytes:
    """Return the rebase program, which adds the library's base to words of `__DATA` (segment 1)."""
    code = b"\x11"  # pointers
    for word in sorted(words):
        code += b"\x21" + _number(word - data_begin) + b"\x51"  # set the offset; rebase one word
    return code + b"\0"


def _binds(imports: Mapping[str, Sequence[int]], data_begin: int) -> bytes:
    """Return the bind program, which fills words with addresses of other libraries' symbols."""
    code = bytes([0x30 | _ANY_LIBRARY, 0x51])  # pointers
    for name, words in imports.items():
        code += b"\x40" + f"_{name}".encode() + b"\0"
        for word in words:
            code += b"\x71" + _number(word - data_begin) + b"\x90"
    return code + b"\0"


def _export_trie(exports: Mapping[str, int]) -> bytes:
    """Return the trie in which the dynamic linker finds exports; its edges are parts of names."""
    nodes: list[tuple[bytes, list[tuple[bytes, int]]]] = []  # the payload of a node's own name, and its edges

    def add(names: Sequence[tuple[bytes, int]]) -> int:
        """Add a node for names without their common beginning. Returns the node's number."""
        own = [address for name, address in names if not name]
        terminal = b"\0" + _number(own[0]) if own else b""
        number = len(nodes)
        nodes.append((_number(len(terminal)) + terminal, []))
        rest = [one for one in names if one[0]]
        while rest:
            group = [one for one in rest if one[0][0] == rest[0][0][0]]
            rest = [one for one in rest if one[0][0] != group[0][0][0]]
            edge = _common_prefix([name for name, _ in group])
            child = add([(name[len(edge) :], address) for name, address in group])
            nodes[number][1].append((edge, child))
        return number

    add([(f"_{name}".encode(), address) for name, address in sorted(exports.items())])
    offsets = [0] * len(nodes)
    while True:  # an encoded offset's length depends on the offset; lengths only grow
        encoded = [
            said + bytes([len(edges)]) + b"".join(edge + b"\0" + _number(offsets[child]) for edge, child in edges)
            for said, edges in nodes
        ]
        new = [sum(map(len, encoded[:number])) for number in range(len(nodes))]
        if new == offsets:
            return b"".join(encoded)
        offsets = new


def _common_prefix(names: Sequence[bytes]) -> bytes:
    """Return the longest common beginning of all names."""
    first, last = min(names), max(names)
    length = next((at for at, byte in enumerate(first) if last[at] != byte), len(first))
    return first[:length]


def _number(value: int) -> bytes:
    """Encode a number in groups of seven bits, lowest first (ULEB128).

    >>> _number(300).hex()
    'ac02'
    """
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def _signature_bytes(signed: int) -> int:
    """Return the size of the signature of `signed` bytes."""
    num_pages = -(-signed // _CODE_PAGE_BYTES)
    return _padded(20 + _DIRECTORY_BYTES + len(_IDENTITY) + 32 * num_pages, _TABLE_ALIGN)


def _signature(file: bytes, *, executable_bytes: int) -> bytes:
    """Return an ad-hoc signature: a digest of each page. Its numbers are big-endian."""
    pages = [file[begin : begin + _CODE_PAGE_BYTES] for begin in range(0, len(file), _CODE_PAGE_BYTES)]
    hashes = _DIRECTORY_BYTES + len(_IDENTITY)
    length = hashes + 32 * len(pages)
    version, made_by_linker = 0x20400, 0x20002
    numbers = (length, version, made_by_linker, hashes, _DIRECTORY_BYTES, 0, len(pages), len(file))
    digests = (32, _SHA256, 0, _CODE_PAGE_BYTES.bit_length() - 1)
    executable = (0, executable_bytes, 0)
    directory = struct.pack(">9I4B4IQ3Q", 0xFADE0C02, *numbers, *digests, *[0] * 5, *executable)
    directory += _IDENTITY + b"".join(hashlib.sha256(page).digest() for page in pages)
    return struct.pack(">5I", 0xFADE0CC0, 20 + length, 1, 0, 20) + directory
