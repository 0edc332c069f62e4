"""How much weight attention puts on each KV row of the pool, added up over the rows (query heads of tokens) of a step.

A second look at the scores, after `attention.py` has found each row's normalizers. Sequences of a step may share pages:
every page belongs to one of a few shards, and one thread adds up all of a shard, unit by unit in the order of tokens,
so that sums are the same whatever the number of threads.
"""

from __future__ import annotations

from typing import Any

from radixlm.runtime.manifest import PAGE_SIZE
from tvm.script.ir_builder import tirx as T

from .attention_shape import AttentionShape
from .attention_steps import AttentionSteps, MicroTile
from .attention_tile import each_micro_tile
from .attention_units import MAX_TILE, AttentionLimits, AttentionUnit, AttentionUnits
from .builder import SIZE, Kernel, Memory, bound, parallel, registers, serial, when
from .kv_sequences import KVSequences
from .kv_span import SPAN_PAGES
from .loaded_span import LoadedSpan
from .pages import KV_DTYPES, PagedPool
from .query_rows import QueryRows
from .softmax import exp2
from .vector import LANES, Expr, const, lanes, splat

_SHARDS = 8  # of the pages, by their ids; a power of two


def attention_mass(shape: AttentionShape, limits: AttentionLimits) -> Any:
    """A PrimFunc `(q, pool, page_table, row_of_token, kv_lengths, units, normalizers, mass, layer, num_pages,
    table_stride) -> 0`.

    All but `mass` are what `attention` got, or left. To `mass` float32 `[layers, kv_heads, num_pages, PAGE_SIZE]` it
    adds, for each KV row of the layer, the softmax weights that the step's tokens and the query heads of the KV head's
    group have on it. What nobody sees keeps its bits.
    """
    layout = shape.layout
    with Kernel() as k:
        q, pool, table, row_of_token, kv_lengths, unit_memory, normalizers, mass, layer, num_pages, table_stride = (
            k.arguments(
                q="float32",
                pool=KV_DTYPES[layout.dtype],
                page_table="int32",
                row_of_token="int32",
                kv_lengths="int32",
                units="int32",
                normalizers="float32",
                mass="float32",
                layer=SIZE,
                num_pages=SIZE,
                table_stride=SIZE,
            )
        )
        units = AttentionUnits(unit_memory, limits)
        sequences = KVSequences(
            PagedPool(layout, pool, layer, num_pages), table, table_stride, row_of_token, kv_lengths
        )
        rows = QueryRows(shape, q, Memory(None), 0, normalizers)
        with parallel(_SHARDS * layout.num_kv_heads) as item:
            shard, head = bound(item // layout.num_kv_heads), bound(item % layout.num_kv_heads)
            unit_mass = _UnitMass(rows, sequences, head, mass, (layer * layout.num_kv_heads + head) * num_pages)
            with serial(units.num_units) as i:
                unit_mass.add(units.found(i), shard)
    return k.function


def keep_queries(width: int, max_num_tokens: int) -> Any:
    """A PrimFunc `(q, queries, layer, num_rows) -> 0`: `q` `[M, width]` to its layer of `queries` `[layers,
    max_num_tokens, width]`, float32, for whoever wants to know which keys the step would look for."""
    with Kernel() as k:
        q, queries, layer, num_rows = k.arguments(q="float32", queries="float32", layer=SIZE, num_rows=SIZE)
        with serial(num_rows * width) as i:
            queries[layer * (max_num_tokens * width) + i] = q[i]
    return k.function


class _UnitMass:
    """Adds the weights of a unit's rows to `mass`, whose pages of this layer and head begin at page `first_page`."""

    def __init__(self, rows: QueryRows, sequences: KVSequences, head: Expr, mass: Memory, first_page: Expr) -> None:
        layout, span_floats = rows.shape.layout, LoadedSpan.floats(rows.shape.layout)
        self.rows, self.sequences, self.head, self.mass, self.first_page = rows, sequences, head, mass, first_page
        num_rows = MAX_TILE * rows.shape.group
        self.scratch = rows.scratch(MAX_TILE, span_floats + 2 * num_rows)
        self.normalizers = self.scratch.floats + span_floats
        self.loaded = LoadedSpan(layout, self.scratch.memory, self.scratch.floats)
        self.steps = AttentionSteps(rows.shape, self.scratch)

    def add(self, unit: AttentionUnit, shard: Expr) -> None:
        """Of the pages that are in a shard."""
        sequences, longest = self.sequences, registers(1, "int64")
        longest[0] = T.int64(0)
        with serial(unit.num_tokens) as j:
            longest[0] = T.max(longest[0], sequences.length(unit.first + j))
        pages = bound((longest[0] + (PAGE_SIZE - 1)) // PAGE_SIZE)
        first = bound(unit.first_span * SPAN_PAGES)
        stop = bound(T.Select(unit.is_whole, pages, T.min(pages, first + SPAN_PAGES)))
        self.rows.load_finished(self.scratch, unit.first, unit.num_tokens, self.head, MAX_TILE, self.normalizers)
        with serial(stop - first) as j:
            stored = sequences.pages(unit.first, self.head, first + j)
            page = bound(T.Cast("int64", sequences.table[stored.first]))
            with when(page % _SHARDS == shard):
                self.loaded.load_keys(stored, 1)
                self._add_page(unit, bound((first + j) * PAGE_SIZE), page)

    def _add_page(self, unit: AttentionUnit, first_key: Expr, page: Expr) -> None:
        total = registers(LANES, "float32")
        total[lanes(0)] = const(0)

        def seen(m: Expr) -> Expr:
            return T.max(T.int64(0), T.min(T.int64(PAGE_SIZE), self.sequences.length(m) - first_key))

        each_micro_tile(self.rows, unit, seen, lambda tile: self._add_tile(tile, total))
        where = lanes(bound((self.first_page + page) * PAGE_SIZE))
        self.mass[where] = self.mass[where] + total[lanes(0)]

    def _add_tile(self, tile: MicroTile, total: Memory) -> None:
        """The weights of a page's 16 keys; those beyond what a row sees may be NaN."""
        scratch, memory, has_fma = self.scratch, self.scratch.memory, self.rows.shape.has_fma
        self.steps.scores_of(tile, [self.loaded.page(0)], 0)
        for token, seen in enumerate(tile.seen):
            visible = T.ramp(T.int64(0), T.int64(1), LANES) < splat(seen)
            for r in tile.rows_of(token):
                row = bound(tile.first + r)
                score = memory[lanes(scratch.weights(row))]
                largest, share = (memory[self.normalizers + row * 2 + i] for i in range(2))
                weights = exp2(score - splat(largest), has_fma) * splat(share)
                total[lanes(0)] = total[lanes(0)] + T.Select(visible, weights, const(0))
