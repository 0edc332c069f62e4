"""Find the rows that each expert multiplies, once per layer, and sum the outputs of a token's experts.

The rows of an expert's matrices are entries, `token * top_k + rank`. Each entry has a place. Entries of one expert are
adjacent, and begin at a multiple of `PLACES`, as tiles of quantized rows do. Places are divided into slabs, which a
thread takes one at a time. Slabs decide which thread computes what, and change no bit of a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tvm.script.ir_builder import tirx as T

from ...codegen.builder import SIZE, Kernel, Memory, bound, for_each_row, registers, serial
from ...codegen.targets import Target
from ...codegen.vector import LANES, Expr, const, fma, lanes, splat
from ...weights.layout import CHUNKS
from ..linear import ConsecutiveRows, TileRows
from ..quantized_rows import QuantizedRows

SLAB_ENTRIES = 64  # rows that share unpacked weights
PLACES = 8  # each slab begins at a multiple of this many places
_SLAB = 3  # number of int32 of each
RowOrder = Literal["tokens", "entries", "places"]


@dataclass(frozen=True)
class ExpertLimits:
    """The number of experts, the number of experts per token, and the tokens of the largest step."""

    num_experts: int
    top_k: int
    num_tokens: int

    @property
    def num_entries(self) -> int:
        """Largest number of entries of a step."""
        return self.num_tokens * self.top_k

    @property
    def num_places(self) -> int:
        """Largest number of places of a step; padding makes them more than entries."""
        return self.num_entries + (PLACES - 1) * min(self.num_experts, self.num_entries)

    @property
    def num_slabs(self) -> int:
        """Largest number of slabs of a step: one for each expert that has entries, and one for each whole slab."""
        return min(self.num_experts, self.num_entries) + self.num_entries // SLAB_ENTRIES

    @property
    def num_ints(self) -> int:
        """Number of int32 that `find_slabs` writes."""
        return 1 + self.num_slabs * _SLAB + self.num_places + self.num_entries


@dataclass(frozen=True)
class Slab:
    """Entries at `count` places from `PLACES * block` on, all of one expert."""

    expert: Expr
    block: Expr
    count: Expr

    @property
    def first(self) -> Expr:
        """The first place of the slab."""
        return self.block * PLACES


@dataclass(frozen=True)
class ExpertLists:
    """The slabs of a step, the entry at each place, and the place of each entry; int32."""

    memory: Memory
    limits: ExpertLimits

    @property
    def num_slabs(self) -> Expr:
        """Number of slabs of this step."""
        return T.Cast("int64", self.memory[0])

    def slab(self, i: Expr) -> Slab:
        """Return the i-th slab."""
        return Slab(*(bound(T.Cast("int64", self.memory[1 + i * _SLAB + j])) for j in range(_SLAB)))

    def entry(self, place: Expr) -> Expr:
        """Return the entry at a place."""
        return T.Cast("int64", self.memory[self.entries + place])

    def place(self, entry: Expr) -> Expr:
        """Return the place of an entry."""
        return T.Cast("int64", self.memory[self.places + entry])

    @property
    def entries(self) -> int:
        """Index of the first of the entries, which are ordered by place."""
        return 1 + self.limits.num_slabs * _SLAB

    @property
    def places(self) -> int:
        """Index of the first of the places, which are ordered by entry."""
        return self.entries + self.limits.num_places

    def write_slab(self, i: Expr, slab: Slab) -> None:
        """Write the i-th slab."""
        for j, value in enumerate((slab.expert, slab.block, slab.count)):
            self.memory[1 + i * _SLAB + j] = T.Cast("int32", value)


@dataclass(frozen=True)
class _SlabRows:
    """Rows of a tile of a slab. Padding rows of the last tile read the slab's last entry again."""

    xs: tuple[Expr, ...]
    ys: tuple[Expr, ...]
    num_wanted: Expr

    def x(self, m: int) -> Expr:
        """Return the input row of tile row `m`."""
        return self.xs[m]

    def y(self, m: int) -> Expr:
        """Return the output row of tile row `m`."""
        return self.ys[m]

    def is_wanted(self, m: int) -> Expr:
        """Return whether tile row `m` is stored."""
        return self.num_wanted > m


