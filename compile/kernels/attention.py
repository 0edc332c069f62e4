"""Attention of each token over its sequence's pages: a tile of tokens at a time, or one span of a single token.

A row (a query head of a token) adds up the same numbers in the same order in both, so a token's output is the same
bits in every batch.
"""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from .attention_shape import AttentionShape
from .attention_tile import attend_tile
from .attention_token import attend_token, merge_token
from .attention_units import AttentionLimits, AttentionUnits
from .builder import SIZE, Kernel, Memory, bound, either, parallel, serial
from .kv_sequences import KVSequences
from .pages import KV_DTYPES, PagedPool
from .query_rows import QueryRows


def attention(shape: AttentionShape, y_stride: int, limits: AttentionLimits) -> Any:
    """A PrimFunc `(q, pool, page_table, row_of_token, kv_lengths, units, slots, y, normalizers, layer, num_pages,
    table_stride) -> 0`.

    `q` float32 `[M, num_heads * head_dim]`, `y` `[M, y_stride]`; token m sees `kv_lengths[m]` rows of the pages in row
    `row_of_token[m]` of `page_table` int32 `[B, table_stride]`. `units` are what `find_units` found for the same
    tokens, `slots` is scratch of `slots_floats`. `normalizers` float32 `[M, num_heads, 2]` get what `attention_mass`
    needs.
    """
    layout = shape.layout
    with Kernel() as k:
        q, pool, table, row_of_token, kv_lengths, unit_memory, slots, y, normalizers, layer, num_pages, table_stride = (
            k.arguments(
                q="float32",
                pool=KV_DTYPES[layout.dtype],
                page_table="int32",
                row_of_token="int32",
                kv_lengths="int32",
                units="int32",
                slots="float32",
                y="float32",
                normalizers="float32",
                layer=SIZE,
                num_pages=SIZE,
                table_stride=SIZE,
            )
        )
        units = AttentionUnits(unit_memory, limits)
        paged = PagedPool(layout, pool, layer, num_pages)
        sequences = KVSequences(paged, table, table_stride, row_of_token, kv_lengths)
        rows = QueryRows(shape, q, y, y_stride, normalizers)
        heads = layout.num_kv_heads
        with parallel(units.num_units * heads) as item:
            unit, head = units.unit(item // heads), bound(item % heads)
            with either(unit.num_tokens == 1) as (single, several):
                with single:
                    next_item = bound(T.min(item + 1, units.num_units * heads - 1))
                    next_unit = units.unit(next_item // heads)
                    after = sequences.span(next_unit.first, bound(next_item % heads), next_unit.first_span)
                    attend_token(rows, sequences, unit, head, after, slots)
                with several:
                    attend_tile(rows, sequences, unit, head)

        def merge(item: Any) -> None:
            merge_token(rows, *units.merge(item // heads), bound(item % heads), slots)

        with either(units.num_merges == 1) as (one, other):
            with one, serial(heads) as item:
                merge(item)
            with other, parallel(units.num_merges * heads) as item:
                merge(item)
    return k.function


def slots_floats(shape: AttentionShape, limits: AttentionLimits) -> int:
    """float32 of all slots: each holds a token's state after one span, of all heads."""
    nothing = Memory(None)
    state = QueryRows(shape, nothing, nothing, 0, nothing).state(1, nothing)
    return limits.num_slots * shape.layout.num_kv_heads * state.floats


def units_ints(limits: AttentionLimits) -> int:
    """int32 of `units`."""
    return AttentionUnits(Memory(None), limits).num_ints
