"""Sum attention weights on each KV row of the pool over the rows (query heads of tokens) of a step.

Scores are computed again, after `attention.py` has found each row's normalizers: for all tokens, or for a sample, which
takes proportionally less time.

Sequences of a step can share pages. Each page therefore belongs to one of a few shards. One thread sums a whole shard,
sequence by sequence, from their last tokens on. Sums do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from radixlm.runtime.artifact.manifest import PAGE_SIZE
from tvm.script.ir_builder import tirx as T

from ..codegen.builder import SIZE, Kernel, Memory, bound, parallel, registers, serial, when
from ..codegen.vector import LANES, Expr, const, lanes, splat
from .attention_rows import QueryRows
from .attention_shape import AttentionShape
from .attention_units import MAX_TILE, AttentionUnit
from .codes.steps import rows_of, steps_of
from .kv_pool import KV_DTYPES, PagedPool
from .kv_spans import BLOCK_PAGES, KVPage, KVSequences, LoadedSpan, StoredPage
from .micro_tiles import MicroTile, each_micro_tile

_SHARDS = 4  # number of shards of the pages, by page id; a power of two
# rows excluded just before a sampled token; by chance, they would get far more attention than others (bench/LOG.md)
_NEAR = 16


def attention_mass(shape: AttentionShape) -> Any:
    """Return the attention mass PrimFunc, with the arguments below, which returns 0.

    `(q, pool, page_table, row_of_token, kv_lengths[, starts], normalizers, mass, counts, layer, num_tokens, num_pages,
    table_stride, stride)`

    The arguments before `mass` are arguments and results of `attention`. For each KV row of the layer, the softmax
    weights of the step's tokens are added to `mass`, float32 `[layers, kv_heads, num_pages, PAGE_SIZE]`. They are
    summed over the query heads of the KV head's group. The first layer adds the number of contributing tokens to
    `counts` int32 `[num_pages, PAGE_SIZE]`. Rows without contributions keep their bits.

    A `stride` above 1 samples every `stride`-th token of each sequence, counted from its last, and skips sequences with
    only one token. A sampled token does not contribute to its last `_NEAR` rows, which include its own. All layers have
    one shape; `layer` is the index of this one.
    """
    layout = shape.layout
    with Kernel() as k:
        *arrays, layer, num_tokens, num_pages, table_stride, stride = k.arguments(
            q="float32",
            pool=KV_DTYPES[layout.dtype],
            page_table="int32",
            row_of_token="int32",
            kv_lengths="int32",
            **({"starts": "int32"} if shape.scores.has_starts else {}),
            normalizers="float32",
            mass="float32",
            counts="int32",
            layer=SIZE,
            num_tokens=SIZE,
            num_pages=SIZE,
            table_stride=SIZE,
            stride=SIZE,
        )
        q, pool, table, row_of_token, kv_lengths, *starts, normalizers, mass, counts = arrays
        paged = PagedPool(layout, pool, layer * layout.page_items, num_pages)
        sequences = KVSequences(paged, table, table_stride, row_of_token, kv_lengths, *starts)
        rows = rows_of(shape, q, Memory(None), 0, normalizers)
        stride = bound(T.max(stride, T.int64(1)))
        with parallel(_SHARDS * layout.num_kv_heads) as item:
            shard, head = bound(item // layout.num_kv_heads), bound(item % layout.num_kv_heads)
            seen = _SeenRows(sequences, bound(T.Select(stride == 1, T.int64(0), T.int64(_NEAR))))
            counted = _Counts(seen, counts, bound(T.And(layer == 0, head == 0)))
            unit_mass = _UnitMass(rows, seen, head, mass, (layer * layout.num_kv_heads + head) * num_pages, counted)
            _each_tile(row_of_token, num_tokens, stride, lambda unit: unit_mass.add(unit, shard))
    return k.function


def _each_tile(row_of_token: Memory, num_tokens: Expr, stride: Expr, emit: Callable[[AttentionUnit], None]) -> None:
    """Call `emit` with tiles of each sequence's sampled tokens, the last ones first."""
    first = registers(1, "int64")
    first[0] = T.int64(0)
    with serial(num_tokens) as m:
        after = bound(T.min(m + 1, num_tokens - 1))
        with when(T.Or(m == num_tokens - 1, row_of_token[after] != row_of_token[m])):
            count = bound(T.Select(T.Or(stride == 1, m > first[0]), (m - first[0]) // stride + 1, T.int64(0)))
            with serial((count + (MAX_TILE - 1)) // MAX_TILE) as i:
                last = bound(m - i * (MAX_TILE * stride))
                size = bound(T.min(T.int64(MAX_TILE), count - i * MAX_TILE))
                emit(AttentionUnit(last, size, T.int64(-1), T.int64(0), T.int64(0) - stride))
            first[0] = m + 1


def keep_queries(width: int, max_num_tokens: int) -> Any:
    """Return the PrimFunc `(q, queries, layer, num_rows) -> 0`, which copies queries for ranking keys.

    It copies `q` `[M, width]` to its layer of `queries` `[layers, max_num_tokens, width]`, float32.
    """
    with Kernel() as k:
        q, queries, layer, num_rows = k.arguments(q="float32", queries="float32", layer=SIZE, num_rows=SIZE)
        with serial(num_rows * width) as i:
            queries[layer * (max_num_tokens * width) + i] = q[i]
    return k.function


@dataclass(frozen=True)
class _SeenRows:
    """The rows of `sequences` to which a token contributes: all that it sees but the last `num_near`."""

    sequences: KVSequences
    num_near: Expr

    def rows(self, m: Expr) -> tuple[Expr, ...]:
        """Return the rows as `KVSequences.rows` does."""
        end, *start = self.sequences.rows(m)
        return (T.max(end - self.num_near, T.int64(0)), *start)


class _Counts:
    """A counter that adds, for each row of a page, the number of contributing tokens to `counts` if `is_first`."""

    def __init__(self, seen: _SeenRows, counts: Memory, is_first: Expr) -> None:
        self.seen, self.counts, self.is_first = seen, counts, is_first

    def add(self, unit: AttentionUnit, page: Expr, number: Expr) -> None:
        """Count contributions to page `page` of the pool, which is page `number` of the unit's sequence."""
        one, none = (splat(T.int32(n)) for n in (1, 0))
        with when(self.is_first), serial(unit.num_tokens) as i:
            end, *hidden = (bound(row) for row in self.seen.rows(unit.token(i)))
            visible = MicroTile(0, 0, 1, [end], hidden).visible(0, bound(number * PAGE_SIZE))
            where = lanes(page * PAGE_SIZE)
            self.counts[where] = self.counts[where] + T.Select(visible, one, none)


class _UnitMass:
    """A sum of a unit's attention weights in `mass`; the pages of this layer and head begin at page `first_page`."""

    def __init__(
        self, rows: QueryRows, seen: _SeenRows, head: Expr, mass: Memory, first_page: Expr, counts: _Counts
    ) -> None:
        layout = rows.shape.layout
        span_floats = 0 if layout.has_codes else LoadedSpan.floats(layout)
        self.rows, self.seen, self.head, self.mass, self.first_page = rows, seen, head, mass, first_page
        self.sequences, self.counts = seen.sequences, counts
        num_rows = MAX_TILE * rows.shape.group
        self.scratch = rows.scratch(MAX_TILE, span_floats + 2 * num_rows)
        self.normalizers = self.scratch.floats + span_floats
        self.loaded = LoadedSpan(layout, self.scratch.memory, self.scratch.floats)
        self.steps = steps_of(rows.shape, self.scratch)
        # the loaded pages, the first token of each, and the index of its keys
        self.pages = registers(3 * BLOCK_PAGES, "int64")

    def add(self, unit: AttentionUnit, shard: Expr) -> None:
        """Add the weights on the unit's pages that are in a shard: several pages at once, the rest one by one."""
        sequences, num_loaded = self.sequences, registers(1, "int64")
        num_loaded[0] = T.int64(0)
        start, end = unit.rows(sequences)
        first, stop = bound(start // PAGE_SIZE), bound((end + (PAGE_SIZE - 1)) // PAGE_SIZE)
        self.rows.load_finished(self.scratch, unit.token, unit.num_tokens, self.head, MAX_TILE, self.normalizers)
        with serial(stop - first) as j:
            stored = sequences.pages(unit.first, self.head, first + j)
            page = bound(T.Cast("int64", sequences.table[stored.first]))
            with when(page % _SHARDS == shard):
                self.counts.add(unit, page, first + j)
                i = bound(num_loaded[0])
                self.pages[i], self.pages[BLOCK_PAGES + i] = page, (first + j) * PAGE_SIZE
                if self.rows.shape.layout.has_codes:
                    self.pages[2 * BLOCK_PAGES + i] = stored.page(0).keys
                else:
                    self.loaded.load_keys_of(stored.page(0), i)
                num_loaded[0] = i + 1
                with when(i + 1 == BLOCK_PAGES):
                    self._add_pages(unit, range(BLOCK_PAGES))
                    num_loaded[0] = T.int64(0)
        with serial(num_loaded[0]) as i:
            self._add_pages(unit, [i])

    def _add_pages(self, unit: AttentionUnit, pages: Sequence[Expr]) -> None:
        """Add the weights on loaded pages."""
        totals = registers(len(pages) * LANES, "float32")
        for k in range(len(pages)):
            totals[lanes(k * LANES)] = const(0)
        each_micro_tile(self.rows, unit, self.seen.rows, lambda tile: self._add_tile(tile, pages, totals))
        for k, i in enumerate(pages):
            where = lanes(bound((self.first_page + self.pages[i]) * PAGE_SIZE))
            self.mass[where] = self.mass[where] + totals[lanes(k * LANES)]

    def _add_tile(self, tile: MicroTile, pages: Sequence[Expr], totals: Memory) -> None:
        """Add the weights of a micro-tile; `seen` counts from the sequence's start, and keys beyond may be NaN."""
        if len(pages) == 1:
            self.steps.scores_of(tile, [self._page(pages[0])], [0])
        else:

            def part(_: Expr, start: Expr, size: int) -> None:
                numbers = [start + k for k in range(size)]
                self.steps.scores_of(tile, [self._page(k) for k in numbers], numbers)

            self.rows.shape.chunks(tile.num_rows, len(pages)).each(part)
        for token in range(len(tile.seen)):
            for k, i in enumerate(pages):
                visible = tile.visible(token, self.pages[BLOCK_PAGES + i])
                for r in tile.rows_of(token):
                    row = bound(tile.first + r)
                    largest, share = (self.scratch.memory[self.normalizers + row * 2 + n] for n in range(2))
                    weights = self.steps.weights_below(tile, r, k, largest) * splat(share)
                    where = lanes(k * LANES)
                    totals[where] = totals[where] + T.Select(visible, weights, const(0))

    def _page(self, i: Expr) -> KVPage:
        """Return a loaded page; codes are read from the pool."""
        if not self.rows.shape.layout.has_codes:
            return self.loaded.page(i)
        keys = bound(self.pages[2 * BLOCK_PAGES + i])
        return StoredPage(self.sequences.pool, keys, keys, None)
