"""Rows of attention: their state, and loading of queries and storing of outputs.

A row is one query head of one token. The rows of the query heads that share a KV head are computed together. Rows whose
sums fit the target's registers form a micro-tile. Knows nothing of pages or threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from ..codegen.builder import Memory, bound, registers, serial
from ..codegen.lane_reductions import sum_of_lanes
from ..codegen.powers import exp2
from ..codegen.vector import LANES, Expr, const, lanes, splat
from .attention_shape import AttentionShape
from .kv_spans import SPAN

LOWEST = -1e30  # below every score, and finite, so that subtracting it from itself gives 0


@dataclass(frozen=True)
class RowState:
    """The running softmax state of rows, from `memory[base]` on.

    It is `[rows, value_dim]` undivided outputs, `[rows, 16]` sums of weights, lane by lane, and `[micro-tiles, 16]`
    maxima, all float32.
    """

    value_dim: int
    num_rows: int
    num_micros: int
    memory: Memory
    base: Expr = 0

    def output(self, row: Expr) -> Expr:
        """Return the index of a row's output."""
        return self.base + row * self.value_dim

    def sums(self, row: Expr) -> Expr:
        """Return the index of a row's 16 sums."""
        return self.base + self.num_rows * self.value_dim + row * LANES

    def maxima(self, micro: Expr) -> Expr:
        """Return the index of the maxima of up to 16 rows of a micro-tile."""
        return self.base + self.num_rows * (self.value_dim + LANES) + micro * LANES

    @property
    def floats(self) -> int:
        """Number of float32 in the state."""
        return self.num_rows * (self.value_dim + LANES) + self.num_micros * LANES


@dataclass(frozen=True)
class RowScratch:
    """Scratch of attention: the state, followed by the memory of one span.

    The latter is `[rows, key_dim]` queries, `[rows, SPAN]` weights (at first scores), and `[rows, 16]` sums and
    `[micro-tiles, 16]` maxima of the span. It is one allocation, because each from TVM's pool takes as long as a
    hundred multiplications.
    """

    state: RowState
    key_dim: int

    @property
    def memory(self) -> Memory:
        """The memory of the state and of the scratch."""
        return self.state.memory

    def query(self, row: Expr) -> Expr:
        """Return the index of a row's query."""
        return self.state.floats + row * self.key_dim

    def weights(self, row: Expr) -> Expr:
        """Return the index of a row's weights."""
        return self.state.floats + self.state.num_rows * self.key_dim + row * SPAN

    def span_sums(self, row: Expr) -> Expr:
        """Return the index of the 16 sums of a row's weights."""
        return self.weights(self.state.num_rows) + row * LANES

    def span_maxima(self, micro: Expr) -> Expr:
        """Return the index of the maxima of up to 16 rows of a micro-tile."""
        return self.span_sums(self.state.num_rows) + micro * LANES

    @property
    def floats(self) -> int:
        """Number of float32 in the scratch."""
        return int(self.span_maxima(self.state.num_micros))


