"""Libraries linked from objects that are written by hand: called, opened by the dynamic linker, decoded, refused."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.compile.codegen.elf_object import AARCH64, X86_64
from radixlm.compile.codegen.linker import link
from radixlm.compile.codegen.relocations import machine_of
from radixlm.runtime.errors import CompileError

from .elf_writer import ALLOCATE, CODE, CONSTANT, DATA, HIDDEN, LOCAL, THREAD_LOCAL, WEAK, Name, Part, write_object

PC32, PLT32, GOTPCREL, WORD64, PC64 = 2, 4, 42, 1, 24
runs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions are of x86-64")


def opened(folder: Path, *objects: bytes) -> ctypes.CDLL:
    path = folder / "library.so"
    path.write_bytes(link(objects))
    return ctypes.CDLL(str(path))


def returning(number: int, name: str = "f", binding: int = 1) -> bytes:
    """An object with `int name() { return number; }`."""
    code = b"\xb8" + struct.pack("<i", number) + b"\xc3"
    return write_object(X86_64, [Part(".text", CODE, code)], [Name(name, ".text", binding=binding)])


def calling(name: str, callee: str) -> bytes:
    """An object with a function that jumps to another."""
    code = Part(".text", CODE, b"\xe9\0\0\0\0", [(1, PLT32, callee, -4)])
    return write_object(X86_64, [code], [Name(name, ".text"), Name(callee)])


@runs_x86
def test_a_function_calls_other_objects_and_other_libraries(tmp_path: Path) -> None:
    library = opened(tmp_path, calling("to_f", "f"), returning(7), calling("to_labs", "labs"), calling("again", "labs"))
    assert library.to_f() == 7
    assert library.to_labs(ctypes.c_long(-12)) == library.again(ctypes.c_long(-12)) == 12


@runs_x86
def test_data_zeros_and_pointers_are_where_the_code_finds_them(tmp_path: Path) -> None:
    parts = [
        # mov eax, [number]; mov rcx, [pointer]; add eax, [rcx]; mov rcx, [zero in the GOT]; add eax, [rcx]; inc [rcx]
        Part(
            ".text",
            CODE,
            b"\x8b\x05\0\0\0\0\x48\x8b\x0d\0\0\0\0\x03\x01\x48\x8b\x0d\0\0\0\0\x03\x01\xff\x01\xc3",
            [(2, PC32, "number", -4), (9, PC32, "pointer", -4), (18, GOTPCREL, "zero", -4)],
        ),
        Part(".rodata", CONSTANT, struct.pack("<iii", 0, 30, 12)),
        Part(".data.rel.ro", DATA, bytes(8), [(0, WORD64, "number", 4)]),
        Part(".bss", DATA, num_zeros=4096, align=64),
    ]
    names = [
        Name("number", ".rodata", 4, LOCAL),
        Name("f", ".text"),
        Name("pointer", ".data.rel.ro"),
        Name("zero", ".bss"),
    ]
    library = opened(tmp_path, write_object(X86_64, parts, names))
    assert [library.f(), library.f(), library.f()] == [42, 43, 44]  # the last instruction counts in zero
    assert ctypes.addressof(ctypes.c_int.in_dll(library, "zero")) % 64 == 0


@runs_x86
def test_a_weak_definition_gives_way_and_two_others_are_refused(tmp_path: Path) -> None:
    weak, other, strong = returning(1, binding=WEAK), returning(2, binding=WEAK), returning(3)
    (tmp_path / "weak").mkdir()
    assert opened(tmp_path / "weak", weak, other).f() == 1
    assert opened(tmp_path, weak, strong, other, calling("g", "f")).g() == 3
    with pytest.raises(CompileError, match="two compiled kernels define f"):
        link([strong, strong])


@runs_x86
def test_a_hidden_symbol_is_called_from_inside_alone(tmp_path: Path) -> None:
    code = b"\xb8\x05\0\0\0\xc3"
    hidden = write_object(X86_64, [Part(".text", CODE, code)], [Name("f", ".text", visibility=HIDDEN)])
    library = opened(tmp_path, returning(1, binding=WEAK), hidden, calling("g", "f"))
    assert library.g() == 5
    assert not hasattr(library, "f")


@runs_x86
def test_every_symbol_is_found_and_no_other(tmp_path: Path) -> None:
    names = [f"function_{number:x}" * (1 + number % 7) for number in range(500)]
    library = opened(tmp_path, *(returning(number, name) for number, name in enumerate(names)))
    assert [library[name]() for name in names] == list(range(500))
    assert not hasattr(library, "function_500")


def test_equal_objects_make_equal_bytes() -> None:
    objects = [returning(1, "a"), calling("b", "a"), calling("c", "labs")]
    assert link(objects) == link(list(objects))


def symbols_of(library: bytes) -> dict[str, int]:
    """Addresses by name, read by the section table."""
    begin, num_rows = struct.unpack_from("<Q", library, 40)[0], struct.unpack_from("<H", library, 60)[0]
    rows = [struct.unpack_from("<IIQQQQIIQQ", library, begin + 64 * row) for row in range(num_rows)]
    [table] = [row for row in rows if row[1] == 11]
    names = library[rows[table[6]][4] :]
    found = {}
    for name, _, _, _, value, _ in struct.iter_unpack("<IBBHQQ", library[table[4] : table[4] + table[5]]):
        found[names[name : names.index(0, name)].decode()] = value
    return found


def signed(number: int, bits: int) -> int:
    return number - (1 << bits) if number >> (bits - 1) else number


# AArch64's fields as the Arm manual gives them: from an instruction and its address, what it leads to
def branched(word: int, place: int) -> int:
    return place + 4 * signed(word & 0x3FFFFFF, 26)


def paged(word: int, place: int) -> int:
    return place // 4096 * 4096 + 4096 * signed((word >> 5 & 0x7FFFF) << 2 | word >> 29 & 3, 21)


def offset(word: int) -> int:
    return word >> 10 & 0xFFF


@pytest.mark.parametrize(("load", "kind", "size"), [(0x39400000, 278, 1), (0xF9400000, 286, 8), (0x3DC00000, 299, 16)])
@pytest.mark.parametrize("distance", [0, 16, 0x12340, 0x7FF000])
def test_arm_code_finds_constants_functions_and_other_libraries(load: int, kind: int, size: int, distance: int) -> None:
    adrp, add, call, branch = 0x90000000, 0x91000000, 0x94000000, 0x14000000
    code = struct.pack("<7I", adrp, load, add, call, branch, adrp, 0xF9400000)
    relocations = [(0, 275, "constant", 0), (4, kind, "constant", 0), (8, 277, "constant", 3)]
    relocations += [(12, 283, "labs", 0), (16, 282, "g", 0), (20, 311, "constant", 0), (24, 312, "constant", 0)]
    parts = [Part(".text", CODE, code, relocations), Part(".rodata", CONSTANT, bytes(distance + size), align=4096)]
    names = [Name("f", ".text"), Name("g"), Name("labs"), Name("constant", ".rodata", distance)]
    other = write_object(AARCH64, [Part(".text", CODE, bytes(8))], [Name("g", ".text", 4)])
    library = link([write_object(AARCH64, parts, names), other])
    at = symbols_of(library)
    place, constant = at["f"], at["constant"]
    words = struct.unpack_from("<7I", library, place)
    assert paged(words[0], place) + offset(words[1]) * size == constant
    assert paged(words[0], place) + offset(words[2]) == constant + 3 - (constant % 4096 + 3) // 4096 * 4096
    assert branched(words[4], place + 16) == at["g"]
    entry = paged(words[5], place + 20) + offset(words[6]) * 8
    assert machine_of(AARCH64).base_type in [
        kind for where, kind, addend in dynamic(library) if (where, addend) == (entry, constant)
    ]
    stub = branched(words[3], place + 12)
    adrp, ldr, br, _ = struct.unpack_from("<4I", library, stub)
    assert (adrp & 31, ldr & 31, ldr >> 5 & 31, br) == (16, 17, 16, 0xD61F0220)
    filled = [where for where, kind, _ in dynamic(library) if kind & 0xFFFFFFFF == machine_of(AARCH64).entry_type]
    assert [paged(adrp, stub) + offset(ldr) * 8] == filled


def dynamic(library: bytes) -> list[tuple[int, int, int]]:
    """The relocations that are left to the dynamic linker."""
    begin, num_rows = struct.unpack_from("<Q", library, 40)[0], struct.unpack_from("<H", library, 60)[0]
    rows = [struct.unpack_from("<IIQQQQIIQQ", library, begin + 64 * row) for row in range(num_rows)]
    [table] = [row for row in rows if row[1] == 4]
    return list(struct.iter_unpack("<QQq", library[table[4] : table[4] + table[5]]))


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        (Part(".text", CODE, bytes(8), [(0, 10, "g", 0)]), "relocation of type 10 in .text"),
        (Part(".text", CODE, bytes(8), [(0, PC64, "far", 0)]), "takes the address of far"),
        (Part(".rodata", CONSTANT, bytes(8), [(0, WORD64, "g", 0)]), "an address in .rodata, which cannot be written"),
        (Part(".text", CODE, bytes(8), [(0, PC32, "g", 1 << 40)]), "out of range"),
        (Part(".tdata", ALLOCATE | THREAD_LOCAL, bytes(8)), "thread-local data"),
    ],
)
def test_what_kernels_never_have_is_refused(part: Part, fault: str) -> None:
    names = [Name("g", part.name), Name("far")]
    with pytest.raises(CompileError, match=fault):
        link([write_object(X86_64, [part], names)])


def test_objects_for_other_machines_are_refused() -> None:
    arm = write_object(AARCH64, [Part(".text", CODE, bytes(8))], [Name("g", ".text")])
    with pytest.raises(CompileError, match=r"of one machine are linked, not of \[62, 183\]"):
        link([returning(1), arm])
    with pytest.raises(CompileError, match="machine 40 of ELF"):
        link([write_object(40, [Part(".text", CODE, bytes(8))], [])])


@given(st.data())
def test_a_damaged_object_is_refused_or_linked(data: st.DataObject) -> None:
    whole = calling("g", "labs")
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for place in data.draw(st.lists(st.integers(0, max(len(damaged) - 1, 0)), max_size=3)) if damaged else []:
        damaged[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CompileError):
        link([bytes(damaged)])
