"""Units of attention, which one thread computes at a time: a tile of a sequence's tokens, or a token's span.

The units are found once per forward, from the sequences of tokens and the lengths that they see. They decide which
thread computes what, and change no bit of a result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as T

from ..codegen.builder import SIZE, Kernel, Memory, bound, either, registers, serial
from ..codegen.vector import Expr
from .kv_spans import SPAN, KVSequences

MAX_TILE = 32  # tokens
SINGLE_TOKENS = 8  # a step of at most this many tokens makes each a unit of its own
_TILES = 8  # minimum number of tiles of a larger step
_SHARE = 16  # a token with more than 1/16 of the step's spans is split into them
_MOST_ROWS = (1 << 31) - 1
_HEADER, _UNIT, _MERGE = 2, 4, 3  # number of int32 of each


@dataclass(frozen=True)
class AttentionLimits:
    """The largest step, and the slots for results of single spans: enough for a few tokens of a full context."""

    num_tokens: int
    context_length: int

    @property
    def num_slots(self) -> int:
        """Number of slots; each holds one token's result after one span."""
        return SINGLE_TOKENS * -(-self.context_length // SPAN)

    @property
    def num_units(self) -> int:
        """Largest number of units of a step: one for each token, and one for each slot."""
        return self.num_tokens + self.num_slots


@dataclass(frozen=True)
class AttentionUnit:
    """A tile of tokens `[first, first + num_tokens)`, or of as many that are `stride` apart.

    A single token may be split into spans, whose results are stored in slots.
    """

    first: Expr
    num_tokens: Expr
    span: Expr  # -1 for all spans
    slot: Expr
    stride: Expr = 1

    def token(self, i: Expr) -> Expr:
        """Return the i-th token."""
        return self.first + i * self.stride

    @property
    def is_whole(self) -> Expr:
        """True if the unit is all spans of its tokens."""
        return self.span < 0

    def first_span(self, sequences: KVSequences) -> Expr:
        """Return the unit's one span, or the first that its token sees."""
        if sequences.starts is None:
            return T.max(self.span, T.int64(0))
        return T.Select(self.is_whole, sequences.first_span(self.first), self.span)

    def rows(self, sequences: KVSequences) -> tuple[Expr, Expr]:
        """Return the first and the end of the rows that any of the unit's tokens sees."""
        longest = registers(1, "int64")
        longest[0] = T.int64(0)
        with serial(self.num_tokens) as j:
            longest[0] = T.max(longest[0], sequences.length(self.token(j)))
        if sequences.starts is None:
            return 0, longest[0]
        earliest = registers(1, "int64")
        earliest[0] = sequences.start(self.first)
        with serial(self.num_tokens) as j:
            earliest[0] = T.min(earliest[0], sequences.start(self.token(j)))
        return earliest[0], longest[0]


@dataclass(frozen=True)
class AttentionUnits:
    """The units of a step, int32.

    Layout: the numbers of units and merges, the units as `AttentionUnit`, the order of work, and the merges. A merge is
    a token, the number of spans that it was split into, and the first of its slots.
    """

    memory: Memory
    limits: AttentionLimits

    @property
    def num_ints(self) -> int:
        """Number of int32 in the units' memory."""
        return int(self._merge(self.limits.num_tokens))

    @property
    def num_units(self) -> Expr:
        """Number of units of this step."""
        return T.Cast("int64", self.memory[0])

    @property
    def num_merges(self) -> Expr:
        """Number of tokens of this step that are split into spans."""
        return T.Cast("int64", self.memory[1])

    def unit(self, i: Expr) -> AttentionUnit:
        """Return the i-th unit in the order of work."""
        return self.found(self.memory[self._order(i)])

    def found(self, i: Expr) -> AttentionUnit:
        """Return the i-th unit in the order of tokens."""
        start = bound(self._unit(i))
        return AttentionUnit(*(bound(T.Cast("int64", self.memory[start + j])) for j in range(_UNIT)))

    def merge(self, i: Expr) -> tuple[Expr, Expr, Expr]:
        """Return token, number of spans and first slot of the i-th merge."""
        start = self._merge(i)
        token, num_spans, slot = (bound(T.Cast("int64", self.memory[start + j])) for j in range(_MERGE))
        return token, num_spans, slot

    def write(self, start: Expr, *values: Expr) -> None:
        """Write numbers from index `start` on."""
        for i, value in enumerate(values):
            self.memory[start + i] = T.Cast("int32", value)

    def write_unit(self, i: Expr, unit: AttentionUnit) -> None:
        """Write the i-th unit."""
        self.write(bound(self._unit(i)), unit.first, unit.num_tokens, unit.span, unit.slot)

    def write_num_tokens(self, i: Expr, num_tokens: Expr) -> None:
        """Replace the number of tokens of the i-th unit."""
        self.write(self._unit(i) + 1, num_tokens)

    def write_merge(self, i: Expr, token: Expr, num_spans: Expr, slot: Expr) -> None:
        """Write the i-th merge."""
        self.write(bound(self._merge(i)), token, num_spans, slot)

    def write_order(self, num_units: Expr, cost: Callable[[Expr], Expr]) -> None:
        """Write an order of work in which every run of units costs about its share; each thread takes a run.

        Later tiles of a prompt cost more, so units are taken from both ends. Each time, the end is chosen that brings
        the running total closer to its share.
        """
        state = registers(4, "int64")
        low, high, so_far, total = range(4)
        state[low], state[high], state[so_far], state[total] = T.int64(0), num_units - 1, T.int64(0), T.int64(0)
        with serial(num_units) as i:
            state[total] = state[total] + cost(i)
        with serial(num_units) as i:
            costs = {end: bound(cost(state[end])) for end in (low, high)}
            # the missing cost, times the number of units
            missing = bound((i + 1) * state[total] - state[so_far] * num_units)
            off = {end: bound(T.abs(missing - costs[end] * num_units)) for end in (low, high)}
            with either(off[low] < off[high]) as (from_low, from_high):
                for branch, end, step in ((from_low, low, 1), (from_high, high, -1)):
                    with branch:
                        self.write(self._order(i), state[end])
                        state[so_far] = state[so_far] + costs[end]
                        state[end] = state[end] + step

    def _unit(self, i: Expr) -> Expr:
        """Return the index of the i-th unit."""
        return _HEADER + i * _UNIT

    def _order(self, i: Expr) -> Expr:
        """Return the index of the i-th place in the order of work."""
        return _HEADER + self.limits.num_units * _UNIT + i

    def _merge(self, i: Expr) -> Expr:
        """Return the index of the i-th merge."""
        return _HEADER + self.limits.num_units * (_UNIT + 1) + i * _MERGE


def find_starts(*, window: int | None = None, chunk: int | None = None, skips_first: bool = False) -> Any:
    """Return the PrimFunc `(kv_lengths, starts, num_rows) -> 0`, which finds the first row that each token sees.

    With a `window`, a token sees the last `window` rows up to its own (Beltagy et al., 2020). With a `chunk`, it sees
    the rows of its own chunk, which begins at a multiple of `chunk` (Llama 4, 2025). With `skips_first`, it sees all
    but the first. Rows count, not positions.
    """
    assert (window is not None) + (chunk is not None) + skips_first == 1, "one says where a token's rows begin"
    with Kernel() as k:
        kv_lengths, starts, num_rows = k.arguments(kv_lengths="int32", starts="int32", num_rows=SIZE)
        with serial(num_rows) as m:
            if window is not None:
                starts[m] = T.max(kv_lengths[m] - T.int32(min(window, _MOST_ROWS)), T.int32(0))
            elif chunk is None:
                starts[m] = T.min(kv_lengths[m] - T.int32(1), T.int32(1))
            else:
                starts[m] = (kv_lengths[m] - T.int32(1)) // T.int32(chunk) * T.int32(chunk)
    return k.function


def find_ends(*, window: int | None = None) -> Any:
    """A PrimFunc `(row_of_token, kv_lengths, ends, num_rows) -> 0`: the row behind the last that each token sees.

    A token sees all rows of its sequence that there are after the step, or `window` of them from its own on.
    """
    with Kernel() as k:
        row_of_token, kv_lengths, ends, num_rows = k.arguments(
            row_of_token="int32", kv_lengths="int32", ends="int32", num_rows=SIZE
        )
        last = registers(1, "int32")
        with serial(num_rows) as i:
            m = bound(num_rows - 1 - i)
            after = bound(T.min(m + 1, num_rows - 1))
            is_last = T.Or(i == 0, row_of_token[after] != row_of_token[m])
            last[0] = T.Select(is_last, kv_lengths[m], last[0])
            ends[m] = last[0] if window is None else T.min(last[0], kv_lengths[m] + T.int32(window - 1))
    return k.function


def units_ints(limits: AttentionLimits) -> int:
    """Return the largest number of int32 that `find_units` writes."""
    return AttentionUnits(Memory(None), limits).num_ints


def find_units(limits: AttentionLimits, micro_tokens: int, *, has_starts: bool = False) -> Any:
    """Return the PrimFunc `(row_of_token, kv_lengths[, starts], units, num_rows) -> 0`.

    `units` has room for `num_ints`. A tile has consecutive tokens of one sequence. Their number is a multiple of
    `micro_tokens`, except for the last tile of a sequence.
    """
    with Kernel() as k:
        row_of_token, kv_lengths, *starts, memory, num_rows = k.arguments(
            row_of_token="int32",
            kv_lengths="int32",
            **({"starts": "int32"} if has_starts else {}),
            units="int32",
            num_rows=SIZE,
        )
        units = AttentionUnits(memory, limits)
        counters = registers(5, "int64")
        num_units, num_merges, num_taken, length, total = range(5)  # slots taken, tokens of the last unit, all spans
        for i in range(5):
            counters[i] = T.int64(0)

        def start(m: Expr) -> Expr:
            return T.Cast("int64", starts[0][m]) if has_starts else 0

        def num_spans(m: Expr) -> Expr:
            return (T.Cast("int64", kv_lengths[m]) + (SPAN - 1)) // SPAN - start(m) // SPAN

        def cost(i: Expr) -> Expr:
            """Return the i-th unit's products of queries and keys; those of a single token count twice."""
            first, num_tokens, span = (bound(T.Cast("int64", memory[units._unit(i) + j])) for j in range(3))
            length = T.Cast("int64", kv_lengths[first + num_tokens - 1])
            seen = T.Select(span < 0, length - start(first), T.int64(SPAN))
            return seen * T.Select(num_tokens == 1, T.int64(2), num_tokens)

        def add(counter: int, n: Expr) -> None:
            counters[counter] = counters[counter] + n

        with serial(num_rows) as m:
            add(total, num_spans(m))
        share = (num_rows + (_TILES * micro_tokens - 1)) // (_TILES * micro_tokens) * micro_tokens
        most = bound(T.Select(num_rows <= SINGLE_TOKENS, T.int64(1), T.min(T.int64(MAX_TILE), share)))

        with serial(num_rows) as m:
            before, after = bound(T.max(m - 1, T.int64(0))), bound(T.min(m + 1, num_rows - 1))
            same = T.And(m > 0, row_of_token[before] == row_of_token[m])
            with either(T.And(same, counters[length] < most)) as (longer, another):
                with longer:
                    add(length, T.int64(1))
                    units.write_num_tokens(counters[num_units] - 1, counters[length])
                with another:
                    counters[length] = T.int64(1)
                    spans = bound(num_spans(m))
                    last = T.Or(m == num_rows - 1, row_of_token[after] != row_of_token[m])
                    fits = T.And(spans > 1, counters[num_taken] + spans <= limits.num_slots)
                    costly = spans * _SHARE > counters[total]
                    with either(T.And(T.Or(most == 1, last), T.And(fits, costly))) as (split, whole):
                        with split:
                            units.write_merge(counters[num_merges], m, spans, counters[num_taken])
                            with serial(spans) as span:
                                at = start(m) // SPAN + span
                                unit = AttentionUnit(m, T.int64(1), at, counters[num_taken] + span)
                                units.write_unit(counters[num_units] + span, unit)
                            add(num_merges, T.int64(1))
                            add(num_taken, spans)
                            add(num_units, spans)
                        with whole:
                            unit = AttentionUnit(m, T.int64(1), T.int64(-1), T.int64(0))
                            units.write_unit(counters[num_units], unit)
                            add(num_units, T.int64(1))
        units.write(T.int64(0), counters[num_units], counters[num_merges])
        units.write_order(bound(counters[num_units]), cost)
    return k.function
