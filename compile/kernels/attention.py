"""Attention of each token over its sequence's pages, in fixed spans of 256 tokens that are merged in order.

A span's result depends on the queries and its keys alone, and spans merge by the same formula whether one thread walks
them (many tokens) or several threads share them (few tokens): so a token's output is the same bits in every batch.
Softmax is rescaled on the way as in flash attention (Dao et al., 2022).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from radixlm.runtime.manifest import PAGE_SIZE, KVLayout
from tvm.script.ir_builder import tirx as T

from ..targets import Target
from .builder import SIZE, Kernel, Memory, either, parallel, registers, serial, when
from .pages import KV_DTYPES, PagedPool
from .vector import LANES, Expr, const, exp, fma, lanes, reduce_max, splat, to_f32

SPAN = 256  # tokens
SPAN_PAGES = SPAN // PAGE_SIZE
SPLIT_TOKENS = 8  # up to so many tokens in a step, spans go to different threads
_LOWEST = -1e30
_REGISTER_BYTES = 1024  # a buffer must be smaller for LLVM to keep it in registers


def span_scratch_floats(num_heads: int, head_dim: int, context_length: int) -> int:
    """float32 of scratch that the split form needs: each span's output, maximum and sum."""
    num_spans = -(-context_length // SPAN)
    return SPLIT_TOKENS * num_spans * num_heads * (head_dim + 2)


def attention(layout: KVLayout, num_heads: int, y_stride: int, target: Target) -> Any:
    """A PrimFunc `(q, pool, page_table, row_of_token, kv_lengths, spans, y, layer, num_pages, table_stride, max_spans,
    num_rows) -> 0`.

    `q` float32 `[num_rows, num_heads * head_dim]`, `y` `[num_rows, y_stride]`; token m sees `kv_lengths[m]` rows of the
    pages in row `row_of_token[m]` of `page_table` int32 `[B, table_stride]`. `spans` is scratch, with `max_spans` spans
    for the longest row.
    """
    with Kernel() as k:
        q, pool, table, row_of_token, kv_lengths, spans, y, layer, num_pages, table_stride, max_spans, num_rows = (
            k.arguments(
                q="float32",
                pool=KV_DTYPES[layout.dtype],
                page_table="int32",
                row_of_token="int32",
                kv_lengths="int32",
                spans="float32",
                y="float32",
                layer=SIZE,
                num_pages=SIZE,
                table_stride=SIZE,
                max_spans=SIZE,
                num_rows=SIZE,
            )
        )
        kernel = _Attention(layout, num_heads, y_stride, target, q, PagedPool(layout, pool, layer, num_pages), table)
        heads = layout.num_kv_heads

        def sequence(m: Expr) -> tuple[Expr, Expr]:
            """Start of the token's row in the page table, and the KV rows that it sees."""
            return T.Cast("int64", row_of_token[m]) * table_stride, T.Cast("int64", kv_lengths[m])

        with either(num_rows <= SPLIT_TOKENS) as (then, otherwise):
            with then:
                with parallel(num_rows * heads * max_spans) as item:
                    m, head, span = item // (heads * max_spans), item // max_spans % heads, item % max_spans
                    row, length = sequence(m)
                    with when(span * SPAN < length):
                        kernel.span(m, head, span, row, length, spans, item * kernel.span_floats)
                with parallel(num_rows * heads) as item:
                    m, head = item // heads, item % heads
                    _, length = sequence(m)
                    state = kernel.begin()
                    with serial((length + (SPAN - 1)) // SPAN) as span:
                        kernel.merge(state, spans, (item * max_spans + span) * kernel.span_floats)
                    kernel.end(state, y, m, head)
            with otherwise, parallel(num_rows * heads) as item:
                m, head = item // heads, item % heads
                row, length = sequence(m)
                state = kernel.begin()
                local = registers(kernel.span_floats, "float32")
                with serial((length + (SPAN - 1)) // SPAN) as span:
                    kernel.span(m, head, span, row, length, local, 0)
                    kernel.merge(state, local, 0)
                kernel.end(state, y, m, head)
    return k.function


class _Attention:
    """Emits the parts for one KV head and the `group` query heads that share it.

    A span's result is `[group, head_dim]` weighted values, then `[group]` maxima, then `[group]` sums.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_heads: int,
        y_stride: int,
        target: Target,
        q: Memory,
        pool: PagedPool,
        table: Memory,
    ) -> None:
        self.layout, self.num_heads, self.y_stride = layout, num_heads, y_stride
        self.q, self.pool, self.table = q, pool, table
        self.dtype, self.has_fma = KV_DTYPES[layout.dtype], target.has_fma
        self.group = num_heads // layout.num_kv_heads
        self.head_dim = layout.head_dim
        self.n = next(n for n in (16, 8, 4, 2, 1) if layout.head_dim % n == 0)  # lanes along a value
        self.span_floats = self.group * (self.head_dim + 2)

    def begin(self) -> Memory:
        """Running output, maximum and sum, in the same order as a span's."""
        state = registers(self.span_floats, "float32")
        with serial(self.group * self.head_dim) as i:
            state[i] = T.float32(0)
        for g in range(self.group):
            state[self._maximum(g)] = T.float32(_LOWEST)
            state[self._sum(g)] = T.float32(0)
        return state

    def span(self, m: Expr, head: Expr, span: Expr, row: Expr, length: Expr, out: Memory, at: Expr) -> None:
        """Attend to one span, into `out[at:]`."""
        scores = registers(self.group * SPAN, "float32")
        seen = T.min(T.int64(SPAN), length - span * SPAN)  # tokens of this span that the query sees
        pages = (seen + (PAGE_SIZE - 1)) // PAGE_SIZE

        def page(p: Expr) -> Expr:
            return T.Cast("int64", self.table[row + span * SPAN_PAGES + p])

        with serial(pages) as p:
            for heads in self._chunks(4 * LANES):
                self._scores_of_page(m, head, page(p), p, seen, heads, scores)
        for g in range(self.group):
            self._softmax(scores, g, pages, seen, out, at)
        for d in range(0, self.head_dim, 4 * self.n):
            width = min(4 * self.n, self.head_dim - d)
            for heads in self._chunks(width):
                self._weighted_values(head, page, seen, heads, d, width, scores, out, at)

    def merge(self, state: Memory, spans: Memory, at: Expr) -> None:
        """Take a span's result into the running one."""
        weights = registers(3 * LANES, "float32")
        for g in range(self.group):
            largest = T.max(state[self._maximum(g)], spans[at + self._maximum(g)])
            weights[lanes(2 * LANES)] = splat(largest)
            old, new = splat(state[self._maximum(g)]), splat(spans[at + self._maximum(g)])
            weights[lanes(0)] = exp(old - weights[lanes(2 * LANES)], self.has_fma)
            weights[lanes(LANES)] = exp(new - weights[lanes(2 * LANES)], self.has_fma)
            state[self._maximum(g)] = weights[2 * LANES]
            total = spans[at + self._sum(g)] * weights[LANES]
            state[self._sum(g)] = fma(state[self._sum(g)], weights[0], total, self.has_fma, 1)
            with serial(self.head_dim // self.n) as i:
                where = g * self.head_dim + i * self.n
                added = self._vector(spans, at + where) * weights[lanes(LANES, self.n)]
                kept = self._vector(state, where)
                state[lanes(where, self.n)] = fma(kept, weights[lanes(0, self.n)], added, self.has_fma, self.n)

    def end(self, state: Memory, y: Memory, m: Expr, head: Expr) -> None:
        """Divide by the sum, into the rows of the query heads."""
        for g in range(self.group):
            with serial(self.head_dim) as i:
                where = m * self.y_stride + (head * self.group + g) * self.head_dim + i
                y[where] = state[g * self.head_dim + i] / state[self._sum(g)]

    def _maximum(self, g: int) -> int:
        return self.group * self.head_dim + g

    def _sum(self, g: int) -> int:
        return self.group * (self.head_dim + 1) + g

    def _vector(self, memory: Memory, start: Expr) -> Expr:
        return memory[lanes(start, self.n)]

    def _chunks(self, floats_per_head: int) -> Iterator[range]:
        """Query heads, as many at a time as keep their accumulators in registers."""
        most = max(1, (_REGISTER_BYTES - 1) // (floats_per_head * 4))
        for start in range(0, self.group, most):
            yield range(start, min(start + most, self.group))

    def _scores_of_page(
        self, m: Expr, head: Expr, page: Expr, p: Expr, seen: Expr, heads: range, scores: Memory
    ) -> None:
        """16 keys at once: lanes are tokens; 4 partial sums hide the latency of an addition."""
        partial = 4 if self.head_dim % 4 == 0 else 1
        acc = registers(len(heads) * partial * LANES, "float32")
        for i in range(len(heads) * partial):
            acc[lanes(i * LANES)] = const(0)
        first_key = self.pool.keys(page, head)
        with serial(self.head_dim // partial) as d:
            for e in range(partial):
                stored = self.pool.pool[lanes(first_key + (d * partial + e) * PAGE_SIZE)]
                keys = to_f32(stored, self.dtype)
                for i, g in enumerate(heads):
                    query = (m * self.num_heads + head * self.group + g) * self.head_dim + d * partial + e
                    where = lanes((i * partial + e) * LANES)
                    acc[where] = fma(splat(self.q[query]), keys, acc[where], self.has_fma)
        visible = T.ramp(p * PAGE_SIZE, T.int64(1), LANES) < splat(seen)
        for i, g in enumerate(heads):
            total = acc[lanes(i * partial * LANES)]
            for e in range(1, partial):
                total = total + acc[lanes((i * partial + e) * LANES)]
            scaled = total * const(self.head_dim**-0.5)
            scores[lanes(g * SPAN + p * PAGE_SIZE)] = T.Select(visible, scaled, const(_LOWEST))

    def _softmax(self, scores: Memory, g: int, pages: Expr, seen: Expr, out: Memory, at: Expr) -> None:
        """Scores to exp(score - maximum), in place; rows that the token does not see count exactly nothing."""
        vector, scalar = registers(LANES, "float32"), registers(1, "float32")
        vector[lanes(0)] = const(_LOWEST)
        with serial(pages) as p:
            vector[lanes(0)] = T.max(vector[lanes(0)], scores[lanes(g * SPAN + p * PAGE_SIZE)])
        scalar[0] = reduce_max(vector[lanes(0)])
        out[at + self._maximum(g)] = scalar[0]
        vector[lanes(0)] = const(0)
        with serial(pages) as p:
            where = lanes(g * SPAN + p * PAGE_SIZE)
            visible = T.ramp(p * PAGE_SIZE, T.int64(1), LANES) < splat(seen)
            weights = exp(scores[where] - splat(scalar[0]), self.has_fma)
            scores[where] = T.Select(visible, weights, const(0))
            vector[lanes(0)] = vector[lanes(0)] + scores[where]
        scalar[0] = vector[0]
        for lane in range(1, LANES):
            scalar[0] = scalar[0] + vector[lane]
        out[at + self._sum(g)] = scalar[0]

    def _weighted_values(
        self,
        head: Expr,
        page: Any,
        seen: Expr,
        heads: range,
        d: int,
        width: int,
        scores: Memory,
        out: Memory,
        at: Expr,
    ) -> None:
        """Columns `[d, d + width)` of the weighted sum of values, one token after another.

        Rows beyond the last token are never read: whatever a page held before must not count, not even times zero.
        """
        n, vectors = self.n, width // self.n
        acc = registers(len(heads) * width, "float32")
        for i in range(len(heads) * vectors):
            acc[lanes(i * n, n)] = const(0, n) if n > 1 else T.float32(0)

        def token(first_value: Expr, p: Expr, t: Expr) -> None:
            for e in range(vectors):
                stored = self.pool.pool[lanes(first_value + t * self.head_dim + d + e * n, n)]
                values = to_f32(stored, self.dtype, n)
                for i, g in enumerate(heads):
                    weight = scores[g * SPAN + p * PAGE_SIZE + t]
                    where = lanes((i * vectors + e) * n, n)
                    weights = splat(weight, n) if n > 1 else weight
                    acc[where] = fma(weights, values, acc[where], self.has_fma, n)

        with serial(seen // PAGE_SIZE) as p:
            first_value = self.pool.values(page(p), head)
            with serial(PAGE_SIZE // 4) as quarter:
                for t in range(4):
                    token(first_value, p, quarter * 4 + t)
        with serial(seen % PAGE_SIZE) as t:
            p = seen // PAGE_SIZE
            token(self.pool.values(page(p), head), p, t)
        for i, g in enumerate(heads):
            for e in range(vectors):
                out[lanes(at + g * self.head_dim + d + e * n, n)] = acc[lanes((i * vectors + e) * n, n)]


