"""The keys and values of one span of a sequence, page by page; straight from the pool in `StoredSpan`.

`loaded_span.py` has the other kind, which gives the same vectors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from radixlm.runtime.artifact.manifest import PAGE_SIZE
from tvm.script.ir_builder import tirx as T

from .builder import CACHE_LINE, Memory, bound, prefetch
from .pages import PagedPool
from .vector import Expr

SPAN = 128  # tokens
SPAN_PAGES = SPAN // PAGE_SIZE
BLOCK_PAGES = 4  # pages whose scores are computed at once


class KVPage(Protocol):
    """Vectors of one page, float32. Of int8 these are the codes: scores and weights are multiplied by the scales, which
    are fewer."""

    @property
    def elements_in_line(self) -> int:
        """Elements of 16 keys that a cache line holds."""
        ...

    def key(self, d: Expr) -> Expr:
        """Element `d` of the keys of 16 tokens."""
        ...

    def value(self, t: Expr, column: Expr, n: int) -> Expr:
        """Columns `[column, column + n)` of the value of token `t`."""
        ...

    def key_scales(self) -> Expr:
        """The scales of 16 keys; only of int8, as are those of the values."""
        ...

    def value_scales(self) -> Expr: ...

    def fetch_value(self, d: Expr) -> None:
        """Ask for what will be read soon: a share of the values while element `d` of the keys is used."""
        ...

    def fetch_next_key(self, t: Expr) -> None:
        """Ask for a share of the next span's keys while the value of token `t` is used."""
        ...


class KVSpan(Protocol):
    """Pages by their place in the span."""

    def page(self, p: Expr) -> KVPage: ...


@dataclass(frozen=True)
class StoredSpan:
    """Straight from the pool: `first` and `last` are the indices in the page table of the span's first page and of
    the sequence's last. `following` is what the same thread reads next."""

    pool: PagedPool
    table: Memory
    first: Expr
    last: Expr
    head: Expr
    following: StoredSpan | None = None

    def page(self, p: Expr) -> StoredPage:
        page = bound(T.Cast("int64", self.table[self.first + p]))
        keys, values = bound(self.pool.keys(page, self.head)), bound(self.pool.values(page, self.head))
        stored = StoredPage(self.pool, keys, values, self.following and bound(self.following._keys_soon(p)))
        if self.pool.layout.has_scales:
            stored.fetch_scales()
        return stored

    def next(self) -> StoredSpan:
        """The span after this one."""
        return replace(self, first=self.first + SPAN_PAGES)

    def _keys_soon(self, p: Expr) -> Expr:
        """Index of the keys of a page that the span may not have: they are asked for, not read."""
        return self.pool.keys(T.Cast("int64", self.table[T.min(self.first + p, self.last)]), self.head)


@dataclass(frozen=True)
class StoredPage:
    """A page in the pool, by the indices of its keys, its values and the next keys that are wanted."""

    pool: PagedPool
    keys: Expr
    values: Expr
    next_keys: Expr | None

    @property
    def elements_in_line(self) -> int:
        return CACHE_LINE // (PAGE_SIZE * self.pool.itemsize)

    def key(self, d: Expr) -> Expr:
        return self.pool.key(self.keys, d)

    def value(self, t: Expr, column: Expr, n: int) -> Expr:
        return self.pool.value(self.values, t, column, n)

    def key_scales(self) -> Expr:
        return self.pool.scales(self.keys)

    def value_scales(self) -> Expr:
        return self.pool.scales(self.values)

    def fetch_value(self, d: Expr) -> None:
        if self.next_keys is not None:
            self._fetch(self.values + d * PAGE_SIZE, PAGE_SIZE)

    def fetch_next_key(self, t: Expr) -> None:
        if self.next_keys is not None:
            head_dim = self.pool.layout.head_dim
            self._fetch(self.next_keys + t * head_dim, head_dim)

    def fetch_scales(self) -> None:
        """Ask for the scales of the values and of the next keys, a twentieth of decoding's time."""
        if self.next_keys is not None:
            for start in (self.values, self.next_keys):
                self._fetch(self.pool.scale(start, 0), self.pool.layout.num_scale_items)

    def _fetch(self, start: Expr, size: int) -> None:
        prefetch(self.pool.pool, start, size * self.pool.itemsize, self.pool.itemsize)
