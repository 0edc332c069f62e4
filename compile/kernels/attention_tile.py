"""Attention of several tokens of a sequence: each span is converted once for all of them."""

from __future__ import annotations

from collections.abc import Callable

from radixlm.runtime.artifact.manifest import PAGE_SIZE
from tvm.script.ir_builder import tirx as T

from .attention_steps import AttentionSteps, MicroTile
from .attention_units import MAX_TILE, AttentionUnit
from .builder import bound, registers, serial
from .kv_sequences import KVSequences
from .kv_span import SPAN
from .loaded_span import LoadedSpan
from .query_rows import QueryRows
from .vector import Expr


def attend_tile(rows: QueryRows, sequences: KVSequences, unit: AttentionUnit, head: Expr) -> None:
    """All spans of the unit's tokens, which may see different numbers of rows, into their rows of `y`."""
    shape = rows.shape
    scratch = rows.scratch(MAX_TILE, LoadedSpan.floats(shape.layout))
    loaded = LoadedSpan(shape.layout, scratch.memory, scratch.floats)
    steps = AttentionSteps(shape, scratch)
    longest = registers(1, "int64")
    longest[0] = T.int64(0)
    with serial(unit.num_tokens) as j:
        longest[0] = T.max(longest[0], sequences.length(unit.first + j))
    rows.load(scratch, unit.first, unit.num_tokens, head, MAX_TILE)
    with serial((longest[0] + (SPAN - 1)) // SPAN) as span:
        stored = sequences.span(unit.first, head, span)
        num_pages = bound((T.min(T.int64(SPAN), longest[0] - span * SPAN) + (PAGE_SIZE - 1)) // PAGE_SIZE)

        def weigh(tile: MicroTile) -> None:
            steps.scores(tile, loaded)
            steps.weigh(tile, loaded)

        def seen(m: Expr) -> Expr:
            return sequences.seen(m, span)

        loaded.load_keys(stored, num_pages)
        each_micro_tile(rows, unit, seen, weigh)
        loaded.load_values(stored, num_pages, shape.n)
        each_micro_tile(rows, unit, seen, lambda tile: steps.join(tile, loaded))
    rows.store(scratch, unit.first, unit.num_tokens, head, MAX_TILE)


def each_micro_tile(
    rows: QueryRows, unit: AttentionUnit, sees: Callable[[Expr], Expr], emit: Callable[[MicroTile], None]
) -> None:
    """Whole ones, then the tokens that are left, one by one; `sees(m)` is how many keys token m sees."""
    tokens = rows.shape.tokens

    def part(index: Expr, start: Expr, size: int) -> None:
        micro = bound(index * rows.num_micros(MAX_TILE))
        with serial(unit.num_tokens // tokens) as i:
            row = bound(rows.first_row(start, size, i * tokens, MAX_TILE))
            seen = [bound(sees(unit.first + i * tokens + j)) for j in range(tokens)]
            emit(MicroTile(bound(micro + i), row, size, seen))
        if tokens > 1:
            with serial(unit.num_tokens % tokens) as i:
                token = bound(unit.num_tokens // tokens * tokens + i)
                row = bound(rows.first_row(start, size, token, MAX_TILE))
                seen = [bound(sees(unit.first + token))]
                emit(MicroTile(bound(micro + unit.num_tokens // tokens + i), row, size, seen))

    rows.shape.heads.each(part)
