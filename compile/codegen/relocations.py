"""Compute relocations of x86-64 and AArch64: the bytes of an instruction or a word at its final address.

The formulas are those of the two CPUs' ELF ABIs, with their letters: S, the symbol's address; A, the addend; P, the
relocated address. Lists the types that LLVM emits for position-independent code; another type is an error.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from radixlm.runtime.errors import CompileError

from .elf_object import AARCH64, X86_64

_PAGE = 4096  # page size of `adrp`, independent of the machine's pages


@dataclass(frozen=True)
class Formula:
    """The computation of one type of relocation.

    Attributes:
        needs_entry: true if S is the address of the symbol's entry in the global offset table.
        is_call: true if it may call a stub that jumps to a symbol of another library.
        is_address: true for a whole address, to which the dynamic linker adds the library's base.
        apply: returns the relocated bytes, from (bytes from P on, S + A, P).
    """

    apply: Callable[[bytes, int, int], bytes]
    needs_entry: bool = False
    is_call: bool = False
    is_address: bool = False


@dataclass(frozen=True)
class Machine:
    """Linking rules of one CPU architecture.

    Attributes:
        formulas: by type of relocation.
        entry_type: the dynamic relocation that fills an entry of the global offset table with a symbol's address.
        base_type: the dynamic relocation that adds the library's base address.
        page_bytes: the largest page size of its systems; segments begin on pages.
        stub: returns code that jumps to the address in an entry, from (address of the entry, address of the stub).
    """

    formulas: Mapping[int, Formula]
    entry_type: int
    base_type: int
    page_bytes: int
    stub: Callable[[int, int], bytes]


def machine_of(number: int) -> Machine:
    """Return the architecture of an object's `e_machine`. Raises CompileError if it is unsupported."""
    if number not in _MACHINES:
        raise CompileError(f"objects for machine {number} of ELF cannot be linked; x86-64 and AArch64 can")
    return _MACHINES[number]


def _word(layout: str, is_relative: bool) -> Callable[[bytes, int, int], bytes]:
    """Return a formula that stores S + A, or S + A - P if relative."""

    def apply(place: bytes, value: int, address: int) -> bytes:
        try:
            return struct.pack(layout, value - address if is_relative else value)
        except struct.error:
            raise CompileError(f"a relocation is out of range: from {address:#x} to {value:#x}") from None

    return apply


def _instruction(
    bits: int, shift: int, of: Callable[[int, int], int], unit: int = 1
) -> Callable[[bytes, int, int], bytes]:
    """Return a formula that puts `of(S + A, P) // unit` into `bits` bits of an AArch64 instruction, at bit `shift`."""

    def apply(place: bytes, value: int, address: int) -> bytes:
        number = of(value, address)
        limit = 1 << (bits - 1)
        if number % unit or (of is _distance and not -limit <= number // unit < limit):
            raise CompileError(f"a relocation is out of range or not aligned: from {address:#x} to {value:#x}")
        mask = (1 << bits) - 1
        [old] = struct.unpack_from("<I", place)
        return struct.pack("<I", old & ~(mask << shift) | (number // unit & mask) << shift)

    return apply


def _distance(value: int, address: int) -> int:
    """Return the distance from the relocated address."""
    return value - address


def _in_page(value: int, address: int) -> int:
    """Return the offset within a page."""
    return value % _PAGE


def _page_distance(place: bytes, value: int, address: int) -> bytes:
    """Put the distance in pages into `adrp`: two bits at 29, nineteen at 5."""
    pages = value // _PAGE - address // _PAGE
    if not -(1 << 20) <= pages < 1 << 20:
        raise CompileError(f"a relocation is out of range: from {address:#x} to {value:#x}")
    [old] = struct.unpack_from("<I", place)
    return struct.pack("<I", old & ~(3 << 29 | 0x7FFFF << 5) | (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5)


def _x86_stub(entry: int, address: int) -> bytes:
    """Return x86-64 code that jumps to the address in `entry`."""
    return b"\xff\x25" + struct.pack("<i", entry - address - 6) + b"\xcc\xcc"  # jmp [rip + entry]


def _aarch64_stub(entry: int, address: int) -> bytes:
    """Return AArch64 code that jumps to the address in `entry`."""
    page = _page_distance(struct.pack("<I", 0x90000010), entry, address)  # adrp x16, entry
    load = _instruction(12, 10, _in_page, 8)(struct.pack("<I", 0xF9400211), entry, address)  # ldr x17, [x16, entry]
    return page + load + struct.pack("<II", 0xD61F0220, 0xD503201F)  # br x17; nop


_RELATIVE32 = _word("<i", is_relative=True)
_OFFSETS = {  # of loads and stores: bytes of the item by relocation type
    type: Formula(_instruction(12, 10, _in_page, size))
    for type, size in ((278, 1), (284, 2), (285, 4), (286, 8), (299, 16))
}
_MACHINES = {
    X86_64: Machine(
        {
            1: Formula(_word("<q", is_relative=False), is_address=True),  # R_X86_64_64
            2: Formula(_RELATIVE32, is_call=True),  # PC32
            4: Formula(_RELATIVE32, is_call=True),  # PLT32
            9: Formula(_RELATIVE32, needs_entry=True),  # GOTPCREL
            24: Formula(_word("<q", is_relative=True)),  # PC64
            41: Formula(_RELATIVE32, needs_entry=True),  # GOTPCRELX
            42: Formula(_RELATIVE32, needs_entry=True),  # REX_GOTPCRELX
        },
        entry_type=6,
        base_type=8,
        page_bytes=1 << 12,
        stub=_x86_stub,
    ),
    AARCH64: Machine(
        {
            257: Formula(_word("<q", is_relative=False), is_address=True),  # R_AARCH64_ABS64
            260: Formula(_word("<q", is_relative=True)),  # PREL64
            261: Formula(_RELATIVE32),  # PREL32
            275: Formula(_page_distance),  # ADR_PREL_PG_HI21
            277: Formula(_instruction(12, 10, _in_page)),  # ADD_ABS_LO12_NC
            **_OFFSETS,
            279: Formula(_instruction(14, 5, _distance, 4)),  # TSTBR14
            280: Formula(_instruction(19, 5, _distance, 4)),  # CONDBR19
            282: Formula(_instruction(26, 0, _distance, 4), is_call=True),  # JUMP26
            283: Formula(_instruction(26, 0, _distance, 4), is_call=True),  # CALL26
            311: Formula(_page_distance, needs_entry=True),  # ADR_GOT_PAGE
            312: Formula(_instruction(12, 10, _in_page, 8), needs_entry=True),  # LD64_GOT_LO12_NC
        },
        entry_type=1025,
        base_type=1027,
        page_bytes=1 << 16,
        stub=_aarch64_stub,
    ),
}
