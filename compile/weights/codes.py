"""The formats of integer codes: how many bits, where they lie in a group, and how a kernel unpacks them.

A format is one class here and one line in `CODES`. A group is `GROUP` inputs of the 16 outputs of a block; its codes
are `CHUNKS` chunks of `CHUNK` codes (`layout.py`). A kernel gets levels: what the codes stand for. Knows no scales.
"""

from __future__ import annotations

import functools
from typing import Protocol

import numpy as np
import numpy.typing as npt
import tvm
from tvm.script.ir_builder import tirx as T

from ..codegen.builder import Memory
from ..codegen.vector import Expr, lanes, splat, vector_type
from .kinds import TABLES, CodesName, max_level
from .layout import CHUNK, CHUNKS

Bytes = npt.NDArray[np.uint8]


class Codes(Protocol):
    """How the codes of a kind of weight are stored."""

    max_level: int
    group_bytes: int  # of one group of a block

    def pack(self, chunks: Bytes) -> Bytes:
        """Codes `[block, K/32, chunk, 16 outputs, 4 inputs]`, one a byte, as they are stored: `[block, K/32, ...]`."""
        ...

    def piece(self, memory: Memory, start: Expr, chunk: int, offset: int, size: int, shuffled: int) -> Expr:
        """Levels of bytes `[offset, offset + size)` of a chunk as uint8, of the group whose bytes begin at `start`.

        `shuffled`: how many bytes the target shuffles at once; 0 where it cannot.
        """
        ...

    def some(self, memory: Memory, group: Expr, chunk: Expr, byte: Expr, n: int) -> Expr:
        """`n` neighbouring levels of a chunk from `byte` on as int32, of the group-th group in memory."""
        ...


class _Planes:
    """Bits in planes of 1, 2, 4 or 8, the lowest first, one after another in a group.

    A byte of a plane of 4 bits holds chunk 2j in its low half and chunk 2j + 1 in its high half, and so on.
    """

    def __init__(self, codes: CodesName, *widths: int) -> None:
        self.max_level, self.widths = max_level(codes), widths
        self.group_bytes = sum(widths) * CHUNK * CHUNKS // 8

    def pack(self, chunks: Bytes) -> Bytes:
        planes, low = [], 0
        for width in self.widths:
            bits = chunks >> np.uint8(low) & np.uint8((1 << width) - 1)
            fields = [bits[:, :, field :: 8 // width] << np.uint8(field * width) for field in range(8 // width)]
            planes.append(functools.reduce(np.bitwise_or, fields).reshape(*chunks.shape[:2], -1))
            low += width
        return np.concatenate(planes, axis=-1)

    def piece(self, memory: Memory, start: Expr, chunk: int, offset: int, size: int, shuffled: int) -> Expr:
        code, low = None, 0
        for width in self.widths:
            per_byte = 8 // width
            packed = memory[lanes(start + chunk // per_byte * CHUNK + offset, size)]
            bits = _field(packed, chunk % per_byte * width, width, low, size)
            code = bits if code is None else T.bitwise_or(code, bits)
            start, low = start + width * CHUNK * CHUNKS // 8, low + width
        return code

    def some(self, memory: Memory, group: Expr, chunk: Expr, byte: Expr, n: int) -> Expr:
        code, start, low = None, group * self.group_bytes, 0
        for width in self.widths:
            per_byte = 8 // width
            packed = memory[lanes(start + chunk // per_byte * CHUNK + byte, n)]
            shift, mask = T.Cast("int32", chunk % per_byte * width), T.int32((1 << width) - 1)
            bits = T.shift_right(T.Cast(vector_type("int32", n), packed), splat(shift, n))
            bits = T.shift_left(T.bitwise_and(bits, splat(mask, n)), splat(T.int32(low), n))
            code = bits if code is None else T.bitwise_or(code, bits)
            start, low = start + width * CHUNK * CHUNKS // 8, low + width
        return code


def _field(packed: Expr, at: int, width: int, low: int, n: int) -> Expr:
    """Bits `[at, at + width)` of each byte, moved to `low`."""
    if at > low:
        packed = T.shift_right(packed, splat(T.uint8(at - low), n))
    elif at < low:
        packed = T.shift_left(packed, splat(T.uint8(low - at), n))
    if low == 0 and at + width == 8:
        return packed
    return T.bitwise_and(packed, splat(T.uint8(((1 << width) - 1) << low), n))


class _Table(_Planes):
    """4 bits that stand for one of 16 levels."""

    def __init__(self, codes: CodesName) -> None:
        super().__init__("q4", 4)
        self.max_level, self.levels = max_level(codes), TABLES[codes]

    def piece(self, memory: Memory, start: Expr, chunk: int, offset: int, size: int, shuffled: int) -> Expr:
        if 0 < shuffled < size:
            parts = [
                self.piece(memory, start, chunk, at, shuffled, shuffled)
                for at in range(offset, offset + size, shuffled)
            ]
            return tvm.tirx.Shuffle(parts, list(range(size)))
        indices = super().piece(memory, start, chunk, offset, size, shuffled)
        if not shuffled or size not in _SHUFFLES:
            return _chosen(self.levels, indices, "uint8", size)
        words = [T.int32(int(word)) for word in np.array(self.levels, np.uint8).view(np.int32)] * (size // 16)
        table = T.reinterpret(vector_type("uint8", size), tvm.tirx.Shuffle(words, list(range(size // 4))))
        return T.call_llvm_pure_intrin(vector_type("uint8", size), _SHUFFLES[size], table, indices)

    def some(self, memory: Memory, group: Expr, chunk: Expr, byte: Expr, n: int) -> Expr:
        return _chosen(self.levels, super().some(memory, group, chunk, byte, n), "int32", n)


# Each byte of an index in 0..15 becomes that byte of its 16 bytes of the table.
_SHUFFLES = {64: "llvm.x86.avx512.pshuf.b.512", 32: "llvm.x86.avx2.pshuf.b", 16: "llvm.x86.ssse3.pshuf.b.128"}


def _chosen(levels: tuple[int, ...], indices: Expr, dtype: str, n: int) -> Expr:
    """`levels[indices]` without an instruction for it: each level is masked by whether it is meant."""
    value = splat(tvm.tirx.IntImm(dtype, 0), n)
    for index, level in enumerate(levels):
        here, there = (splat(tvm.tirx.IntImm(dtype, number), n) for number in (index, level))
        value = T.Select(tvm.tirx.EQ(indices, here), there, value)
    return value


CODES: dict[CodesName, Codes] = {
    "q2": _Planes("q2", 2),
    "q3": _Planes("q3", 2, 1),
    "q4": _Planes("q4", 4),
    "q5": _Planes("q5", 4, 1),
    "q6": _Planes("q6", 4, 2),
    "q8": _Planes("q8", 8),
    "fp4": _Table("fp4"),
    "iq4": _Table("iq4"),
}