@dataclass(frozen=True)
class ExpertRows:
    """The row order of entries in `x` and in `y`: their token's row, their own, or that of their place.

    Rows at places are adjacent, so they are read and written with one address.
    """

    limits: ExpertLimits
    x: RowOrder
    y: RowOrder

    def rows(self, lists: ExpertLists, slab: Slab, first: Expr, count: int) -> TileRows:
        """Return the rows of `count` entries of a slab from its entry `first` on."""
        if self.x == self.y == "places":
            return ConsecutiveRows(slab.first + first, slab.first + slab.count)
        places = tuple(bound(slab.first + T.min(first + m, slab.count - 1)) for m in range(count))

        def rows_by(order: RowOrder) -> tuple[Expr, ...]:
            if order == "places":
                return places
            entries = (lists.entry(place) for place in places)
            return tuple(bound(entry // self.limits.top_k if order == "tokens" else entry) for entry in entries)

        return _SlabRows(rows_by(self.x), rows_by(self.y), bound(slab.count - first))


def find_slabs(limits: ExpertLimits) -> Any:
    """Return the PrimFunc `(experts, lists, num_rows) -> 0`, which assigns entries to places and slabs.

    `experts` is int32 `[num_rows, top_k]`; `lists` has room for `limits.num_ints`. Entries of an expert stay in their
    order, and its slabs are all of about the same size. Places without an entry are not written.
    """
    with Kernel() as k:
        experts, memory, num_rows = k.arguments(experts="int32", lists="int32", num_rows=SIZE)
        lists, num_entries = ExpertLists(memory, limits), num_rows * limits.top_k
        ends, counters = registers(limits.num_experts, "int64"), registers(2, "int64")
        blocks, num_slabs = range(2)
        with serial(limits.num_experts) as e:
            ends[e] = T.int64(0)
        with serial(num_entries) as i:
            e = bound(T.Cast("int64", experts[i]))
            ends[e] = ends[e] + 1
        counters[blocks], counters[num_slabs] = T.int64(0), T.int64(0)
        with serial(limits.num_experts) as e:
            count = bound(ends[e])
            of_expert = bound((count + (PLACES - 1)) // PLACES)
            slabs = bound((count + (SLAB_ENTRIES - 1)) // SLAB_ENTRIES)
            with serial(slabs) as s:
                first, end = bound(s * of_expert // slabs), bound((s + 1) * of_expert // slabs)
                slab = Slab(e, counters[blocks] + first, T.min(end * PLACES, count) - first * PLACES)
                lists.write_slab(counters[num_slabs] + s, slab)
            ends[e] = counters[blocks] * PLACES  # the place of the expert's next entry
            counters[blocks] = counters[blocks] + of_expert
            counters[num_slabs] = counters[num_slabs] + slabs
        memory[0] = T.Cast("int32", counters[num_slabs])
        with serial(num_entries) as i:
            e = bound(T.Cast("int64", experts[i]))
            memory[lists.entries + ends[e]] = T.Cast("int32", i)
            memory[lists.places + i] = T.Cast("int32", ends[e])
            ends[e] = ends[e] + 1
    return k.function


def spread_rows(num_groups: int, limits: ExpertLimits) -> Any:
    """Return the PrimFunc `(codes, scales, sums, lists, to_codes, to_scales, to_sums, num_rows) -> 0`.

    It copies rows of tokens, quantized to 8 bits in `num_groups` groups, so that each expert's rows are adjacent: for
    each of `num_rows` entries (a token and one of its experts), the token's row is copied to the entry's place.
    """
    with Kernel() as k:
        dtypes = {"codes": "int32", "scales": "float32", "sums": "int32"}
        of_codes, of_scales, of_sums, memory, codes, scales, sums, num_rows = k.arguments(
            **dtypes, lists="int32", **{f"to_{name}": dtype for name, dtype in dtypes.items()}, num_rows=SIZE
        )
        lists = ExpertLists(memory, limits)
        tokens = QuantizedRows(of_codes, of_scales, of_sums, num_groups, wide=False)
        places = QuantizedRows(codes, scales, sums, num_groups, wide=False)

        def row(entry: Expr) -> None:
            token, place = bound(entry // limits.top_k), bound(lists.place(entry))
            with serial(num_groups) as g:
                codes[lanes(places.first_chunk(g, place), CHUNKS)] = tokens.codes[
                    lanes(tokens.first_chunk(g, token), CHUNKS)
                ]
                to, of = lanes(places.pair(g, place), 2), lanes(tokens.pair(g, token), 2)
                scales[to] = tokens.scales[of]
                sums[to] = tokens.sums[of]

        for_each_row(num_rows, row)
    return k.function


def weigh_rows(width: int, stride: int, limits: ExpertLimits) -> Any:
    """Return the PrimFunc `(x, weights, lists, num_rows) -> 0`, which multiplies entries' rows by weights in place.

    The row of each entry is at its place. Rows have `width` float32, a multiple of 16, and are `stride` apart.
    """
    with Kernel() as k:
        x, weights, memory, num_rows = k.arguments(x="float32", weights="float32", lists="int32", num_rows=SIZE)
        lists = ExpertLists(memory, limits)

        def row(entry: Expr) -> None:
            start = bound(lists.place(entry) * stride)
            with serial(width // LANES) as i:
                where = lanes(start + i * LANES)
                x[where] = x[where] * splat(weights[entry])

        for_each_row(num_rows, row)
    return k.function


@dataclass(frozen=True)
class CombineSpec:
    """A weighted sum of rows of `width` over the ranks of a token."""

    limits: ExpertLimits
    width: int
    x_stride: int
    y_stride: int
    weighted: bool = True


def combine(spec: CombineSpec, target: Target) -> Any:
    """Return the PrimFunc `(y, weights, lists, x, num_rows) -> 0`, which sums the outputs of a token's experts into
    `x`.

    Float32 `y` is `[places, y_stride]`: the output of a token's expert is at the place that `lists` give this entry.
    `weights` are `[num_rows, top_k]`, and all count as 1 if the spec is not `weighted`. The outputs of a token are
    added one after another, in the order of its experts.
    """
    with Kernel() as k:
        y, weights, memory, x, num_rows = k.arguments(
            y="float32", weights="float32", lists="int32", x="float32", num_rows=SIZE
        )
        lists, top_k = ExpertLists(memory, spec.limits), spec.limits.top_k

        def row(m: Expr) -> None:
            def some(i: Expr, n: int) -> None:
                total = registers(LANES, "float32")
                total[lanes(0, n)] = const(0, n)
                with serial(top_k) as rank:
                    entry = bound(m * top_k + rank)
                    value = y[lanes(lists.place(entry) * spec.y_stride + i, n)]
                    weight = splat(weights[entry], n) if spec.weighted else const(1, n)
                    total[lanes(0, n)] = fma(weight, value, total[lanes(0, n)], target.has_fma, n)
                x[lanes(m * spec.x_stride + i, n)] = total[lanes(0, n)]

            with serial(spec.width // LANES) as i:
                some(i * LANES, LANES)
            for i in range(spec.width // LANES * LANES, spec.width):
                some(T.int64(i), 1)

        for_each_row(num_rows, row)
    return k.function
