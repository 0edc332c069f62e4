"""Attention of a single token: all its spans on one thread, or span by span on several, and then merged."""

from __future__ import annotations

from dataclasses import replace

from radixlm.runtime.artifact.manifest import PAGE_SIZE
from tvm.script.ir_builder import tirx as T

from .attention_scratch import RowState
from .attention_steps import AttentionSteps, MicroTile
from .attention_units import AttentionUnit
from .builder import Memory, bound, either, serial
from .kv_sequences import KVSequences
from .kv_span import KVSpan, StoredSpan
from .loaded_span import LoadedSpan
from .query_rows import QueryRows
from .vector import LANES, Expr, lanes


def slot_state(rows: QueryRows, slots: Memory, slot: Expr, head: Expr) -> RowState:
    """The state in a slot: of one token, one span and the query heads of one KV head."""
    state = rows.state(1, slots)
    return replace(state, base=bound((slot * rows.shape.layout.num_kv_heads + head) * state.floats))


def attend_token(
    rows: QueryRows, sequences: KVSequences, unit: AttentionUnit, head: Expr, after: StoredSpan, slots: Memory
) -> None:
    """One span into a slot, or all into the token's row of `y`; `after` is what the same thread reads next."""
    shape, layout = rows.shape, rows.shape.layout
    scratch = rows.scratch(1, 0 if shape.converts_fast else LoadedSpan.floats(layout))
    steps, loaded = AttentionSteps(shape, scratch), LoadedSpan(layout, scratch.memory, scratch.floats)
    rows.load(scratch, unit.first, 1, head, 1)
    num_spans = bound(T.Select(unit.is_whole, sequences.num_spans(unit.first), T.int64(1)))
    with serial(num_spans) as i:
        span = bound(unit.first_span + i)
        stored = sequences.span(unit.first, head, span)
        soon = replace(stored, following=_either_span(i + 1 < num_spans, stored.next(), after))
        seen = bound(sequences.seen(unit.first, span))
        num_pages = bound((seen + (PAGE_SIZE - 1)) // PAGE_SIZE)
        kv: KVSpan = soon if shape.converts_fast else loaded

        def weigh(part: Expr, start: Expr, size: int) -> None:
            tile = MicroTile(part, start, size, [seen])
            steps.scores(tile, kv)
            steps.weigh(tile, kv)

        def join(part: Expr, start: Expr, size: int) -> None:
            steps.join(MicroTile(part, start, size, [seen]), kv)

        if kv is loaded:
            loaded.load_keys(stored, num_pages)
        shape.heads.each(weigh)
        if kv is loaded:
            loaded.load_values(stored, num_pages, shape.n)
        shape.heads.each(join)
    with either(unit.is_whole) as (whole, split):
        with whole:
            rows.store(scratch, unit.first, 1, head, 1)
        with split:
            state, slot = scratch.state, slot_state(rows, slots, unit.slot, head)
            n = LANES if state.floats % LANES == 0 else 1
            with serial(state.floats // n) as i:
                slots[lanes(slot.base + i * n, n)] = state.memory[lanes(i * n, n)]


def merge_token(rows: QueryRows, m: Expr, num_spans: Expr, first_slot: Expr, head: Expr, slots: Memory) -> None:
    """The spans of token m, which are in slots, into its row of `y`."""
    shape, scratch = rows.shape, rows.scratch(1)
    steps, n = AttentionSteps(shape, scratch), shape.n
    rows.load(scratch, m, 1, head, 1)
    with serial(num_spans) as span:
        slot = slot_state(rows, slots, first_slot + span, head)

        def part(index: Expr, start: Expr, size: int) -> None:
            factors = steps.factors(index, slots[lanes(slot.maxima(index))])
            for r in range(size):
                row = bound(start + r)
                with serial(shape.layout.head_dim // n) as i:
                    outputs = slots[lanes(slot.output(row) + i * n, n)]
                    steps.add(scratch.state.output(row) + i * n, outputs, factors, r, n)
                steps.add(scratch.state.sums(row), slots[lanes(slot.sums(row))], factors, r, LANES)

        shape.heads.each(part)
    rows.store(scratch, m, 1, head, 1)


def _either_span(condition: Expr, a: StoredSpan, b: StoredSpan) -> StoredSpan:
    names = ("first", "last", "head")
    return replace(a, **{name: bound(T.Select(condition, getattr(a, name), getattr(b, name))) for name in names})
