"""The formats of integer codes: how many bits, where they lie in a group, and how a kernel unpacks them.

A format is one class here and one line in `CODES`. A group is `GROUP` inputs of the 16 outputs of a block; its codes
are `CHUNKS` chunks of `CHUNK` codes (`layout.py`). Knows neither scales nor targets.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
from tvm.script.ir_builder import tirx as T

from ..codegen.builder import Memory
from ..codegen.vector import Expr, lanes, splat, vector_type
from .layout import CHUNK, CHUNKS
from .quantization import KindName

Bytes = npt.NDArray[np.uint8]


class Codes(Protocol):
    """How the codes of a kind of weight are stored."""

    max_code: int
    group_bytes: int  # of one group of a block

    def pack(self, chunks: Bytes) -> Bytes:
        """Codes `[block, K/32, chunk, 16 outputs, 4 inputs]`, one a byte, as they are stored."""
        ...

    def piece(self, memory: Memory, start: Expr, chunk: int, offset: int, size: int) -> Expr:
        """Bytes `[offset, offset + size)` of a chunk as uint8, of the group whose bytes begin at index `start`."""
        ...

    def some(self, memory: Memory, group: Expr, chunk: Expr, byte: Expr, n: int) -> Expr:
        """`n` neighbouring codes of a chunk from `byte` on as int32, of the group-th group in memory."""
        ...


class _Nibbles:
    """4 bits: a byte holds chunk 2j in its low half and chunk 2j + 1 in its high half."""

    max_code = 15
    group_bytes = CHUNKS // 2 * CHUNK

    def pack(self, chunks: Bytes) -> Bytes:
        return chunks[:, :, 0::2] + chunks[:, :, 1::2] * np.uint8(16)

    def piece(self, memory: Memory, start: Expr, chunk: int, offset: int, size: int) -> Expr:
        packed = memory[lanes(start + chunk // 2 * CHUNK + offset, size)]
        if chunk % 2 == 0:
            return T.bitwise_and(packed, splat(T.uint8(15), size))
        return T.shift_right(packed, splat(T.uint8(4), size))

    def some(self, memory: Memory, group: Expr, chunk: Expr, byte: Expr, n: int) -> Expr:
        packed = T.Cast(vector_type("int32", n), memory[lanes((group * (CHUNKS // 2) + chunk // 2) * CHUNK + byte, n)])
        return T.bitwise_and(T.shift_right(packed, splat(T.Cast("int32", chunk % 2 * 4), n)), splat(T.int32(15), n))


class _Bytes:
    """8 bits: codes as they are."""

    max_code = 255
    group_bytes = CHUNKS * CHUNK

    def pack(self, chunks: Bytes) -> Bytes:
        return chunks

    def piece(self, memory: Memory, start: Expr, chunk: int, offset: int, size: int) -> Expr:
        return memory[lanes(start + chunk * CHUNK + offset, size)]

    def some(self, memory: Memory, group: Expr, chunk: Expr, byte: Expr, n: int) -> Expr:
        return T.Cast(vector_type("int32", n), memory[lanes((group * CHUNKS + chunk) * CHUNK + byte, n)])


CODES: dict[KindName, Codes] = {"q4": _Nibbles(), "q8": _Bytes()}
