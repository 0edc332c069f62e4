"""Which rows each expert multiplies, found once in a layer, and the sum of what a token's experts return.

The rows of an expert's matrices are entries, `token * top_k + rank`: sorted by expert, and cut into slabs that a thread
takes at a time. Slabs decide which thread computes what, and change no bit of a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as T

from ...codegen.builder import SIZE, Kernel, Memory, bound, for_each_row, registers, serial
from ...codegen.targets import Target
from ...codegen.vector import LANES, Expr, const, fma, lanes, splat
from ..linear import TileRows

SLAB_ENTRIES = 64  # rows that share unpacked weights
_SLAB = 3  # numbers of each


@dataclass(frozen=True)
class ExpertLimits:
    """How many experts there are, how many of them a token has, and the tokens of the largest step."""

    num_experts: int
    top_k: int
    num_tokens: int

    @property
    def num_entries(self) -> int:
        """The most entries of a step."""
        return self.num_tokens * self.top_k

    @property
    def num_slabs(self) -> int:
        """The most slabs of a step: one for each expert that has entries, and one for each whole slab."""
        return min(self.num_experts, self.num_entries) + self.num_entries // SLAB_ENTRIES

    @property
    def num_ints(self) -> int:
        """How many int32 `find_slabs` writes."""
        return 1 + self.num_slabs * _SLAB + self.num_entries


@dataclass(frozen=True)
class Slab:
    """Entries `[first, first + count)` of the sorted ones, all of one expert."""

    expert: Expr
    first: Expr
    count: Expr


@dataclass(frozen=True)
class ExpertLists:
    """How many slabs there are, the slabs, and the entries in the order of their experts; int32."""

    memory: Memory
    limits: ExpertLimits

    @property
    def num_slabs(self) -> Expr:
        """How many slabs this step has."""
        return T.Cast("int64", self.memory[0])

    def slab(self, i: Expr) -> Slab:
        """The i-th slab."""
        return Slab(*(bound(T.Cast("int64", self.memory[1 + i * _SLAB + j])) for j in range(_SLAB)))

    def entry(self, i: Expr) -> Expr:
        """The i-th entry in the order of experts."""
        return T.Cast("int64", self.memory[self.entries + i])

    @property
    def entries(self) -> int:
        """Where the entries begin."""
        return 1 + self.limits.num_slabs * _SLAB

    def write_slab(self, i: Expr, slab: Slab) -> None:
        """Write the i-th slab."""
        for j, value in enumerate((slab.expert, slab.first, slab.count)):
            self.memory[1 + i * _SLAB + j] = T.Cast("int32", value)


@dataclass(frozen=True)
class _SlabRows:
    """Rows of a tile of a slab. What fills up the last tile reads the slab's last entry again."""

    xs: tuple[Expr, ...]
    ys: tuple[Expr, ...]
    num_wanted: Expr

    def x(self, m: int) -> Expr:
        return self.xs[m]

    def y(self, m: int) -> Expr:
        return self.ys[m]

    def is_wanted(self, m: int) -> Expr:
        return self.num_wanted > m


@dataclass(frozen=True)
class ExpertRows:
    """Which rows of activations entries have: their token's (`are_tokens`), or their own."""

    limits: ExpertLimits
    are_tokens: bool

    def rows(self, lists: ExpertLists, slab: Slab, first: Expr, count: int) -> TileRows:
        """The `count` entries of a slab from its `first` on."""
        ys = tuple(bound(lists.entry(slab.first + T.min(first + m, slab.count - 1))) for m in range(count))
        xs = tuple(bound(y // self.limits.top_k) for y in ys) if self.are_tokens else ys
        return _SlabRows(xs, ys, bound(slab.count - first))


def find_slabs(limits: ExpertLimits) -> Any:
    """A PrimFunc `(experts, lists, num_rows) -> 0`.

    `experts` int32 `[num_rows, top_k]`; `lists` has room for `limits.num_ints`. Entries of an expert stay in their
    order, and its slabs are all of about the same size.
    """
    with Kernel() as k:
        experts, memory, num_rows = k.arguments(experts="int32", lists="int32", num_rows=SIZE)
        lists, num_entries = ExpertLists(memory, limits), num_rows * limits.top_k
        ends, counters = registers(limits.num_experts, "int64"), registers(2, "int64")
        before, num_slabs = range(2)
        with serial(limits.num_experts) as e:
            ends[e] = T.int64(0)
        with serial(num_entries) as i:
            e = bound(T.Cast("int64", experts[i]))
            ends[e] = ends[e] + 1
        counters[before], counters[num_slabs] = T.int64(0), T.int64(0)
        with serial(limits.num_experts) as e:
            count = bound(ends[e])
            slabs = bound((count + (SLAB_ENTRIES - 1)) // SLAB_ENTRIES)
            with serial(slabs) as s:
                first = bound(s * count // slabs)
                slab = Slab(e, counters[before] + first, (s + 1) * count // slabs - first)
                lists.write_slab(counters[num_slabs] + s, slab)
            ends[e] = counters[before]  # from here on where its next entry goes
            counters[before] = counters[before] + count
            counters[num_slabs] = counters[num_slabs] + slabs
        memory[0] = T.Cast("int32", counters[num_slabs])
        with serial(num_entries) as i:
            e = bound(T.Cast("int64", experts[i]))
            memory[lists.entries + ends[e]] = T.Cast("int32", i)
            ends[e] = ends[e] + 1
    return k.function


@dataclass(frozen=True)
class CombineSpec:
    """Rows of `width` sums over the ranks of a token: of weight times the expert's output."""

    width: int
    top_k: int
    x_stride: int
    y_stride: int
    weighted: bool = True


def combine(spec: CombineSpec, target: Target) -> Any:
    """A PrimFunc `(y, weights, x, num_rows) -> 0`.

    `y` float32 `[num_rows * top_k, y_stride]`, `weights` `[num_rows, top_k]`. Ranks are added one after another; `x`
    gets the sums. Without `weighted` every weight is 1.
    """
    with Kernel() as k:
        y, weights, x, num_rows = k.arguments(y="float32", weights="float32", x="float32", num_rows=SIZE)

        def row(m: Expr) -> None:
            def some(i: Expr, n: int) -> None:
                total = registers(LANES, "float32")
                total[lanes(0, n)] = const(0, n)
                with serial(spec.top_k) as rank:
                    entry = m * spec.top_k + rank
                    value = y[lanes(entry * spec.y_stride + i, n)]
                    weight = splat(weights[entry], n) if spec.weighted else const(1, n)
                    total[lanes(0, n)] = fma(weight, value, total[lanes(0, n)], target.has_fma, n)
                x[lanes(m * spec.x_stride + i, n)] = total[lanes(0, n)]

            with serial(spec.width // LANES) as i:
                some(i * LANES, LANES)
            for i in range(spec.width // LANES * LANES, spec.width):
                some(T.int64(i), 1)

        for_each_row(num_rows, row)
    return k.function
