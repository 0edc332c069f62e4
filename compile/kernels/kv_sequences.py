"""The KV rows that each token of a step sees: pages of its row in the page table, up to its length."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from .builder import Memory, bound
from .kv_span import SPAN, SPAN_PAGES, StoredSpan
from .pages import PagedPool
from .vector import Expr


@dataclass(frozen=True)
class KVSequences:
    """Token m sees `kv_lengths[m]` rows of the pages in row `row_of_token[m]` of `table` int32 `[B, table_stride]`."""

    pool: PagedPool
    table: Memory
    table_stride: Expr
    row_of_token: Memory
    kv_lengths: Memory

    def length(self, m: Expr) -> Expr:
        """How many rows token m sees."""
        return T.Cast("int64", self.kv_lengths[m])

    def num_spans(self, m: Expr) -> Expr:
        """How many spans these are, the last perhaps not a whole one."""
        return (self.length(m) + (SPAN - 1)) // SPAN

    def seen(self, m: Expr, span: Expr) -> Expr:
        """How many tokens of a span token m sees, perhaps none."""
        return T.max(T.int64(0), T.min(T.int64(SPAN), self.length(m) - span * SPAN))

    def span(self, m: Expr, head: Expr, span: Expr) -> StoredSpan:
        """A span of the sequence of token m."""
        return self.pages(m, head, span * SPAN_PAGES)

    def pages(self, m: Expr, head: Expr, page: Expr) -> StoredSpan:
        """The same, from any page of the sequence on."""
        row = bound(T.Cast("int64", self.row_of_token[m]) * self.table_stride)
        first, last = bound(row + page), bound(row + self.table_stride - 1)
        return StoredSpan(self.pool, self.table, first, last, head)
