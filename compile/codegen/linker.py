"""Link compiled kernels into a shared library for Linux, without the linker of a C compiler.

Kernels are simple objects: no thread-local data, no constructors, and few kinds of relocations. The library calls libc
and `tvm_ffi`, which the dynamic linker finds when the library is opened. It calls no libm, whose results differ between
machines. It exports every global symbol that is not hidden. Equal objects give equal bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from radixlm.runtime.errors import CompileError

from .elf_library import (
    HEADER_BYTES,
    SEGMENT_BYTES,
    Kind,
    Names,
    Range,
    Segment,
    SegmentKind,
    Use,
    hash_table,
    with_headers,
)
from .elf_object import ElfObject, Relocation, Section, Symbol
from .relocations import Formula, machine_of

_NEEDED = ("libc.so.6",)  # no libm: kernels compute their own functions
_NUM_SEGMENTS = 6
_SYMBOL_BYTES, _RELOCATION_BYTES, _ENTRY_BYTES, _STUB_BYTES = 24, 24, 8, 16
_GLOBAL = 1 << 4  # the binding in st_info
_NEVER_UNLOADED = 8  # DF_1_NODELETE: threads of the library may still run after it is closed


def link(objects: Iterable[bytes]) -> bytes:
    """Return the shared library of ELF objects for one machine.

    If several objects define a symbol, all but one definition must be weak. If all are weak, the first is used.

    Raises:
        CompileError: the objects are for different machines, define a symbol twice, or use an unsupported feature.
    """
    return Linker([ElfObject.parse(data) for data in objects]).library()


class Linker:
    """A linker of one library: it resolves symbols, assigns addresses, and writes content at those addresses.

    An address is an offset in the file as well. A subclass writes another file format: it overrides `library` and
    `_lay_out`.
    """

    def __init__(self, objects: Sequence[ElfObject]) -> None:
        machines = {one.machine for one in objects}
        if len(machines) != 1:
            raise CompileError(f"objects of one machine are linked, not of {sorted(machines)}")
        self._objects = objects
        self._machine = machine_of(objects[0].machine)
        self._definitions = _definitions(objects)
        self._exports = {name: symbol for name, symbol in self._definitions.items() if not symbol.is_hidden}
        self._imports: dict[str, Symbol] = {}
        self._entries: dict[Symbol, int] = {}  # entries of the global offset table
        self._stubs: dict[Symbol, int] = {}
        self._num_bases = 0  # number of words to which the library's base is added
        self._collect()
        self._ranges: dict[str, Range] = {}
        self._places: dict[Section, tuple[str, int]] = {}  # each section's range and address
        self._end = 0
        self._lay_out()
        self._file_end = self._ranges[".bss"].begin
        self._file = bytearray(self._file_end)

    def library(self) -> bytes:
        """Return the bytes of the library."""
        relocations = [*self._apply_relocations(), *self._fill_entries()]
        self._put(".rela.dyn", b"".join(struct.pack("<QQq", *one) for one in relocations))
        self._put(".plt", b"".join(self._stub_code(symbol) for symbol in self._stubs))
        self._put(".dynsym", b"".join(self._symbol_rows()))
        self._put(".dynstr", self._names.content)
        self._put(".hash", hash_table(["", *self._imports, *self._exports]))
        self._put(".eh_frame_hdr", self._frame_pointer())
        self._put(".dynamic", self._dynamic())
        return with_headers(bytes(self._file), self._objects[0].machine, self._segments(), [*self._ranges.values()])

    def _collect(self) -> None:
        """Collect what relocations need besides addresses: table entries, stubs, and symbols of other libraries."""
        for section, relocation, formula in self._relocations():
            symbol = self._resolved(relocation.symbol)
            if symbol.section is None:
                self._imports.setdefault(symbol.name, symbol)
                if formula.is_call:
                    self._stubs.setdefault(symbol, len(self._stubs))
                elif not formula.needs_entry:
                    raise CompileError(f"a compiled kernel takes the address of {symbol.name} in another library")
            if formula.needs_entry or symbol.section is None:
                self._entries.setdefault(symbol, len(self._entries))
            if formula.is_address:
                if not section.is_writable:
                    raise CompileError(f"a compiled kernel has an address in {section.name}, which cannot be written")
                self._num_bases += 1

    def _relocations(self) -> Iterable[tuple[Section, Relocation, Formula]]:
        """Yield all relocations, each with its section and its formula."""
        for section in (section for one in self._objects for section in one.sections):
            for relocation in section.relocations:
                formula = self._machine.formulas.get(relocation.type)
                if formula is None:
                    fault = f"a relocation of type {relocation.type} in {section.name}"
                    raise CompileError(f"a compiled kernel has {fault}, which cannot be linked")
                yield section, relocation, formula

    def _resolved(self, symbol: Symbol) -> Symbol:
        """Return the definition in use; if there is none, the symbol that is imported from another library."""
        if symbol.is_local:
            return symbol
        return self._definitions.get(symbol.name) or self._imports.get(symbol.name) or symbol

    def _lay_out(self) -> None:
        """Assign addresses to ranges and sections: constants, code and data each begin on a page."""
        self._names = Names([*_NEEDED, *self._imports, *self._exports])
        self._end = HEADER_BYTES + _NUM_SEGMENTS * SEGMENT_BYTES
        sections = [section for one in self._objects for section in one.sections]
        code = [section for section in sections if section.is_code]
        constants = [section for section in sections if not section.is_code and not section.is_writable]
        frames = [section for section in constants if section.name == ".eh_frame"]
        data = [section for section in sections if section.is_writable]
        num_symbols = 1 + len(self._imports) + len(self._exports)
        relocation_bytes = (len(self._entries) + self._num_bases) * _RELOCATION_BYTES

        self._add(".hash", Kind.HASH_TABLE, Use.READ, 8 * (1 + num_symbols), link=".dynsym", item_bytes=4)
        symbols_bytes = num_symbols * _SYMBOL_BYTES
        self._add(".dynsym", Kind.SYMBOLS, Use.READ, symbols_bytes, link=".dynstr", item_bytes=_SYMBOL_BYTES)
        self._add(".dynstr", Kind.NAMES, Use.READ, len(self._names.content))
        self._add(
            ".rela.dyn", Kind.RELOCATIONS, Use.READ, relocation_bytes, link=".dynsym", item_bytes=_RELOCATION_BYTES
        )
        self._add_sections(".rodata", Kind.CONTENT, Use.READ, [one for one in constants if one not in frames])
        self._add(".eh_frame_hdr", Kind.CONTENT, Use.READ, 8)
        self._add_sections(".eh_frame", Kind.CONTENT, Use.READ, frames, num_zeros=4)  # zeros end the list of frames
        self._end = _aligned(self._end, self._machine.page_bytes)
        self._add_sections(".text", Kind.CONTENT, Use.EXECUTE, code)
        self._add_stubs()
        self._end = _aligned(self._end, self._machine.page_bytes)
        self._add(".dynamic", Kind.DYNAMIC, Use.WRITE, 16 * (len(_NEEDED) + 10), link=".dynstr", item_bytes=16)
        self._add_entries()
        self._add_sections(".data", Kind.CONTENT, Use.WRITE, [one for one in data if one.content is not None])
        self._add_sections(".bss", Kind.ZEROS, Use.WRITE, [one for one in data if one.content is None])

    def _add_stubs(self) -> None:
        """Add the range of stubs."""
        self._add(".plt", Kind.CONTENT, Use.EXECUTE, len(self._stubs) * _STUB_BYTES, align=_STUB_BYTES)

    def _add_entries(self) -> None:
        """Add the range of the global offset table."""
        self._add(".got", Kind.CONTENT, Use.WRITE, len(self._entries) * _ENTRY_BYTES, item_bytes=_ENTRY_BYTES)

    def _add(
        self, name: str, kind: Kind, use: Use, size: int, *, align: int = 8, link: str = "", item_bytes: int = 0
    ) -> None:
        """Add a range at the current end, aligned."""
        begin = _aligned(self._end, align)
        self._ranges[name] = Range(name, begin, size, kind, use, link, item_bytes)
        self._end = begin + size

    def _add_sections(
        self, name: str, kind: Kind, use: Use, sections: Sequence[Section], *, num_zeros: int = 0
    ) -> None:
        """Add a range of sections, and record their addresses; `num_zeros` bytes follow them."""
        begin = self._end = _aligned(self._end, max((section.align for section in sections), default=8))
        for section in sections:
            self._end = _aligned(self._end, section.align)
            self._places[section] = name, self._end
            self._end += section.size
        self._end += num_zeros
        self._ranges[name] = Range(name, begin, self._end - begin, kind, use)

    def _put(self, name: str, content: bytes) -> None:
        """Write the content of a range, which must have the range's size."""
        part = self._ranges[name]
        if len(content) != part.size:
            raise CompileError(f"{name} of the linked library has {len(content)} bytes instead of {part.size}")
        self._file[part.begin : part.end] = content

    def _apply_relocations(self) -> Iterable[tuple[int, int, int]]:
        """Write all sections with their addresses. Returns the relocations left for the dynamic linker."""
        for section, (_, address) in self._places.items():
            if section.content is not None:
                self._file[address : address + section.size] = section.content
        left = []
        for section, relocation, formula in self._relocations():
            symbol, place = self._resolved(relocation.symbol), self._places[section][1] + relocation.offset
            value = (self._entry(symbol) if formula.needs_entry else self._location(symbol)) + relocation.addend
            content = formula.apply(bytes(self._file[place : place + 8]), value, place)
            self._file[place : place + len(content)] = content
            if formula.is_address:
                left.append((place, self._machine.base_type, value))
        return left

    def _fill_entries(self) -> Iterable[tuple[int, int, int]]:
        """Return the relocations that fill the global offset table."""
        index_of = {name: index for index, name in enumerate(self._imports, 1)}
        for symbol in self._entries:
            if symbol.section is None:
                yield self._entry(symbol), index_of[symbol.name] << 32 | self._machine.entry_type, 0
            else:
                yield self._entry(symbol), self._machine.base_type, self._location(symbol)

    def _entry(self, symbol: Symbol) -> int:
        """Return the address of a symbol's entry in the global offset table."""
        return self._ranges[".got"].begin + self._entries[symbol] * _ENTRY_BYTES

    def _stub(self, symbol: Symbol) -> int:
        """Return the address of a symbol's stub."""
        return self._ranges[".plt"].begin + self._stubs[symbol] * _STUB_BYTES

    def _stub_code(self, symbol: Symbol) -> bytes:
        """Return the code of a symbol's stub."""
        return self._machine.stub(self._entry(symbol), self._stub(symbol)).ljust(_STUB_BYTES, b"\0")

    def _location(self, symbol: Symbol) -> int:
        """Return the address of a symbol; for an imported one, that of its stub."""
        return self._stub(symbol) if symbol.section is None else self._places[symbol.section][1] + symbol.value

    def _symbol_rows(self) -> Iterable[bytes]:
        """Yield the rows of the dynamic symbol table: imports, then definitions."""
        yield bytes(_SYMBOL_BYTES)
        for name in self._imports:
            yield struct.pack("<IBBHQQ", self._names.offset(name), _GLOBAL, 0, 0, 0, 0)
        index_of = {name: index for index, name in enumerate(self._ranges, 1)}
        for name, symbol in self._exports.items():
            assert symbol.section is not None  # because it is defined
            index = index_of[self._places[symbol.section][0]]
            numbers = (_GLOBAL | symbol.type, 0, index, self._location(symbol), symbol.size)
            yield struct.pack("<IBBHQQ", self._names.offset(name), *numbers)

    def _frame_pointer(self) -> bytes:
        """Return the header of the frames: a relative pointer to them, and no search table."""
        at = self._ranges[".eh_frame_hdr"].begin + 4
        return struct.pack("<BBBBi", 1, 0x1B, 0xFF, 0xFF, self._ranges[".eh_frame"].begin - at)

    def _dynamic(self) -> bytes:
        """Return the dynamic section, which the dynamic linker reads first: pairs of a tag (DT_...) and a number."""
        begin = {name: part.begin for name, part in self._ranges.items()}
        rows = [(1, self._names.offset(name)) for name in _NEEDED]
        rows += [(4, begin[".hash"]), (5, begin[".dynstr"]), (6, begin[".dynsym"]), (7, begin[".rela.dyn"])]
        rows += [(8, self._ranges[".rela.dyn"].size), (9, _RELOCATION_BYTES), (10, len(self._names.content))]
        rows += [(11, _SYMBOL_BYTES), (0x6FFFFFFB, _NEVER_UNLOADED), (0, 0)]
        return b"".join(struct.pack("<QQ", *row) for row in rows)

    def _segments(self) -> list[Segment]:
        """Return the segments of the library, from the ranges."""

        def of(kind: SegmentKind, begin: int, last: str, align: int) -> Segment:
            part = self._ranges[last]
            return Segment(kind, part.use, begin, part.end, min(part.end, self._file_end) - begin, align)

        begin, page = {name: part.begin for name, part in self._ranges.items()}, self._machine.page_bytes
        return [
            of(SegmentKind.LOAD, 0, ".eh_frame", page),
            of(SegmentKind.LOAD, begin[".text"], ".plt", page),
            of(SegmentKind.LOAD, begin[".dynamic"], ".bss", page),
            of(SegmentKind.DYNAMIC, begin[".dynamic"], ".dynamic", 8),
            of(SegmentKind.EH_FRAME, begin[".eh_frame_hdr"], ".eh_frame_hdr", 4),
            Segment(SegmentKind.STACK, Use.WRITE, 0, 0, 0, 16),
        ]


def _definitions(objects: Sequence[ElfObject]) -> dict[str, Symbol]:
    """Return the definition of each global symbol, by name."""
    definitions: dict[str, Symbol] = {}
    for symbol in (symbol for one in objects for symbol in one.symbols):
        if symbol.is_local or symbol.section is None:
            continue
        before = definitions.get(symbol.name)
        if before is not None and not before.is_weak and not symbol.is_weak:
            raise CompileError(f"two compiled kernels define {symbol.name}")
        if before is None or (before.is_weak and not symbol.is_weak):
            definitions[symbol.name] = symbol
    return definitions


def _aligned(offset: int, align: int) -> int:
    """Return `offset` rounded up to a multiple of `align`."""
    return -(-offset // align) * align
