"""Formats of integer codes: their bits, their position in a group, and how a kernel unpacks them.

A format is one class here and one line in `CODES`. A group is `GROUP` inputs of the 16 outputs of a block. Its codes
are `CHUNKS` chunks of `CHUNK` codes (`layout.py`). A kernel gets levels: the integers that codes represent. Knows no
scales.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
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
Lookups = Mapping[int, str]
_TABLE_BYTES = 16


class Codes(Protocol):
    """Storage format of the codes of a weight kind."""

    max_level: int
    group_bytes: int  # of one group of a block
    lines: tuple[int, ...]  # first line of each plane in a group, lowest plane first

    def pack(self, chunks: Bytes) -> Bytes:
        """Return codes `[block, K/32, chunk, 16 outputs, 4 inputs]`, one a byte, as stored: `[block, K/32, ...]`."""
        ...

    def piece(self, memory: Memory, start: Expr, chunk: int, offset: int, size: int, lookups: Lookups) -> Expr:
        """Return the levels of bytes `[offset, offset + size)` of a chunk as uint8.

        `start` is the first byte of the group. `lookups` names instructions that look up bytes in tables
        (`Target.byte_lookups`).
        """
        ...

    def some(self, memory: Memory, group: Expr, chunk: Expr, byte: Expr, n: int) -> Expr:
        """Return `n` consecutive levels of a chunk from `byte` on as int32, of group `group` in memory."""
        ...


class _Planes:
    """Codes as bit planes of 1, 2, 4 or 8 bits, the lowest first, each in lines of `CHUNK` bytes.

    A byte of a 4-bit plane holds chunk 2j in its low half and chunk 2j + 1 in its high half. Narrower planes follow the
    same rule. Lines are stored in the order of first use, because CPUs prefetch ascending reads.
    """

    def __init__(self, codes: CodesName, *widths: int) -> None:
        self.max_level, self.widths = max_level(codes), widths
        self.lows = tuple(sum(widths[:plane]) for plane in range(len(widths)))
        self.group_bytes = sum(widths) * CHUNK * CHUNKS // 8
        firsts = [(plane, chunk) for plane, width in enumerate(widths) for chunk in range(0, CHUNKS, 8 // width)]
        self.lines = tuple(self._line(plane, chunk) for plane, chunk in firsts)

    def pack(self, chunks: Bytes) -> Bytes:
        """Return the codes in planes, in stored form."""
        planes = []
        for width, low in zip(self.widths, self.lows, strict=True):
            bits = chunks >> np.uint8(low) & np.uint8((1 << width) - 1)
            fields = [bits[:, :, field :: 8 // width] << np.uint8(field * width) for field in range(8 // width)]
            planes.append(functools.reduce(np.bitwise_or, fields).reshape(*chunks.shape[:2], width, CHUNK))
        packed: Bytes = np.concatenate(planes, axis=2)[:, :, np.argsort(self.lines)]
        return packed.reshape(*chunks.shape[:2], -1)

    def piece(self, memory: Memory, start: Expr, chunk: int, offset: int, size: int, lookups: Lookups) -> Expr:
        """Return codes of a chunk, one in each byte, joined from the bits in all planes; see `Codes.piece`."""
        code = None
        for plane, (width, low) in enumerate(zip(self.widths, self.lows, strict=True)):
            packed = memory[lanes(start + self._line(plane, chunk) * CHUNK + offset, size)]
            bits = _field(packed, chunk % (8 // width) * width, width, low, size)
            code = bits if code is None else T.bitwise_or(code, bits)
        return code

    def some(self, memory: Memory, group: Expr, chunk: Expr, byte: Expr, n: int) -> Expr:
        """Return codes of a chunk as int32, joined from the bits in all planes; see `Codes.some`."""
        code = None
        for plane, (width, low) in enumerate(zip(self.widths, self.lows, strict=True)):
            packed = memory[lanes(group * self.group_bytes + self._line(plane, chunk) * CHUNK + byte, n)]
            shift, mask = T.Cast("int32", chunk % (8 // width) * width), T.int32((1 << width) - 1)
            bits = T.shift_right(T.Cast(vector_type("int32", n), packed), splat(shift, n))
            bits = T.shift_left(T.bitwise_and(bits, splat(mask, n)), splat(T.int32(low), n))
            code = bits if code is None else T.bitwise_or(code, bits)
        return code

    def _line(self, plane: int, chunk: Expr) -> Expr:
        """Return the line of a group that holds the bits of `chunk` in a plane; lines needed earlier precede it."""
        share = 8 // self.widths[plane]
        first = chunk // share * share  # first chunk of this line
        before = [
            (first + 8 // width if other < plane else first - 1 + 8 // width) // (8 // width)
            for other, width in enumerate(self.widths)
        ]
        return functools.reduce(operator.add, before)


def _field(packed: Expr, at: int, width: int, low: int, n: int) -> Expr:
    """Return bits `[at, at + width)` of each byte, moved to bit `low`."""
    if at > low:
        packed = T.shift_right(packed, splat(T.uint8(at - low), n))
    elif at < low:
        packed = T.shift_left(packed, splat(T.uint8(low - at), n))
    if low == 0 and at + width == 8:
        return packed
    return T.bitwise_and(packed, splat(T.uint8(((1 << width) - 1) << low), n))


class _Table(_Planes):
    """Codes of 4 bits that index a table of 16 levels."""

    def __init__(self, codes: CodesName) -> None:
        super().__init__("q4", 4)
        self.max_level, self.levels = max_level(codes), TABLES[codes]

    def piece(self, memory: Memory, start: Expr, chunk: int, offset: int, size: int, lookups: Lookups) -> Expr:
        """Return levels of a chunk, one in each byte, looked up by their codes; see `Codes.piece`."""
        most = max(lookups, default=size)
        if most < size:
            parts = [self.piece(memory, start, chunk, at, most, lookups) for at in range(offset, offset + size, most)]
            return tvm.tirx.Shuffle(parts, list(range(size)))
        indices = super().piece(memory, start, chunk, offset, size, lookups)
        if size not in lookups:
            return _chosen(self.levels, indices, "uint8", size)
        table_bytes = max(size, _TABLE_BYTES)  # each 16 bytes of indices use a copy of the table
        words = [T.int32(int(word)) for word in np.array(self.levels, np.uint8).view(np.int32)]
        table = tvm.tirx.Shuffle(words * (table_bytes // _TABLE_BYTES), list(range(table_bytes // 4)))
        table = T.reinterpret(vector_type("uint8", table_bytes), table)
        return T.call_llvm_pure_intrin(vector_type("uint8", size), lookups[size], table, indices)

    def some(self, memory: Memory, group: Expr, chunk: Expr, byte: Expr, n: int) -> Expr:
        """Return some levels of a chunk, looked up in the table."""
        return _chosen(self.levels, super().some(memory, group, chunk, byte, n), "int32", n)


def _chosen(levels: tuple[int, ...], indices: Expr, dtype: str, n: int) -> Expr:
    """Return `levels[indices]` without a lookup instruction: each level is masked where its index is selected."""
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
