"""Attention of each token over its sequence's pages: a tile of tokens at a time, or one span of a single token.

Both add the same numbers of a row (a query head of a token) in the same order. A token's output therefore has the same
bits in every batch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from radixlm.runtime.artifact.manifest import PAGE_SIZE
from tvm.script.ir_builder import tirx as T

from ..codegen.builder import SIZE, Kernel, Memory, bound, either, parallel, serial
from ..codegen.vector import LANES, Expr, lanes
from .attention_rows import QueryRows, RowState
from .attention_shape import AttentionShape
from .attention_units import MAX_TILE, AttentionLimits, AttentionUnit, AttentionUnits
from .codes.steps import CodeSteps, rows_of, steps_of
from .kv_pool import KV_DTYPES, PagedPool
from .kv_spans import SPAN, KVSequences, KVSpan, LoadedSpan, StoredSpan
from .micro_tiles import MicroTile, each_micro_tile


def attention(shape: AttentionShape, y_stride: int, limits: AttentionLimits) -> Any:
    """Return the attention PrimFunc, with the arguments below, which returns 0.

    `(q, pool, page_table, row_of_token, kv_lengths[, starts], units, slots[, sinks], y, normalizers, first_item,
    num_pages, table_stride)`

    `q` is float32 `[M, num_heads * key_dim]`, `y` `[M, y_stride]`. Token m sees rows `[starts[m], kv_lengths[m])` of
    the pages in row `row_of_token[m]` of `page_table` int32 `[B, table_stride]`. `units` is the output of `find_units`
    for the same tokens, `slots` is scratch of `slots_floats`, `sinks` float32 `[num_heads]`. `normalizers` float32 `[M,
    num_heads, 2]` is written for `attention_mass`. `shape.scores` decides whether there are `starts` and `sinks`. The
    layer's KV begins after `first_item` items of a page.
    """
    layout = shape.layout
    with Kernel() as k:
        q, pool, table, row_of_token, kv_lengths, *others, first_item, num_pages, table_stride = k.arguments(
            q="float32",
            pool=KV_DTYPES[layout.dtype],
            page_table="int32",
            row_of_token="int32",
            kv_lengths="int32",
            **({"starts": "int32"} if shape.scores.has_starts else {}),
            units="int32",
            slots="float32",
            **({"sinks": "float32"} if shape.scores.has_sinks else {}),
            y="float32",
            normalizers="float32",
            first_item=SIZE,
            num_pages=SIZE,
            table_stride=SIZE,
        )
        starts = others.pop(0) if shape.scores.has_starts else None
        unit_memory, slots, *sinks, y, normalizers = others
        units = AttentionUnits(unit_memory, limits)
        paged = PagedPool(layout, pool, first_item, num_pages)
        sequences = KVSequences(paged, table, table_stride, row_of_token, kv_lengths, starts)
        rows = rows_of(shape, q, y, y_stride, normalizers, *sinks)
        heads = layout.num_kv_heads
        with parallel(units.num_units * heads) as item:
            unit, head = units.unit(item // heads), bound(item % heads)
            with either(unit.num_tokens == 1) as (single, several):
                with single:
                    next_item = bound(T.min(item + 1, units.num_units * heads - 1))
                    next_unit = units.unit(next_item // heads)
                    first_span = next_unit.first_span(sequences)
                    after = sequences.span(next_unit.first, bound(next_item % heads), first_span)
                    _attend_token(rows, sequences, unit, head, after, slots)
                with several:
                    _attend_tile(rows, sequences, unit, head)

        def merge(item: Any) -> None:
            _merge_token(rows, *units.merge(item // heads), bound(item % heads), slots)

        with either(units.num_merges == 1) as (one, other):
            with one, serial(heads) as item:
                merge(item)
            with other, parallel(units.num_merges * heads) as item:
                merge(item)
    return k.function


def slots_floats(shape: AttentionShape, limits: AttentionLimits) -> int:
    """Return the number of float32 in all slots; each holds the state of a token's query heads after one span."""
    nothing = Memory(None)
    state = rows_of(shape, nothing, nothing, 0, nothing).state(1, nothing)
    return limits.num_slots * shape.layout.num_kv_heads * state.floats


# A tile: each span is converted to float32 once for all of its tokens.


