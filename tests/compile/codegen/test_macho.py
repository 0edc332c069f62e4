"""Libraries for macOS, linked from objects that are written by hand and read as macOS's dynamic linker reads them."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.compile.codegen.elf_object import AARCH64, X86_64
from radixlm.compile.codegen.macho_library import MachOSection as Section
from radixlm.compile.codegen.macho_library import write_library
from radixlm.compile.codegen.macho_linker import link_for_macos
from radixlm.runtime.errors import CompileError

from .elf_writer import CODE, CONSTANT, DATA, HIDDEN, LOCAL, Name, Part, write_object
from .test_linker import branched, offset, paged

ADD_LOW, ADDRESS_PAGE, CALL, ENTRY_PAGE, ENTRY_LOW, WORD64 = 277, 275, 283, 311, 312, 257
PAGE = 1 << 14


@dataclass
class Opened:
    """A library as it is in memory at address 0, and what its load commands say."""

    file: bytes
    commands: dict[int, list[bytes]] = field(default_factory=dict)  # by kind, less kind and size
    segments: dict[str, tuple[int, ...]] = field(default_factory=dict)  # address, size, offset, bytes in the file

    def __post_init__(self) -> None:
        magic, processor, _, kind, num_commands, size, _, _ = struct.unpack_from("<8I", self.file)
        assert (magic, processor, kind) == (0xFEEDFACF, 0x0100000C, 6)
        at = 32
        for _ in range(num_commands):
            command, length = struct.unpack_from("<II", self.file, at)
            self.commands.setdefault(command, []).append(self.file[at + 8 : at + length])
            at += length
        assert at == 32 + size
        for body in self.commands[0x19]:
            self.segments[body[:16].rstrip(b"\0").decode()] = struct.unpack_from("<4Q", body, 16)

    def memory(self) -> bytearray:
        memory = bytearray(sum(self.segments["__LINKEDIT"][:2]))
        for address, size, begin, num_bytes in self.segments.values():
            assert address % PAGE == begin % PAGE == size % PAGE == 0 and num_bytes <= size
            memory[address : address + num_bytes] = self.file[begin : begin + num_bytes]
        return memory

    def table(self, number: int) -> bytes:
        """The tables of LC_DYLD_INFO: 0 rebases, 1 binds, 4 exports."""
        begin, size = struct.unpack_from("<II", self.commands[0x80000022][0], 8 * number)
        return self.file[begin : begin + size]

    def find(self, name: str) -> int | None:
        """The address of an export, found as `dlsym` does."""
        trie, at, rest = self.table(4), 0, b"_" + name.encode()
        while True:
            size, at = number(trie, at)
            if not rest:
                if not size:
                    return None
                flags, at = number(trie, at)
                assert flags == 0
                return number(trie, at)[0]
            at += size
            num_edges, at = trie[at], at + 1
            for _ in range(num_edges):
                end = trie.index(0, at)
                edge, (child, after) = trie[at:end], number(trie, end + 1)
                if rest.startswith(edge):
                    rest, at = rest[len(edge) :], child
                    break
                at = after
            else:
                return None

    def rebased(self) -> list[int]:
        """The words that the library's base is added to."""
        code, at, found, word = self.table(0), 0, list[int](), 0
        while (operation := code[at]) != 0:
            at += 1
            if operation == 0x21:  # segment 1, __DATA
                distance, at = number(code, at)
                word = self.segments["__DATA"][0] + distance
            elif operation == 0x51:
                found.append(word)
            else:
                assert operation == 0x11
        return found

    def bound(self) -> dict[int, str]:
        """The words that take addresses in other libraries, and the names there."""
        code, at, found, word, name = self.table(1), 0, dict[int, str](), 0, ""
        while (operation := code[at]) != 0:
            at += 1
            if operation == 0x40:
                end = code.index(0, at)
                name, at = code[at:end].decode(), end + 1
            elif operation == 0x71:
                distance, at = number(code, at)
                word = self.segments["__DATA"][0] + distance
            elif operation == 0x90:
                found[word] = name
            else:
                assert operation in (0x3E, 0x51)  # whatever library has it; pointers
        return found


def number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value, shift, at = value | (data[at] & 127) << shift, shift + 7, at + 1
        if not data[at - 1] & 128:
            return value, at


