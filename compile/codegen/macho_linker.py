"""Link compiled kernels into a dynamic library for macOS, on any system, without Apple's tools.

LLVM writes the objects as ELF files with the calling conventions of macOS (a triple like `arm64-apple-macos14.4-elf`).
Their relocations are therefore those of `linker.py`. Only the file around the code differs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from radixlm.runtime.errors import CompileError

from .elf_library import Kind, Use
from .elf_object import AARCH64, ElfObject
from .linker import Linker
from .macho_library import HEADER_BYTES, PAGE_BYTES, MachOSection, write_library


def link_for_macos(objects: Iterable[bytes]) -> bytes:
    """Return the dynamic library of ELF objects for Arm. Raises CompileError as `link` does."""
    return _MacOSLinker([_without_unwinding(ElfObject.parse(data)) for data in objects]).library()


class _MacOSLinker(Linker):
    """A linker that fills the table entries of Linux's dynamic linker with the addresses that macOS's rebases."""

    def library(self) -> bytes:
        """Return the bytes of the library."""
        if self._objects[0].machine != AARCH64:
            raise CompileError("libraries for macOS are linked for Arm alone")
        rebased = [place for place, _, _ in self._apply_relocations()]
        imports: dict[str, list[int]] = {}
        for symbol in self._entries:
            entry = self._entry(symbol)
            if symbol.section is None:
                imports.setdefault(symbol.name, []).append(entry)
            else:
                self._file[entry : entry + 8] = self._location(symbol).to_bytes(8, "little")
                rebased.append(entry)
        self._put(".plt", b"".join(self._stub_code(symbol) for symbol in self._stubs))
        parts = [MachOSection.of(one.name, one.begin, one.size) for one in self._ranges.values()]
        exports = {name: self._location(symbol) for name, symbol in self._exports.items()}
        return write_library(bytes(self._file), parts, exports=exports, imports=imports, rebased=rebased)

    def _lay_out(self) -> None:
        """Assign addresses to ranges and sections: constants and code, then data on a page of its own."""
        sections = [section for one in self._objects for section in one.sections]
        writable = [section for section in sections if section.is_writable]
        constants = [section for section in sections if not section.is_code and not section.is_writable]
        self._end = HEADER_BYTES
        self._add_sections(".rodata", Kind.CONTENT, Use.READ, constants)
        self._add_sections(".text", Kind.CONTENT, Use.EXECUTE, [section for section in sections if section.is_code])
        self._add_stubs()
        self._end += -self._end % PAGE_BYTES
        self._add_entries()
        self._add_sections(".data", Kind.CONTENT, Use.WRITE, [one for one in writable if one.content is not None])
        self._add_sections(".bss", Kind.ZEROS, Use.WRITE, [one for one in writable if one.content is None])


def _without_unwinding(one: ElfObject) -> ElfObject:
    """Return the object without ELF's exception tables; kernels throw no exceptions."""
    return replace(one, sections=tuple(section for section in one.sections if section.name != ".eh_frame"))