def _attend_tile(rows: QueryRows, sequences: KVSequences, unit: AttentionUnit, head: Expr) -> None:
    """Attend to all spans of the unit's tokens, which may see different numbers of rows; store their rows of `y`."""
    shape = rows.shape
    scratch = rows.scratch(MAX_TILE, 0 if shape.layout.has_codes else LoadedSpan.floats(shape.layout))
    loaded = LoadedSpan(shape.layout, scratch.memory, scratch.floats)
    steps = steps_of(shape, scratch)
    start, stop = unit.rows(sequences)
    rows.load(scratch, unit.first, unit.num_tokens, head, MAX_TILE)
    with serial((stop + (SPAN - 1)) // SPAN - start // SPAN) as i:
        span = bound(start // SPAN + i) if shape.scores.has_starts else i
        stored = sequences.span(unit.first, head, span)
        num_pages = bound((T.min(T.int64(SPAN), stop - span * SPAN) + (PAGE_SIZE - 1)) // PAGE_SIZE)
        first_page = bound(T.max(start - span * SPAN, T.int64(0)) // PAGE_SIZE) if shape.scores.has_starts else 0

        def weigh(tile: MicroTile) -> None:
            steps.scores(tile, loaded)
            steps.weigh(tile, loaded)

        def seen(m: Expr) -> tuple[Expr, ...]:
            return sequences.seen(m, span)

        if isinstance(steps, CodeSteps):
            each_micro_tile(rows, unit, seen, partial(steps.attend, kv=stored))
        else:
            loaded.load_keys(stored, num_pages, first_page)
            each_micro_tile(rows, unit, seen, weigh)
            loaded.load_values(stored, num_pages, shape.n, first_page)
            each_micro_tile(rows, unit, seen, lambda tile: steps.join(tile, loaded))
    rows.store(scratch, unit.first, unit.num_tokens, head, MAX_TILE)


# A single token: one thread does all its spans, or several threads one span each, which are then merged.


def _attend_token(
    rows: QueryRows, sequences: KVSequences, unit: AttentionUnit, head: Expr, after: StoredSpan, slots: Memory
) -> None:
    """Attend to one span and store its state in a slot, or to all spans and store the token's row of `y`.

    `after` is the span that the same thread reads next.
    """
    shape, layout = rows.shape, rows.shape.layout
    scratch = rows.scratch(1, 0 if shape.reads_in_place else LoadedSpan.floats(layout))
    steps, loaded = steps_of(shape, scratch), LoadedSpan(layout, scratch.memory, scratch.floats)
    rows.load(scratch, unit.first, 1, head, 1)
    num_spans = bound(T.Select(unit.is_whole, sequences.num_spans(unit.first), T.int64(1)))
    with serial(num_spans) as i:
        span = bound(unit.first_span(sequences) + i)
        stored = sequences.span(unit.first, head, span)
        soon = replace(stored, following=_either_span(i + 1 < num_spans, stored.next(), after))
        seen, *hidden = (bound(end) for end in sequences.seen(unit.first, span))
        num_pages = bound((seen + (PAGE_SIZE - 1)) // PAGE_SIZE)
        first_page = hidden[0] // PAGE_SIZE if hidden else 0
        kv: KVSpan = soon if shape.reads_in_place else loaded

        def weigh(part: Expr, start: Expr, size: int) -> None:
            tile = MicroTile(part, start, size, [seen], hidden)
            steps.scores(tile, kv)
            steps.weigh(tile, kv)

        def join(part: Expr, start: Expr, size: int) -> None:
            steps.join(MicroTile(part, start, size, [seen], hidden), kv)

        def attend(part: Expr, start: Expr, size: int) -> None:
            weigh(part, start, size)
            join(part, start, size)

        if isinstance(steps, CodeSteps):
            shape.heads.each(attend)
        else:
            if kv is loaded:
                loaded.load_keys(stored, num_pages, first_page)
            shape.heads.each(weigh)
            if kv is loaded:
                loaded.load_values(stored, num_pages, shape.n, first_page)
            shape.heads.each(join)
    with either(unit.is_whole) as (whole, split):
        with whole:
            rows.store(scratch, unit.first, 1, head, 1)
        with split:
            state, slot = scratch.state, _slot_state(rows, slots, unit.slot, head)
            n = LANES if state.floats % LANES == 0 else 1
            with serial(state.floats // n) as i:
                slots[lanes(slot.base + i * n, n)] = state.memory[lanes(i * n, n)]


def _merge_token(rows: QueryRows, m: Expr, num_spans: Expr, first_slot: Expr, head: Expr, slots: Memory) -> None:
    """Merge the spans of token m from their slots, and store its row of `y`."""
    shape, scratch = rows.shape, rows.scratch(1)
    steps, n = steps_of(shape, scratch), shape.n
    rows.load(scratch, m, 1, head, 1)
    with serial(num_spans) as span:
        slot = _slot_state(rows, slots, first_slot + span, head)

        def part(index: Expr, start: Expr, size: int) -> None:
            factors = steps.factors(index, slots[lanes(slot.maxima(index))])
            for r in range(size):
                row = bound(start + r)
                with serial(shape.layout.value_dim // n) as i:
                    outputs = slots[lanes(slot.output(row) + i * n, n)]
                    steps.add(scratch.state.output(row) + i * n, outputs, factors, r, n)
                steps.add(scratch.state.sums(row), slots[lanes(slot.sums(row))], factors, r, LANES)

        shape.heads.each(part)
    rows.store(scratch, m, 1, head, 1)


def _slot_state(rows: QueryRows, slots: Memory, slot: Expr, head: Expr) -> RowState:
    """Return the state in a slot: a token's query heads of one KV head after one span."""
    state = rows.state(1, slots)
    return replace(state, base=bound((slot * rows.shape.layout.num_kv_heads + head) * state.floats))


def _either_span(condition: Expr, a: StoredSpan, b: StoredSpan) -> StoredSpan:
    """Return one of two spans of the same pool, by a condition."""
    names = ("first", "last", "head")
    return replace(a, **{name: bound(T.Select(condition, getattr(a, name), getattr(b, name))) for name in names})