def linked() -> Opened:
    adrp, add, call, load = 0x90000000, 0x91000000, 0x94000000, 0xF9400000
    code = struct.pack("<7I", adrp, add, call, call, adrp, load, 0xD65F03C0)
    relocations = [(0, ADDRESS_PAGE, "constant", 0), (4, ADD_LOW, "constant", 0), (8, CALL, "labs", 0)]
    relocations += [(12, CALL, "other", 0), (16, ENTRY_PAGE, "zeros", 0), (20, ENTRY_LOW, "zeros", 0)]
    parts = [
        Part(".text", CODE, code, relocations),
        Part(".rodata", CONSTANT, b"constant".ljust(64)),
        Part(".data.rel.ro", DATA, bytes(8), [(0, WORD64, "constant", 3)]),
        Part(".bss", DATA, num_zeros=100_000, align=64),
        Part(".eh_frame", CONSTANT, bytes(16), [(0, 261, "f", 0)]),
    ]
    names = [Name("constant", ".rodata", 8, LOCAL), Name("f", ".text"), Name("pointer", ".data.rel.ro")]
    names += [Name("zeros", ".bss"), Name("labs"), Name("other")]
    hidden = Name("other", ".text", 4, visibility=HIDDEN)
    second = write_object(AARCH64, [Part(".text", CODE, bytes(8))], [hidden, Name("foo", ".text"), Name("fo", ".text")])
    return Opened(link_for_macos([write_object(AARCH64, parts, names), second]))


def test_code_finds_constants_functions_zeros_and_other_libraries() -> None:
    library = linked()
    memory, place = library.memory(), library.find("f")
    assert place is not None
    words = struct.unpack_from("<7I", memory, place)
    constant = paged(words[0], place) + offset(words[1])
    assert memory[constant - 8 : constant] == b"constant"
    assert branched(words[3], place + 12) == (library.find("foo") or 0) + 4
    entry, pointer = paged(words[4], place + 16) + 8 * offset(words[5]), library.find("pointer")
    assert pointer is not None
    assert struct.unpack_from("<Q", memory, entry)[0] == library.find("zeros")
    assert struct.unpack_from("<Q", memory, pointer)[0] == constant + 3
    assert library.rebased() == sorted([entry, pointer])
    stub = branched(words[2], place + 8)
    adrp, ldr, br, _ = struct.unpack_from("<4I", memory, stub)
    assert library.bound() == {paged(adrp, stub) + 8 * offset(ldr): "_labs"} and br == 0xD61F0220


def test_exports_are_found_and_neither_hidden_names_nor_parts_of_names_are() -> None:
    library = linked()
    assert None not in [library.find(name) for name in ("f", "fo", "foo", "zeros", "pointer")]
    assert [library.find(name) for name in ("", "o", "fooo", "other", "labs", "constant")] == [None] * 6


def test_zeros_take_memory_and_no_room_in_the_file() -> None:
    library = linked()
    _, size, _, num_bytes = library.segments["__DATA"]
    assert size >= 100_000 + num_bytes - PAGE > num_bytes == PAGE
    assert not any(library.memory()[library.find("zeros") : sum(library.segments["__DATA"][:2])])


def test_the_signature_has_the_digest_of_every_page() -> None:
    library = linked()
    begin, size = struct.unpack("<II", library.commands[0x1D][0])
    assert begin + size == len(library.file) and begin % 16 == 0
    magic, length, count, kind, at = struct.unpack_from(">5I", library.file, begin)
    assert (magic, count, kind) == (0xFADE0CC0, 1, 0) and length <= size
    directory = library.file[begin + at : begin + length]
    magic, length, _, _, hashes, identity, _, num_pages, covered = struct.unpack_from(">9I", directory)
    assert (magic, length, covered) == (0xFADE0C02, len(directory), begin)
    assert directory[identity:hashes] == b"radixlm\0"
    pages = [library.file[page : min(page + 4096, covered)] for page in range(0, covered, 4096)]
    assert directory[hashes:] == b"".join(hashlib.sha256(page).digest() for page in pages) and num_pages == len(pages)


def test_equal_objects_make_equal_bytes_for_macos() -> None:
    assert linked().file == linked().file


def test_objects_of_other_processors_are_refused() -> None:
    with pytest.raises(CompileError, match="for Arm alone"):
        link_for_macos([write_object(X86_64, [Part(".text", CODE, bytes(8))], [Name("g", ".text")])])


NAMES = st.text("abf_", min_size=1, max_size=8)


@given(st.dictionaries(NAMES, st.integers(4096, PAGE - 1), max_size=40), st.lists(NAMES, max_size=10))
def test_every_export_is_found_and_nothing_else(exports: dict[str, int], others: list[str]) -> None:
    parts = [Section.of(".text", 4096, PAGE - 4096), Section.of(".data", PAGE, 8)]
    library = Opened(write_library(bytes(PAGE + 8), parts, exports=exports, imports={}, rebased=[PAGE]))
    assert {name: library.find(name) for name in exports} == exports
    assert all(library.find(name) == exports.get(name) for name in others)
