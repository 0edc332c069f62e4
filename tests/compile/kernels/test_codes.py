"""Every format of integer codes unpacks in a kernel to the levels of the codes that NumPy packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from radixlm.compile.codegen.builder import SIZE, Kernel, serial
from radixlm.compile.codegen.targets import Target
from radixlm.compile.codegen.vector import lanes, splat
from radixlm.compile.weights.codes import CODES
from radixlm.compile.weights.kinds import CodesName, Scales, WeightKind
from radixlm.compile.weights.layout import CHUNK, CHUNKS, GROUP, ROW_BLOCK
from radixlm.compile.weights.quantization import levels
from tvm.script.ir_builder import tirx as T

from .harness import built, every_target
from .random_weights import num_codes

every_format = pytest.mark.parametrize("name", CODES)
BLOCKS, GROUPS = 2, 3


def unpack_pieces(name: CodesName, size: int, target: Target) -> Any:
    """A PrimFunc `(packed, codes, num_groups) -> 0` that unpacks chunks in pieces of `size` bytes."""
    with Kernel() as k:
        packed, codes, num_groups = k.arguments(packed="uint8", codes="uint8", num_groups=SIZE)
        with serial(num_groups) as g:
            for chunk in range(CHUNKS):
                for offset in range(0, CHUNK, size):
                    where = lanes((g * CHUNKS + chunk) * CHUNK + offset, size)
                    codes[where] = CODES[name].piece(
                        packed, g * CODES[name].group_bytes, chunk, offset, size, target.byte_lookups
                    )
    return k.function


def unpack_some(name: CodesName, n: int, target: Target) -> Any:
    """The same with `n` codes at a time, int32."""
    with Kernel() as k:
        packed, codes, num_groups = k.arguments(packed="uint8", codes="int32", num_groups=SIZE)
        with serial(num_groups) as g, serial(CHUNKS) as chunk, serial(CHUNK // n) as i:
            where = lanes((g * CHUNKS + chunk) * CHUNK + i * n, n)
            codes[where] = CODES[name].some(packed, g, T.Cast("int64", chunk), i * n, n)
    return k.function


class ReadLines:
    """Memory that keeps a list of the lines that are read."""

    def __init__(self) -> None:
        self.lines: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.lines.append(int(index.base) // CHUNK)
        return splat(T.uint8(0), CHUNK)


@every_format
def test_a_group_is_read_in_the_order_of_memory(name: CodesName) -> None:
    memory: Any = ReadLines()
    for chunk in range(CHUNKS):
        CODES[name].piece(memory, 0, chunk, 0, CHUNK, {})
    first_reads = list(dict.fromkeys(memory.lines))
    assert first_reads == list(range(CODES[name].group_bytes // CHUNK))


@every_target
@every_format
def test_what_numpy_packs_a_kernel_unpacks(target: Target, name: CodesName) -> None:
    stored = CODES[name]
    shape = (BLOCKS, GROUPS, CHUNKS, ROW_BLOCK, GROUP // CHUNKS)
    kind = WeightKind(name, Scales(32))
    codes = np.random.default_rng(5).integers(0, num_codes(kind), shape).astype(np.uint8)
    expected = levels(kind, codes)
    assert expected.max() == stored.max_level
    packed = np.ascontiguousarray(stored.pack(codes))
    assert packed.nbytes == BLOCKS * GROUPS * stored.group_bytes
    for make, size, dtype in (
        (unpack_pieces, 64, np.uint8),
        (unpack_pieces, 16, np.uint8),
        (unpack_some, 4, np.int32),
        (unpack_some, 1, np.int32),
    ):
        unpacked = np.zeros(shape, dtype)
        built(target, make, name, size, target)(packed, unpacked, BLOCKS * GROUPS)
        assert (unpacked == expected).all()
