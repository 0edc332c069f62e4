"""Queries in and outputs out: between tokens' rows of `q` and `y` and the rows that attention works on.

A row is a query head of a token, of the heads that share one KV head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from .attention_scratch import RowScratch, RowState
from .attention_shape import AttentionShape
from .builder import Memory, bound, registers, serial
from .lane_reductions import sum_of_lanes
from .softmax import LOWEST
from .vector import Expr, const, lanes, splat


@dataclass(frozen=True)
class QueryRows:
    """`q` float32 `[M, num_heads * head_dim]`, `y` float32 `[M, y_stride]`."""

    shape: AttentionShape
    q: Memory
    y: Memory
    y_stride: int

    def scratch(self, num_tokens: int, more_floats: int = 0) -> RowScratch:
        """Memory for `num_tokens` tokens, and for something else behind it."""
        size = RowScratch(self.state(num_tokens, Memory(None))).floats
        return RowScratch(self.state(num_tokens, registers(size + more_floats, "float32")))

    def state(self, num_tokens: int, memory: Memory) -> RowState:
        """The state of `num_tokens` tokens, at the beginning of the memory."""
        num_micros = self.num_micros(num_tokens) * self.shape.heads.number
        return RowState(self.shape.layout.head_dim, num_tokens * self.shape.group, num_micros, memory)

    def num_micros(self, num_tokens: int) -> int:
        """Micro-tiles of a part of the heads: at the most so many whole ones, then single tokens."""
        return num_tokens // self.shape.tokens + self.shape.tokens - 1 if num_tokens > 1 else 1

    def first_row(self, start: Expr, size: int, token: Expr, num_tokens: int) -> Expr:
        """The row of a token's first head of a part of the group: part by part, in each token by token."""
        return start * num_tokens + token * size

    def load(self, scratch: RowScratch, first: Expr, count: Expr, head: Expr, num_tokens: int) -> None:
        """Queries of tokens `[first, first + count)`, scaled so that weights are powers of two; nothing is seen yet."""
        state, memory, n, head_dim = scratch.state, scratch.memory, self.shape.n, self.shape.layout.head_dim
        scale = head_dim**-0.5 / math.log(2)

        def row(m: Expr, g: Expr, to: Expr) -> None:
            source = bound((m * self.shape.num_heads + head * self.shape.group + g) * head_dim)
            query, output = bound(scratch.query(to)), bound(state.output(to))
            with serial(head_dim // n) as i:
                memory[lanes(query + i * n, n)] = self.q[lanes(source + i * n, n)] * const(scale, n)
                memory[lanes(output + i * n, n)] = const(0, n)
            memory[lanes(state.sums(to))] = const(0)

        self._each_row(first, count, num_tokens, row)
        with serial(state.num_micros) as micro:
            memory[lanes(state.maxima(micro))] = const(LOWEST)

    def store(self, scratch: RowScratch, first: Expr, count: Expr, head: Expr, num_tokens: int) -> None:
        """Outputs divided by the sums of weights."""
        state, memory, n, head_dim = scratch.state, scratch.memory, self.shape.n, self.shape.layout.head_dim

        def row(m: Expr, g: Expr, of: Expr) -> None:
            share = bound(T.float32(1) / sum_of_lanes(memory[lanes(state.sums(of))]))
            to, output = bound(m * self.y_stride + (head * self.shape.group + g) * head_dim), bound(state.output(of))
            with serial(head_dim // n) as i:
                self.y[lanes(to + i * n, n)] = memory[lanes(output + i * n, n)] * splat(share, n)

        self._each_row(first, count, num_tokens, row)

    def _each_row(self, first: Expr, count: Expr, num_tokens: int, emit: Callable[[Expr, Expr, Expr], None]) -> None:
        """`emit(token, head of the group, row)`."""
        with serial(count) as j:

            def part(index: Expr, start: Expr, size: int) -> None:
                with serial(size) as i:
                    emit(first + j, start + i, bound(self.first_row(start, size, j, num_tokens) + i))

            self.shape.heads.each(part)
