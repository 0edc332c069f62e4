"""The keys and values of one span of a sequence, turned into float32 once for many queries."""

from __future__ import annotations

from dataclasses import dataclass

from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVLayout

from .builder import Memory, bound, serial
from .kv_span import BLOCK_PAGES, SPAN, StoredPage, StoredSpan
from .vector import LANES, Expr, lanes


@dataclass(frozen=True)
class LoadedSpan:
    """From `memory[base]` on: first the keys of a span, then its values in the same place; of int8 behind them the
    scales of keys and values."""

    layout: KVLayout
    memory: Memory
    base: int

    @staticmethod
    def floats(layout: KVLayout) -> int:
        """float32 that it takes."""
        return SPAN * (layout.head_dim + (2 if layout.has_scales else 0))

    @property
    def head_dim(self) -> int:
        return self.layout.head_dim

    def load_keys(self, stored: StoredSpan, num_pages: Expr) -> None:
        """Convert whole pages, rows that nobody wrote too; all scales."""
        with serial(num_pages) as p:
            page = stored.page(p)
            if self.layout.has_scales:
                self.memory[lanes(self._scales(p) + SPAN)] = page.value_scales()
            self.load_keys_of(page, p)

    def load_keys_of(self, page: StoredPage, p: Expr) -> None:
        """Of one page, which becomes page p here, and the scales of its keys."""
        if self.layout.has_scales:
            self.memory[lanes(self._scales(p))] = page.key_scales()
        keys = bound(self._keys(p))
        with serial(self.head_dim) as d:
            self.memory[lanes(keys + d * (BLOCK_PAGES * LANES))] = page.key(d)

    def load_values(self, stored: StoredSpan, num_pages: Expr, n: int) -> None:
        """The same for values, `n` columns at a time."""
        with serial(num_pages) as p:
            page = stored.page(p)
            with serial(PAGE_SIZE) as t, serial(self.head_dim // n) as i:
                self.memory[lanes(self._values(p) + t * self.head_dim + i * n, n)] = page.value(t, i * n, n)

    def page(self, p: Expr) -> LoadedPage:
        return LoadedPage(self.head_dim, self.memory, bound(self._keys(p)), bound(self._values(p)), self._scales(p))

    def _keys(self, p: Expr) -> Expr:
        """`[blocks, head_dim, 4 pages, 16 tokens]`, so that a block of scores reads one stream."""
        return self.base + p // BLOCK_PAGES * (BLOCK_PAGES * LANES * self.head_dim) + p % BLOCK_PAGES * LANES

    def _values(self, p: Expr) -> Expr:
        return self.base + p * (PAGE_SIZE * self.head_dim)

    def _scales(self, p: Expr) -> Expr:
        return self.base + SPAN * self.head_dim + p * PAGE_SIZE


@dataclass(frozen=True)
class LoadedPage:
    """A page of a `LoadedSpan`."""

    head_dim: int
    memory: Memory
    keys: Expr
    values: Expr
    scales: Expr
    elements_in_line: int = 1

    def key(self, d: Expr) -> Expr:
        return self.memory[lanes(self.keys + d * (BLOCK_PAGES * LANES))]

    def value(self, t: Expr, column: Expr, n: int) -> Expr:
        return self.memory[lanes(self.values + t * self.head_dim + column, n)]

    def key_scales(self) -> Expr:
        return self.memory[lanes(self.scales)]

    def value_scales(self) -> Expr:
        return self.memory[lanes(self.scales + SPAN)]

    def fetch_value(self, d: Expr) -> None:
        """It is here."""

    def fetch_next_key(self, t: Expr) -> None:
        """It is here."""
