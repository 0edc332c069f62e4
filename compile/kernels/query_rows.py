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
from .vector import LANES, Expr, const, lanes, splat


@dataclass(frozen=True)
class QueryRows:
    """`q` float32 `[M, num_heads * head_dim]`, `y` `[M, y_stride]`, `normalizers` `[M, num_heads, 2]`."""

    shape: AttentionShape
    q: Memory
    y: Memory
    y_stride: int
    normalizers: Memory

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

        def row(m: Expr, g: Expr, to: Expr, _: Expr) -> None:
            self._load_query(scratch, m, head, g, to)
            output = bound(state.output(to))
            with serial(head_dim // n) as i:
                memory[lanes(output + i * n, n)] = const(0, n)
            memory[lanes(state.sums(to))] = const(0)

        self._each_row(first, count, num_tokens, row)
        with serial(state.num_micros) as micro:
            memory[lanes(state.maxima(micro))] = const(LOWEST)

    def load_finished(
        self, scratch: RowScratch, first: Expr, count: Expr, head: Expr, num_tokens: int, normalizers: Expr
    ) -> None:
        """The same queries once attention is done, without a state; the two normalizers of each row go to the scratch,
        from index `normalizers` on."""

        def row(m: Expr, g: Expr, to: Expr, _: Expr) -> None:
            self._load_query(scratch, m, head, g, to)
            source = bound(self._normalizer(m, head, g))
            for i in range(2):
                scratch.memory[normalizers + to * 2 + i] = self.normalizers[source + i]

        self._each_row(first, count, num_tokens, row)

    def store(self, scratch: RowScratch, first: Expr, count: Expr, head: Expr, num_tokens: int) -> None:
        """Outputs divided by the sums of weights; the normalizers, which are the largest score and one over the sum."""
        state, memory, n, head_dim = scratch.state, scratch.memory, self.shape.n, self.shape.layout.head_dim

        def row(m: Expr, g: Expr, of: Expr, maximum: Expr) -> None:
            share = bound(T.float32(1) / sum_of_lanes(memory[lanes(state.sums(of))]))
            to, output = bound(m * self.y_stride + (head * self.shape.group + g) * head_dim), bound(state.output(of))
            with serial(head_dim // n) as i:
                self.y[lanes(to + i * n, n)] = memory[lanes(output + i * n, n)] * splat(share, n)
            normalizer = bound(self._normalizer(m, head, g))
            self.normalizers[normalizer] = memory[state.maxima(0) + maximum]
            self.normalizers[normalizer + 1] = share

        self._each_row(first, count, num_tokens, row)

    def _normalizer(self, m: Expr, head: Expr, g: Expr) -> Expr:
        """Index of the first of a row's two."""
        return (m * self.shape.num_heads + head * self.shape.group + g) * 2

    def _load_query(self, scratch: RowScratch, m: Expr, head: Expr, g: Expr, to: Expr) -> None:
        n, head_dim = self.shape.n, self.shape.layout.head_dim
        scale = head_dim**-0.5 / math.log(2)
        source = bound((m * self.shape.num_heads + head * self.shape.group + g) * head_dim)
        query = bound(scratch.query(to))
        with serial(head_dim // n) as i:
            scratch.memory[lanes(query + i * n, n)] = self.q[lanes(source + i * n, n)] * const(scale, n)

    def _each_row(
        self, first: Expr, count: Expr, num_tokens: int, emit: Callable[[Expr, Expr, Expr, Expr], None]
    ) -> None:
        """`emit(token, head of the group, row, its place among the maxima)`."""
        with serial(count) as j:

            def part(index: Expr, start: Expr, size: int) -> None:
                micro, first_of_micro = self._micro(j, count, size)
                maximum = bound((index * self.num_micros(num_tokens) + micro) * LANES + first_of_micro)
                with serial(size) as i:
                    emit(first + j, start + i, bound(self.first_row(start, size, j, num_tokens) + i), maximum + i)

            self.shape.heads.each(part)

    def _micro(self, token: Expr, count: Expr, size: int) -> tuple[Expr, Expr]:
        """Of a part of the heads, the micro-tile that a token is in, and where the token's rows begin there."""
        tokens = self.shape.tokens
        whole = count // tokens
        is_left = token >= whole * tokens
        micro = T.Select(is_left, token - whole * (tokens - 1), token // tokens)
        return micro, T.Select(is_left, T.int64(0), token % tokens * size)
