"""Data of attention in integers: pages of codes in the pool, and queries as codes of 13 bits.

Also the scratch of one micro-tile within a span. Knows layouts and the rounding of queries, not what is computed with
them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from radixlm.runtime.artifact.manifest import PAGE_SIZE
from tvm.script.ir_builder import tirx as T

from ...codegen.builder import Memory, bound, prefetch, registers, serial
from ...codegen.vector import LANES, ROUNDING, Expr, const, fma, lanes, splat, vector_type
from ...weights.layout import round_up
from ..attention_rows import QueryRows, RowScratch, RowState
from ..kv_pool import KEY_LIMIT, TOKENS_AT_ONCE, largest_magnitude
from ..kv_spans import SPAN, StoredPage

_PAIR_BYTES = 4  # bytes of two elements of a key


@dataclass(frozen=True)
class CodePage:
    """The codes of a page in the pool."""

    stored: StoredPage

    def keys_of(self, d: Expr, token: int, count: int) -> Expr:
        """Return elements 2d and 2d + 1 of the keys of tokens `[token, token + count)`, as interleaved int16."""
        where = self.stored.keys + d * (PAGE_SIZE * _PAIR_BYTES) + token * _PAIR_BYTES
        return self._read(where, count * _PAIR_BYTES, "int16")

    def values_of(self, group: Expr, column: Expr, first: int, count: int) -> Expr:
        """Return `count` bytes of value codes, int8, of the four tokens of group `group`, beginning at one column.

        The codes of the four tokens are interleaved: byte `4 * i + t` is that of token `t` in column `column + i`.
        `first` is the first of these bytes to return.
        """
        columns = self.stored.pool.layout.value_columns
        return self._read(self.stored.values + (group * columns + column) * TOKENS_AT_ONCE + first, count, "int8")

    def fetch_values(self, d: Expr) -> None:
        """Prefetch a share of the values while elements 2d and 2d + 1 of the keys are used."""
        if self.stored.next_keys is None:
            return
        layout = self.stored.pool.layout
        size = max(1, layout.value_columns * PAGE_SIZE // (layout.key_dim // 2))
        prefetch(self.stored.pool.pool, self.stored.values + d * size, size, 1)

    def fetch_next_keys(self, group: Expr) -> None:
        """Prefetch a share of the next span's keys while the values of a group of tokens are used."""
        if self.stored.next_keys is not None:
            size = self.stored.pool.layout.key_dim * _PAIR_BYTES // 2 * TOKENS_AT_ONCE
            prefetch(self.stored.pool.pool, self.stored.next_keys + group * size, size, 1)

    def _read(self, where: Expr, num_bytes: int, dtype: str) -> Expr:
        """Return bytes of the pool as a vector of `dtype`."""
        vector = self.stored.pool.pool[lanes(where, num_bytes)]
        return vector if dtype == "int8" else T.reinterpret(vector_type(dtype, num_bytes // 2), vector)


_MOST_QUERY = 4095  # largest code of a query: 13 bits
_MOST_ROWS = 8  # largest number of rows of a micro-tile
_CODES = 4  # number of codes of weights in the space of a float32


def query_limit(key_dim: int) -> int:
    """Return the largest code of queries: 13 bits, or less if sums of `key_dim` products would exceed 32 bits.

    >>> query_limit(256), query_limit(512)
    (4095, 2049)
    """
    return int(min(_MOST_QUERY, ((1 << 31) - 1) // (KEY_LIMIT * key_dim)))


@dataclass(frozen=True)
class CodeScratch(RowScratch):
    """Scratch of attention in integers: the state, the rows' queries as int16, and their scales.

    Then follows memory of one micro-tile: `[8, SPAN]` scores (later weights), codes of the weights, `[8, 16]` sums of
    weights, and 16 maxima and 16 scales of these codes. All methods but `query` and `query_scale` count rows within the
    micro-tile.
    """

    @property
    def _query_floats(self) -> int:
        """Number of float32 that hold a query's codes."""
        return round_up(self.key_dim, LANES) // 2

    def query(self, row: Expr) -> Expr:
        """Return the index of a row's codes, two in a float32."""
        return self.state.floats + row * self._query_floats

    def query_scale(self, row: Expr) -> Expr:
        """Return the index of the factor of a row's scores."""
        return self.query(self.state.num_rows) + row

    def weights(self, row: Expr) -> Expr:
        """Return the index of a row's weights."""
        return self.query_scale(round_up(self.state.num_rows, LANES) + LANES) + row * SPAN

    def codes(self, row: Expr) -> Expr:
        """Return the index of the codes of a row's weights, four in a float32."""
        return self.weights(_MOST_ROWS) + row * (SPAN // _CODES)

    def span_sums(self, row: Expr) -> Expr:
        """Return the index of the 16 sums of a row's weights."""
        return self.codes(_MOST_ROWS) + row * LANES

    def span_maxima(self, micro: Expr) -> Expr:
        """Return the index of the maxima of the micro-tile's rows."""
        return self.span_sums(_MOST_ROWS)

    @property
    def code_scales(self) -> int:
        """Index of the scales of the weights' codes."""
        return int(self.span_maxima(0)) + LANES

    @property
    def floats(self) -> int:
        """Number of float32 in the scratch."""
        return self.code_scales + LANES


@dataclass(frozen=True)
class CodeRows(QueryRows):
    """Queries as codes: `rint(query * (limit / largest))`, where `largest` is the row's largest magnitude."""

    def scratch(self, num_tokens: int, more_floats: int = 0) -> CodeScratch:
        """Return scratch for `num_tokens` tokens, followed by `more_floats` float32."""
        whole = CodeScratch(self.state(num_tokens, Memory(None)), self.shape.layout.key_dim)
        memory = registers(whole.floats + more_floats, "float32")
        return CodeScratch(self.state(num_tokens, memory), whole.key_dim)

    def state(self, num_tokens: int, memory: Memory) -> RowState:
        """Return the state of `num_tokens` tokens, whose outputs are whole vectors."""
        plain = super().state(num_tokens, memory)
        return replace(plain, value_dim=self.shape.layout.value_columns)

    def _load_query(self, scratch: RowScratch, m: Expr, head: Expr, g: Expr, to: Expr) -> None:
        """Load a row's query as codes, and its scale, to row `to` of the scratch."""
        assert isinstance(scratch, CodeScratch)
        size, n, limit = self.shape.layout.key_dim, self.shape.n, query_limit(self.shape.layout.key_dim)
        floats, source = self.q, bound((m * self.shape.num_heads + head * self.shape.group + g) * size)
        if size % LANES:  # zeros after the query
            floats = registers(round_up(size, LANES), "float32")
            floats[lanes(size // LANES * LANES)] = const(0)
            with serial(size // n) as i:
                floats[lanes(i * n, n)] = self.q[lanes(source + i * n, n)]
            source = T.int64(0)
        largest = bound(largest_magnitude(floats, size, source))
        inverse = bound(T.float32(limit) / largest)
        scratch.memory[scratch.query_scale(to)] = largest * T.float32(self.shape.query_factor / limit)
        query = bound(scratch.query(to))
        with serial(round_up(size, LANES) // LANES) as i:
            whole = fma(floats[lanes(source + i * LANES)], splat(inverse), const(ROUNDING), self.shape.has_fma)
            codes = T.Cast("int16x16", T.reinterpret("int32x16", whole))
            scratch.memory[lanes(query + i * (LANES // 2), LANES // 2)] = T.reinterpret("float32x8", codes)