@dataclass(frozen=True)
class QueryRows:
    """Arguments of attention by token: queries, outputs and normalizers.

    `q` is float32 `[M, num_heads * key_dim]`, `y` `[M, y_stride]`, `normalizers` `[M, num_heads, 2]`, `sinks`
    `[num_heads]`.
    """

    shape: AttentionShape
    q: Memory
    y: Memory
    y_stride: int
    normalizers: Memory
    sinks: Memory | None = None

    def scratch(self, num_tokens: int, more_floats: int = 0) -> RowScratch:
        """Return scratch for `num_tokens` tokens, followed by `more_floats` float32."""
        key_dim = self.shape.layout.key_dim
        size = RowScratch(self.state(num_tokens, Memory(None)), key_dim).floats
        return RowScratch(self.state(num_tokens, registers(size + more_floats, "float32")), key_dim)

    def state(self, num_tokens: int, memory: Memory) -> RowState:
        """Return the state of `num_tokens` tokens, at the beginning of `memory`."""
        num_micros = self.num_micros(num_tokens) * self.shape.heads.number
        return RowState(self.shape.layout.value_dim, num_tokens * self.shape.group, num_micros, memory)

    def num_micros(self, num_tokens: int) -> int:
        """Return the largest number of micro-tiles of a part of the heads: whole ones, then single tokens."""
        return num_tokens // self.shape.tokens + self.shape.tokens - 1 if num_tokens > 1 else 1

    def first_row(self, start: Expr, size: int, token: Expr, num_tokens: int) -> Expr:
        """Return the row of a token's first head in a part of the group. Rows are ordered by part, then by token."""
        return start * num_tokens + token * size

    def load(self, scratch: RowScratch, first: Expr, count: Expr, head: Expr, num_tokens: int) -> None:
        """Load the queries of tokens `[first, first + count)`, and clear the state.

        Queries are scaled so that weights are powers of two.
        """
        state, memory, n, size = scratch.state, scratch.memory, self.shape.n, self.shape.layout.value_dim

        def row(m: Expr, g: Expr, to: Expr, _: Expr) -> None:
            self._load_query(scratch, m, head, g, to)
            output = bound(state.output(to))
            with serial(size // n) as i:
                memory[lanes(output + i * n, n)] = const(0, n)
            memory[lanes(state.sums(to))] = const(0)

        self._each_row(first, count, num_tokens, row)
        with serial(state.num_micros) as micro:
            memory[lanes(state.maxima(micro))] = const(LOWEST)

    def load_finished(
        self,
        scratch: RowScratch,
        token: Callable[[Expr], Expr],
        count: Expr,
        head: Expr,
        num_tokens: int,
        normalizers: Expr,
    ) -> None:
        """Load the queries of the tokens `token(0)` to `token(count - 1)` after attention, without a state.

        The two normalizers of each row are stored in the scratch, from index `normalizers` on.
        """

        def row(j: Expr, g: Expr, to: Expr, _: Expr) -> None:
            m = bound(token(j))
            self._load_query(scratch, m, head, g, to)
            source = bound(self._normalizer(m, head, g))
            for i in range(2):
                scratch.memory[normalizers + to * 2 + i] = self.normalizers[source + i]

        self._each_row(T.int64(0), count, num_tokens, row)

    def store(self, scratch: RowScratch, first: Expr, count: Expr, head: Expr, num_tokens: int) -> None:
        """Store outputs divided by their sums of weights, and the normalizers.

        The normalizers are the largest score and one over the sum.
        """
        state, memory, n, size = scratch.state, scratch.memory, self.shape.n, self.shape.layout.value_dim

        def row(m: Expr, g: Expr, of: Expr, maximum: Expr) -> None:
            largest, total = memory[state.maxima(0) + maximum], sum_of_lanes(memory[lanes(state.sums(of))])
            if self.sinks is None:
                share = bound(T.float32(1) / total)
                factor = share
            else:
                largest, share, factor = self._with_sink(head * self.shape.group + g, largest, total)
            to, output = bound(m * self.y_stride + (head * self.shape.group + g) * size), bound(state.output(of))
            with serial(size // n) as i:
                self.y[lanes(to + i * n, n)] = memory[lanes(output + i * n, n)] * splat(factor, n)
            normalizer = bound(self._normalizer(m, head, g))
            self.normalizers[normalizer] = largest
            self.normalizers[normalizer + 1] = share

        self._each_row(first, count, num_tokens, row)

    def _with_sink(self, head: Expr, largest: Expr, total: Expr) -> tuple[Expr, Expr, Expr]:
        """Return a row's largest score, one over its sum, and its output's factor, all including its head's sink."""
        assert self.sinks is not None
        sink, before = bound(self.sinks[head] * T.float32(1 / math.log(2))), bound(largest)
        after = bound(T.max(before, sink))
        powers = registers(2 * LANES, "float32")
        powers[lanes(0)] = exp2(splat(before - after), self.shape.has_fma)
        powers[lanes(LANES)] = exp2(splat(sink - after), self.shape.has_fma)
        share = bound(T.float32(1) / (total * powers[0] + powers[LANES]))
        return after, share, bound(powers[0] * share)

    def _normalizer(self, m: Expr, head: Expr, g: Expr) -> Expr:
        """Return the index of the first of a row's two normalizers."""
        return (m * self.shape.num_heads + head * self.shape.group + g) * 2

    def _load_query(self, scratch: RowScratch, m: Expr, head: Expr, g: Expr, to: Expr) -> None:
        """Load a row's query, scaled, to row `to` of the scratch."""
        n, size = self.shape.n, self.shape.layout.key_dim
        source = bound((m * self.shape.num_heads + head * self.shape.group + g) * size)
        query = bound(scratch.query(to))
        with serial(size // n) as i:
            scratch.memory[lanes(query + i * n, n)] = self.q[lanes(source + i * n, n)] * const(
                self.shape.query_factor, n
            )

    def _each_row(
        self, first: Expr, count: Expr, num_tokens: int, emit: Callable[[Expr, Expr, Expr, Expr], None]
    ) -> None:
        """Call `emit(token, head of the group, row, index of its maximum)` for every row."""
        with serial(count) as j:

            def part(index: Expr, start: Expr, size: int) -> None:
                micro, first_of_micro = self._micro(j, count, size)
                maximum = bound((index * self.num_micros(num_tokens) + micro) * LANES + first_of_micro)
                with serial(size) as i:
                    emit(first + j, start + i, bound(self.first_row(start, size, j, num_tokens) + i), maximum + i)

            self.shape.heads.each(part)

    def _micro(self, token: Expr, count: Expr, size: int) -> tuple[Expr, Expr]:
        """Return the micro-tile of a part of the heads that has a token, and the offset of the token's rows in it."""
        tokens = self.shape.tokens
        whole = count // tokens
        is_left = token >= whole * tokens
        micro = T.Select(is_left, token - whole * (tokens - 1), token // tokens)
        return micro, T.Select(is_left, T.int64(0), token % tokens * size)
