"""Add a LoRA adapter's part to the outputs of matrices: `y += factor * B (A x)`, for the rows that have an adapter.

A row is computed by one thread, from its own inputs and its adapter alone, in an order fixed by the matrices' sizes.
So its result does not depend on other rows, and a row without an adapter is not touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from radixlm.runtime.artifact.lora import LORA_BLOCK, LoraDType
from tvm.script.ir_builder import tirx as T

from ..codegen.builder import SIZE, Kernel, Memory, bound, for_each_row, registers, serial, when
from ..codegen.targets import Target
from ..codegen.vector import LANES, Expr, const, fma, lanes, splat, storage_type, to_f32
from .float_linear import DTYPES

_SUMS = 4  # of neighbouring inputs: one chain of multiply-adds would wait for each result
_BLOCKS = 4  # of outputs that are computed together


@dataclass(frozen=True)
class AdapterPart:
    """One of the matrices: where an adapter has A and B, and where its outputs are in `y`.

    Places count from the first A that the kernel is given. A is `[max_rank / 16, num_inputs, 16]`, B `[num_outputs /
    16, max_rank, 16]`.
    """

    a_at: int
    b_at: int
    num_outputs: int
    column: int
    factor: float


@dataclass(frozen=True)
class AdapterSpec:
    """The matrices that take the same input, and the layout of rows and adapters.

    `stride` is that of adapters, `ranks_stride` that of their ranks.
    """

    dtype: LoraDType
    num_inputs: int
    max_rank: int
    x_stride: int
    y_stride: int
    stride: int
    ranks_stride: int
    parts: tuple[AdapterPart, ...]


def adapt_rows(spec: AdapterSpec, target: Target) -> Any:
    """Return the PrimFunc `(ranks, adapters, adapter_of_row, x, y, num_rows) -> 0`.

    `ranks` is int32 `[max_loras, ranks_stride]`, from the first of the parts on: blocks of 16, 0 for a matrix that an
    adapter does not change. `adapters` is `[max_loras, stride]`, from the first A on. `adapter_of_row` is int32,
    negative for rows without an adapter. `x` and `y` are float32 `[num_rows, x_stride]` and `[num_rows, y_stride]`.
    """
    with Kernel() as k:
        ranks, adapters, adapter_of_row, x, y, num_rows = k.arguments(
            ranks="int32",
            adapters=storage_type(DTYPES[spec.dtype]),
            adapter_of_row="int32",
            x="float32",
            y="float32",
            num_rows=SIZE,
        )
        last = registers(1, "int32")
        last[0] = T.int32(-1)
        with serial(num_rows) as m:
            last[0] = T.max(last[0], adapter_of_row[m])

        def row(m: Expr) -> None:
            adapter = bound(T.Cast("int64", adapter_of_row[m]))
            with when(adapter >= 0):
                emitter = _Row(spec, target, adapters, bound(adapter * spec.stride), x, bound(m * spec.x_stride))
                for number, part in enumerate(spec.parts):
                    num_blocks = bound(T.Cast("int64", ranks[adapter * spec.ranks_stride + number]))
                    with when(num_blocks > 0):
                        emitter.add(part, num_blocks, y, bound(m * spec.y_stride + part.column))

        with when(last[0] >= 0):  # no thread is woken for rows without adapters
            for_each_row(num_rows, row, serial_up_to=1)
    return k.function


@dataclass(frozen=True)
class _Row:
    """An emitter of the products of the row at `x_start` with the matrices of its adapter, which begins at `start`."""

    spec: AdapterSpec
    target: Target
    adapters: Memory
    start: Expr
    x: Memory
    x_start: Expr

    def add(self, part: AdapterPart, num_blocks: Expr, y: Memory, y_start: Expr) -> None:
        """Add the part of a matrix of that rank to the outputs from `y_start` on."""
        narrow = registers(self.spec.max_rank, "float32")
        with serial(num_blocks) as block:
            a_start = bound(self.start + part.a_at + block * (self.spec.num_inputs * LORA_BLOCK))
            narrow[lanes(block * LORA_BLOCK)] = self._shrunk(a_start)
        size = self.spec.max_rank * LANES  # of a block of outputs

        def expand(first: Expr, count: int) -> None:
            totals = [registers(LANES, "float32") for _ in range(count)]
            for total in totals:
                total[lanes(0)] = const(0)
            b_start = bound(self.start + part.b_at + first * size)
            with serial(num_blocks * LORA_BLOCK) as i:
                z = bound(splat(narrow[i]))
                for n, total in enumerate(totals):
                    b = self._stored(b_start + n * size + i * LANES)
                    total[lanes(0)] = fma(z, b, total[lanes(0)], self.target.has_fma)
            for n, total in enumerate(totals):
                where = lanes(y_start + (first + n) * LANES)
                y[where] = fma(total[lanes(0)], const(part.factor), y[where], self.target.has_fma)

        whole, rest = divmod(part.num_outputs // LANES, _BLOCKS)
        with serial(whole) as n:
            expand(bound(n * _BLOCKS), _BLOCKS)
        if rest:
            expand(T.int64(whole * _BLOCKS), rest)

    def _shrunk(self, a_start: Expr) -> Expr:
        """Return 16 numbers of `A x`; `a_start` is where their rows of A begin."""
        sums = [registers(LANES, "float32") for _ in range(_SUMS)]
        for each in sums:
            each[lanes(0)] = const(0)

        def step(i: Expr, j: int) -> None:
            x, a = splat(self.x[self.x_start + i + j]), self._stored(a_start + (i + j) * LANES)
            sums[j][lanes(0)] = fma(x, a, sums[j][lanes(0)], self.target.has_fma)

        whole, rest = divmod(self.spec.num_inputs, _SUMS)
        with serial(whole) as i:
            for j in range(_SUMS):
                step(bound(i * _SUMS), j)
        for j in range(rest):
            step(T.int64(whole * _SUMS), j)
        first, second, third, fourth = (each[lanes(0)] for each in sums)
        return bound((first + second) + (third + fourth))

    def _stored(self, at: Expr) -> Expr:
        """Return 16 stored numbers as float32."""
        return to_f32(self.adapters[lanes(at)], DTYPES[self.spec.dtype], has_f16c=self.target.has_f16c)
