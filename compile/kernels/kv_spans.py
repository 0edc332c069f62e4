"""The KV rows that each token of a step sees, divided into spans of 128 tokens that are read page by page.

A span reads its vectors directly from the pool (`StoredSpan`), or from a float32 copy that many queries share
(`LoadedSpan`). Both give the same vectors. Knows the pool and the page table, not what attention computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from radixlm.runtime.artifact.manifest import PAGE_SIZE, LayerLayout
from tvm.script.ir_builder import tirx as T

from ..codegen.builder import CACHE_LINE, Memory, bound, prefetch, serial
from ..codegen.vector import LANES, Expr, lanes
from .kv_pool import PagedPool

SPAN = 128  # tokens
SPAN_PAGES = SPAN // PAGE_SIZE
BLOCK_PAGES = 4  # pages whose scores are computed at once


@dataclass(frozen=True)
class KVSequences:
    """The KV rows of each token: `kv_lengths[m]` rows of its sequence's pages.

    Pages of token m are in row `row_of_token[m]` of `table` int32 `[B, table_stride]`. With `starts`, it sees at least
    one row, from row `starts[m]` on.
    """

    pool: PagedPool
    table: Memory
    table_stride: Expr
    row_of_token: Memory
    kv_lengths: Memory
    starts: Memory | None = None

    def length(self, m: Expr) -> Expr:
        """Return the end of the rows that token m sees."""
        return T.Cast("int64", self.kv_lengths[m])

    def start(self, m: Expr) -> Expr:
        """Return the first of the rows that token m sees."""
        return 0 if self.starts is None else T.Cast("int64", self.starts[m])

    def first_span(self, m: Expr) -> Expr:
        """Return the first span with a row that token m sees."""
        return self.start(m) // SPAN

    def num_spans(self, m: Expr) -> Expr:
        """Return the number of spans with rows that token m sees; the first and the last may be partial."""
        return (self.length(m) + (SPAN - 1)) // SPAN - self.first_span(m)

    def rows(self, m: Expr) -> tuple[Expr, ...]:
        """Return the end of the rows that token m sees, and their first if it can differ from 0."""
        return (self.length(m),) if self.starts is None else (self.length(m), self.start(m))

    def seen(self, m: Expr, span: Expr) -> tuple[Expr, ...]:
        """Return the rows that token m sees as `rows` does, but counted within a span, 0 to SPAN."""
        return tuple(T.max(T.int64(0), T.min(T.int64(SPAN), row - span * SPAN)) for row in self.rows(m))

    def span(self, m: Expr, head: Expr, span: Expr) -> StoredSpan:
        """Return a span of token m's sequence."""
        return self.pages(m, head, span * SPAN_PAGES)

    def pages(self, m: Expr, head: Expr, page: Expr) -> StoredSpan:
        """Return a span as `span` does, but from any page of the sequence on."""
        row = bound(T.Cast("int64", self.row_of_token[m]) * self.table_stride)
        first, last = bound(row + page), bound(row + self.table_stride - 1)
        return StoredSpan(self.pool, self.table, first, last, head)


class KVPage(Protocol):
    """A page whose vectors are read as float32."""

    @property
    def elements_in_line(self) -> int:
        """Number of elements of 16 keys that a cache line holds."""
        ...

    def key(self, d: Expr) -> Expr:
        """Return element `d` of the keys of 16 tokens."""
        ...

    def value(self, t: Expr, column: Expr, n: int) -> Expr:
        """Return columns `[column, column + n)` of the value of token `t`."""
        ...

    def fetch_value(self, d: Expr) -> None:
        """Prefetch a share of the values while element `d` of the keys is used."""
        ...

    def fetch_next_key(self, t: Expr) -> None:
        """Prefetch a share of the next span's keys while the value of token `t` is used."""
        ...


class KVSpan(Protocol):
    """A span whose pages are found by their position in it."""

    def page(self, p: Expr) -> KVPage: ...


@dataclass(frozen=True)
class StoredSpan:
    """A span in the pool.

    `first` and `last` are indices of the page table: the span's first page, and the sequence's last. `following` is the
    span that the same thread reads next.
    """

    pool: PagedPool
    table: Memory
    first: Expr
    last: Expr
    head: Expr
    following: StoredSpan | None = None

    def page(self, p: Expr) -> StoredPage:
        """Return page `p` of the span."""
        page = bound(T.Cast("int64", self.table[self.first + p]))
        keys, values = bound(self.pool.keys(page, self.head)), bound(self.pool.values(page, self.head))
        stored = StoredPage(self.pool, keys, values, self.following and bound(self.following._keys_soon(p)))
        if self.pool.layout.has_codes:
            stored.fetch_scales()
        return stored

    def next(self) -> StoredSpan:
        """Return the span after this one."""
        return replace(self, first=self.first + SPAN_PAGES)

    def _keys_soon(self, p: Expr) -> Expr:
        """Return the index of the keys of page `p`, which may be beyond the span: they are only prefetched."""
        return self.pool.keys(T.Cast("int64", self.table[T.min(self.first + p, self.last)]), self.head)


