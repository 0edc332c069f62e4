"""Read a relocatable ELF object, as LLVM writes it: its sections, symbols and relocations.

Only content that is loaded into memory is read; debug information is left out. The format is in the System V ABI (gABI,
"Object Files"), 64 bits and little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from radixlm.runtime.errors import CompileError

X86_64, AARCH64 = 62, 183  # e_machine
_SYMBOLS, _RELOCATIONS, _NO_BITS = 2, 4, 8  # sh_type: SHT_SYMTAB, SHT_RELA, SHT_NOBITS
_WRITE, _ALLOCATE, _EXECUTE, _THREAD_LOCAL = 0x1, 0x2, 0x4, 0x400  # sh_flags
_LOCAL, _WEAK = 0, 2  # binding of a symbol
_SOURCE_FILE = 4  # type of a symbol
_DEFAULT = 0  # visibility of a symbol; symbols of another visibility are hidden
_ABSOLUTE, _COMMON = 0xFFF1, 0xFFF2  # special section indices
_MAX_ALIGN, _MAX_BYTES = 4096, 1 << 28  # limits of a section
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QIIq")


@dataclass(frozen=True)
class Relocation:
    """A position in a section that depends on a symbol's address; `type` is the machine's number of the formula."""

    offset: int
    type: int
    symbol: Symbol
    addend: int


@dataclass(frozen=True, eq=False)
class Section:
    """Bytes that are loaded into memory; zeros (`.bss`) if `content` is None."""

    name: str
    size: int
    align: int
    content: bytes | None
    is_writable: bool
    is_code: bool
    relocations: list[Relocation] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Symbol:
    """A name for the address `value` bytes into a section; another object defines it if `section` is None.

    A hidden symbol is visible in the library alone.
    """

    name: str
    section: Section | None
    value: int
    size: int
    type: int
    is_local: bool
    is_weak: bool
    is_hidden: bool


@dataclass(frozen=True)
class ElfObject:
    """One object file: its machine, and the sections and symbols that it defines."""

    machine: int
    sections: tuple[Section, ...]
    symbols: tuple[Symbol, ...]

    @classmethod
    def parse(cls, data: bytes) -> ElfObject:
        """Read an object file. Raises CompileError if it is not one, or has features that kernels never use."""
        try:
            return _parse(data)
        except (struct.error, IndexError, ValueError, OverflowError) as error:
            raise CompileError(
                f"a compiled kernel is not a whole object file ({error}); clear the kernel cache"
            ) from None


@dataclass(frozen=True)
class _Row:
    """A row of the section table."""

    name: str
    type: int
    flags: int
    content: bytes
    size: int
    link: int
    info: int
    align: int


def _parse(data: bytes) -> ElfObject:
    """Read an object file. An invalid one raises CompileError, struct.error or ValueError."""
    ident, kind, machine, *_, num_sections, names_index = _HEADER.unpack_from(data)
    if ident[:6] != b"\x7fELF\x02\x01" or kind != 1:
        raise CompileError("a compiled kernel is not a relocatable ELF object of 64 bits; clear the kernel cache")
    rows = _rows(data, num_sections, names_index)
    sections = {index: _section(row) for index, row in enumerate(rows) if row.flags & _ALLOCATE}
    symbols: list[Symbol] = []
    for row in rows:
        if row.type == _SYMBOLS:
            symbols = [_symbol(one, rows[row.link].content, sections) for one in _SYMBOL.iter_unpack(row.content)]
    for row in rows:
        if row.type == _RELOCATIONS and row.info in sections:
            section = sections[row.info]
            section.relocations.extend(_relocations(row.content, symbols))
            if section.content is None or any(not 0 <= one.offset <= section.size - 4 for one in section.relocations):
                raise ValueError(f"a relocation lies outside of {section.name}")
    return ElfObject(machine, tuple(sections.values()), tuple(symbols))


def _rows(data: bytes, num_sections: int, names_index: int) -> list[_Row]:
    """Return the rows of the section table, with contents and names."""
    offset = _HEADER.unpack_from(data)[6]
    table = [_SECTION.unpack_from(data, offset + index * _SECTION.size) for index in range(num_sections)]
    names = data[table[names_index][4] :]
    rows = []
    for name, kind, flags, _, begin, size, link, info, align, _ in table:
        content = b"" if kind == _NO_BITS else data[begin : begin + size]
        if kind != _NO_BITS and len(content) != size:
            raise struct.error(f"a section of {size} bytes has {len(content)}")
        rows.append(_Row(_text(names, name), kind, flags, content, size, link, info, max(align, 1)))
    return rows


def _section(row: _Row) -> Section:
    """Return the section of a row. Raises CompileError for thread-local data, ValueError for invalid sizes."""
    if row.flags & _THREAD_LOCAL:
        raise CompileError(f"a compiled kernel has thread-local data ({row.name}), which cannot be linked")
    if row.align & (row.align - 1) or row.align > _MAX_ALIGN or row.size > _MAX_BYTES:
        raise ValueError(f"{row.name} has {row.size} bytes, aligned to {row.align}")
    content = None if row.type == _NO_BITS else row.content
    return Section(row.name, row.size, row.align, content, bool(row.flags & _WRITE), bool(row.flags & _EXECUTE))


def _symbol(row: tuple[int, ...], names: bytes, sections: dict[int, Section]) -> Symbol:
    """Return the symbol of a row of the symbol table. Raises CompileError or ValueError if it is in no section."""
    name, info, other, index, value, size = row
    binding, kind, section = info >> 4, info & 15, sections.get(index)
    if index in (_ABSOLUTE, _COMMON) and kind != _SOURCE_FILE:
        raise CompileError(f"the symbol {_text(names, name)} of a compiled kernel lies in no section")
    if section is not None and value > section.size:
        raise ValueError(f"a symbol lies outside of {section.name}")
    is_hidden = other & 3 != _DEFAULT
    return Symbol(_text(names, name), section, value, size, kind, binding == _LOCAL, binding == _WEAK, is_hidden)


def _relocations(content: bytes, symbols: list[Symbol]) -> Iterator[Relocation]:
    """Yield the relocations in the content of a relocation section."""
    for offset, kind, symbol, addend in _RELOCATION.iter_unpack(content):
        yield Relocation(offset, kind, symbols[symbol], addend)


def _text(names: bytes, offset: int) -> str:
    """Return the zero-terminated text at `offset` of a string table."""
    return names[offset : names.index(0, offset)].decode()
