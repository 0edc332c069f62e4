"""Write relocatable ELF objects with any sections, symbols and relocations: what a linker is tried with."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

WRITE, ALLOCATE, EXECUTE, THREAD_LOCAL = 1, 2, 4, 0x400
CODE, CONSTANT, DATA = ALLOCATE | EXECUTE, ALLOCATE, ALLOCATE | WRITE
GLOBAL, WEAK, LOCAL = 1, 2, 0
HIDDEN = 2


@dataclass(frozen=True)
class Part:
    """A section; `relocations` are (offset, type, name of a symbol, addend). Without content it is so many zeros."""

    name: str
    flags: int
    content: bytes = b""
    relocations: Sequence[tuple[int, int, str, int]] = ()
    align: int = 16
    num_zeros: int = 0


@dataclass(frozen=True)
class Name:
    """A symbol; without a section it is another object's."""

    name: str
    section: str | None = None
    value: int = 0
    binding: int = GLOBAL
    visibility: int = 0


def write_object(machine: int, parts: Sequence[Part], names: Sequence[Name]) -> bytes:
    """Return the file. Local symbols must come first, as in every object."""
    index = {part.name: number for number, part in enumerate(parts, 1)}
    order = {name.name: number for number, name in enumerate(names, 1)}
    texts = b"\0" + b"".join(name.name.encode() + b"\0" for name in names)
    symbols = bytes(24)
    for name in names:
        offset = texts.index(b"\0" + name.name.encode() + b"\0") + 1
        section = 0 if name.section is None else index[name.section]
        symbols += struct.pack("<IBBHQQ", offset, name.binding << 4 | 1, name.visibility, section, name.value, 8)
    table = len(parts) + 1
    rows = [(part.name, 8 if part.num_zeros else 1, part.flags, part.content, 0, 0, part.align) for part in parts]
    rows += [(".symtab", 2, 0, symbols, table + 1, 1, 8), (".strtab", 3, 0, texts, 0, 0, 1)]
    for part in parts:
        if part.relocations:
            content = b"".join(
                struct.pack("<QIIq", o, kind, order[n], addend) for o, kind, n, addend in part.relocations
            )
            rows.append((f".rela{part.name}", 4, 0, content, table, index[part.name], 8))
    section_names = b"\0" + b"".join(row[0].encode() + b"\0" for row in rows) + b".shstrtab\0"
    rows.append((".shstrtab", 3, 0, section_names, 0, 0, 1))
    body, headers = b"", bytes(64)
    zeros = {part.name: part.num_zeros for part in parts}
    for name, kind, flags, content, link, info, align in rows:
        place = section_names.index(b"\0" + name.encode() + b"\0") + 1
        size = zeros.get(name) or len(content)
        headers += struct.pack("<IIQQQQIIQQ", place, kind, flags, 0, 64 + len(body), size, link, info, align, 0)
        body += content
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    sizes = (64, 0, 0, 64, len(rows) + 1, len(rows))
    return struct.pack("<16sHHIQQQIHHHHHH", ident, 1, machine, 1, 0, 0, 64 + len(body), 0, *sizes) + body + headers