@dataclass(frozen=True)
class StoredPage:
    """A page in the pool, given by the indices of its keys, its values and the keys to prefetch next."""

    pool: PagedPool
    keys: Expr
    values: Expr
    next_keys: Expr | None

    @property
    def elements_in_line(self) -> int:
        return CACHE_LINE // (PAGE_SIZE * self.pool.layout.itemsize)

    def key(self, d: Expr) -> Expr:
        return self.pool.key(self.keys, d)

    def value(self, t: Expr, column: Expr, n: int) -> Expr:
        return self.pool.value(self.values, t, column, n)

    def key_scales(self) -> Expr:
        """Return the scales of 16 keys in codes."""
        return self.pool.scales(self.keys)

    def value_scales(self) -> Expr:
        """Return the scales of 16 values in codes."""
        return self.pool.scales(self.values)

    def fetch_value(self, d: Expr) -> None:
        if self.next_keys is not None:
            self._fetch(self.values + d * PAGE_SIZE, PAGE_SIZE)

    def fetch_next_key(self, t: Expr) -> None:
        if self.next_keys is not None:
            size = self.pool.layout.key_dim
            self._fetch(self.next_keys + t * size, size)

    def fetch_scales(self) -> None:
        """Prefetch the scales of the values and of the next keys, which saves 5 % of decoding time."""
        if self.next_keys is not None:
            for start in (self.values, self.next_keys):
                self._fetch(self.pool.scale(start, 0), self.pool.layout.num_scale_items)

    def _fetch(self, start: Expr, size: int) -> None:
        """Prefetch `size` items of the pool."""
        prefetch(self.pool.pool, start, size * self.pool.layout.itemsize, self.pool.layout.itemsize)


@dataclass(frozen=True)
class LoadedSpan:
    """A span converted to float32, from `memory[base]` on: first its keys, then its values in the same memory."""

    layout: LayerLayout
    memory: Memory
    base: int

    @staticmethod
    def floats(layout: LayerLayout) -> int:
        """Return the number of float32 that a span takes."""
        return SPAN * max(layout.key_dim, layout.value_dim)

    def load_keys(self, stored: StoredSpan, num_pages: Expr, first_page: Expr = 0) -> None:
        """Convert the keys of pages `[first_page, num_pages)`, unwritten rows included."""
        with serial(num_pages - first_page) as i:
            p = first_page + i
            self.load_keys_of(stored.page(p), p)

    def load_keys_of(self, page: StoredPage, p: Expr) -> None:
        """Convert one page's keys into page `p` of this span."""
        keys = bound(self._keys(p))
        with serial(self.layout.key_dim) as d:
            self.memory[lanes(keys + d * (BLOCK_PAGES * LANES))] = page.key(d)

    def load_values(self, stored: StoredSpan, num_pages: Expr, n: int, first_page: Expr = 0) -> None:
        """Convert the values of the same pages, `n` columns at a time; they overwrite the keys."""
        with serial(num_pages - first_page) as j:
            p = first_page + j
            page, size, values = stored.page(p), self.layout.value_dim, bound(self._values(p))
            if self.layout.values_in_keys:
                with serial(size) as d:
                    self.memory[T.ramp(values + d, size, PAGE_SIZE)] = page.key(d)
            else:
                with serial(PAGE_SIZE) as t, serial(size // n) as i:
                    self.memory[lanes(values + t * size + i * n, n)] = page.value(t, i * n, n)

    def page(self, p: Expr) -> LoadedPage:
        """Return page `p` of the span."""
        return LoadedPage(self.layout.value_dim, self.memory, bound(self._keys(p)), bound(self._values(p)))

    def _keys(self, p: Expr) -> Expr:
        """Return the keys' index in `[blocks, key_dim, 4 pages, 16 tokens]`: a block of scores reads one stream."""
        return self.base + p // BLOCK_PAGES * (BLOCK_PAGES * LANES * self.layout.key_dim) + p % BLOCK_PAGES * LANES

    def _values(self, p: Expr) -> Expr:
        """Return the index of a page's values."""
        return self.base + p * (PAGE_SIZE * self.layout.value_dim)


@dataclass(frozen=True)
class LoadedPage:
    """A page of a `LoadedSpan`. Prefetching does nothing, because the span is in the cache."""

    value_dim: int
    memory: Memory
    keys: Expr
    values: Expr
    elements_in_line: int = 1

    def key(self, d: Expr) -> Expr:
        return self.memory[lanes(self.keys + d * (BLOCK_PAGES * LANES))]

    def value(self, t: Expr, column: Expr, n: int) -> Expr:
        return self.memory[lanes(self.values + t * self.value_dim + column, n)]

    def fetch_value(self, d: Expr) -> None: ...

    def fetch_next_key(self, t: Expr) -> None: ...
