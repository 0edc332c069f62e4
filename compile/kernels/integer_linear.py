"""y = W x for weights in integer codes and activations in 8 bits: integers inside a group, floats across groups.

One row (decode) streams the weights; more rows share them in tiles. All add the same numbers in the same order, groups
along K one after another. A row's result therefore does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from tvm.script.ir_builder import tirx as T

from ..codegen.builder import SIZE, Kernel, Memory, bound, either, parallel, prefetch, registers, serial, when
from ..codegen.targets import Target
from ..codegen.vector import Expr, lanes
from ..weights.codes import CODES
from ..weights.layout import CHUNK, CHUNKS, GROUP, ROW_BLOCK
from ..weights.scales import WeightScales, scale_dtypes
from .experts.entries import ExpertLists, ExpertRows
from .integer_dot import dot_of
from .integer_tile import SUPER_SPANS, TILINGS, OneOutput, Tile, TileArithmetic
from .linear import ConsecutiveRows, LinearSpec, Slabs, Spans, TileRows
from .quantized_rows import QuantizedRows

Fetch = Callable[[Tile, Expr], None]  # prefetches for a tile while it adds one of its groups
UNPACKED = CHUNKS * CHUNK  # bytes of an unpacked group of a block, one per code
SLAB_ROWS = 128  # rows that a thread multiplies with one span of weights before the next span
LONG_ROW = 6144  # inputs; longer rows do not stay in the L1 cache while a block's weights pass through it
MANY_SPANS = 32  # number of spans that gives each of 16 threads two or more; fewer are divided into blocks
LEAD = 4096  # bytes; hardware prefetch stops at a page
AHEAD = 4  # groups; 0.5 to 2 KiB of codes
PANEL = 14  # groups unpacked at a time: 7 KiB; with fewer, sums are stored more often


def integer_linear(spec: LinearSpec, target: Target, experts: ExpertRows | None = None) -> Any:
    """Return the PrimFunc `(codes, scales, offsets, bias, x_codes, x_scales, x_sums, y, num_rows) -> 0`.

    Weights have the layout of `weights/layout.py`; `offsets` and `bias` are read only if the spec has them. Activations
    have the layout of `quantized_rows.py`. Writes (or adds to, if `spec.add_to_output`) columns `[column, column + N)`
    of `y`, float32 `[num_rows, y_stride]`.

    With `experts`, the weights are those of all experts, one after another, each of `spec.num_outputs` outputs. The
    output of `find_slabs` then replaces `num_rows` as the last argument, and rows of `y` are entries.
    """
    dot = dot_of(target.integer_dot, CODES[spec.kind.codes].max_level, wide=spec.wide)
    with Kernel(sums_in_order=dot.needs_order) as k:
        codes, scales, offsets, bias, x_codes, x_scales, x_sums, y, rows = k.arguments(
            codes="uint8",
            **scale_dtypes(spec.kind),
            bias="float32",
            x_codes="int32",
            x_scales="float32",
            x_sums="int32",
            y="float32",
            **({"lists": "int32"} if experts else {"num_rows": SIZE}),
        )
        x = QuantizedRows(x_codes, x_scales, x_sums, spec.num_inputs // GROUP, spec.wide)
        stored = WeightScales(spec.kind, scales, offsets, spec.num_inputs, target.has_f16c)
        arithmetic = TileArithmetic(spec, dot, stored, x, bias, y, target.has_fma)
        matrix = _IntegerMatrix(arithmetic, target, codes, of_experts=experts is not None)
        if experts:
            matrix.times_entries(ExpertLists(rows, experts.limits), experts)
        else:
            matrix.times_rows(rows)
    return k.function


def integer_candidates(spec: LinearSpec, count: int, target: Target) -> Any:
    """Return the PrimFunc `(codes, scales, offsets, bias, x_codes, x_scales, x_sums, y, candidates, num_rows) -> 0`.

    It computes `count` outputs of each row, those of int32 `candidates` `[num_rows, count]`, and overwrites them in
    `y`. They have the bits of `integer_linear`. A candidate may occur twice.
    """
    with Kernel() as k:
        codes, scales, offsets, bias, x_codes, x_scales, x_sums, y, candidates, num_rows = k.arguments(
            codes="uint8",
            **scale_dtypes(spec.kind),
            bias="float32",
            x_codes="int32",
            x_scales="float32",
            x_sums="int32",
            y="float32",
            candidates="int32",
            num_rows=SIZE,
        )
        x = QuantizedRows(x_codes, x_scales, x_sums, spec.num_inputs // GROUP, spec.wide)
        stored = WeightScales(spec.kind, scales, offsets, spec.num_inputs, target.has_f16c)
        dot = dot_of(target.integer_dot, CODES[spec.kind.codes].max_level, wide=spec.wide)
        arithmetic = TileArithmetic(spec, dot, stored, x, bias, y, target.has_fma)
        _IntegerMatrix(arithmetic, target, codes).times_candidates(candidates, count, num_rows)
    return k.function


class _IntegerMatrix:
    """An emitter of the loops over one weight matrix."""

    def __init__(self, arithmetic: TileArithmetic, target: Target, codes: Memory, *, of_experts: bool = False) -> None:
        self.arithmetic, self.codes, self.lookups = arithmetic, codes, target.byte_lookups
        self.dot, self.kind = arithmetic.dot, arithmetic.kind
        self.format = CODES[self.kind.codes]
        self.groups = arithmetic.spec.num_inputs // GROUP
        self.blocks = arithmetic.spec.num_outputs // ROW_BLOCK
        self.tiling = TILINGS[self.dot.instruction]
        has_spans = arithmetic.spec.num_inputs >= LONG_ROW and (
            of_experts or self.blocks >= MANY_SPANS * self.tiling.blocks
        )
        self.spans = Spans(self.blocks, self.tiling.blocks if has_spans else 1)
        self.requests_lines = "avx2" in target.features and "avx512f" not in target.features
        # codes of 8 bits are levels already
        are_levels = self.dot.instruction == "signs256" and self.kind.codes == "q8" and self.kind.zero > 0
        # scaling the halves of a group separately takes the free slots
        self.unpacks = (self.tiling.unpacks and not are_levels) or len(arithmetic.halves) > 1

    def times_rows(self, num_rows: Expr) -> None:
        """Multiply slab by slab of rows: a thread keeps its rows from kernel to kernel. One row has its own loop."""
        with either(num_rows == 1) as (one, more):
            with one, parallel(self.spans.count) as span:
                row = ConsecutiveRows(T.int64(0), T.int64(1))
                self._times_one(span, row, lambda block, width: Tile(self.arithmetic, block, 1, width))
            with more:
                self._times_slabs(num_rows)

    def _times_slabs(self, num_rows: Expr) -> None:
        """Multiply rows slab by slab, each with all spans of weights."""
        many, count = self.tiling.many, self.spans.count
        slabs = Slabs((num_rows + (many - 1)) // many, SLAB_ROWS // many)
        with parallel(count * slabs.count) as item:
            slab, span = bound(item // count), bound(item % count)
            first = bound(slabs.first_tile(slab) * many)
            rows_of_slab = bound(T.min(slabs.first_tile(slab + 1) * many, num_rows) - first)
            self._times_many(
                span,
                rows_of_slab,
                lambda start, _: ConsecutiveRows(first + start, num_rows),
                lambda block, rows, width: Tile(self.arithmetic, block, rows, width),
            )

    def times_entries(self, lists: ExpertLists, experts: ExpertRows) -> None:
        """Multiply slab by slab of entries: a thread reads an expert's weights, then the next expert's."""
        count = self.spans.count
        with parallel(lists.num_slabs * count) as item:
            slab, span = lists.slab(item // count), bound(item % count)
            after = lists.slab(T.min(item // count + 1, lists.num_slabs - 1))
            expert, next_expert = bound(slab.expert * self.blocks), bound(after.expert * self.blocks)

            def tile(block: Expr, rows: int, width: int) -> Tile:
                end = bound(block + width)
                following = bound(T.if_then_else(end == self.blocks, next_expert, expert + end))
                return Tile(self.arithmetic, expert + block, rows, width, expert, following)

            with either(slab.count == 1) as (one, more):
                with one:
                    entry = experts.rows(lists, slab, T.int64(0), 1)
                    self._times_one(span, entry, lambda block, width: tile(block, 1, width))
                with more:
                    self._times_many(span, slab.count, lambda start, rows: experts.rows(lists, slab, start, rows), tile)

    def _times_one(self, span: Expr, row: TileRows, tile_of: Callable[[Expr, int], Tile]) -> None:
        """Multiply a span of blocks with a row; `tile_of` returns a tile from its first block and number of blocks."""
        first = bound(span * self.spans.width)
        self.spans.each_width(span, lambda width: self._times(tile_of(first, width), row, self._lead))

    def _times_many(
        self,
        span: Expr,
        num_rows: Expr,
        rows_of: Callable[[Expr, int], TileRows],
        tile_of: Callable[[Expr, int, int], Tile],
    ) -> None:
        """Multiply a span of blocks with a slab of rows: whole tiles, then a lower one for the remaining rows.

        Tiles have an even number of rows, of which the last may be padding. That halves the number of compiled kinds.

        Args:
            rows_of: returns the rows of a tile, from the first one in the slab and their number.
            tile_of: returns a tile, from its first block, its rows and its blocks.
        """
        first = bound(span * self.spans.width)
        many, even = self.tiling.many, bound((num_rows + 1) // 2 * 2)
        tiles, rest = bound(even // many), bound(even % many)

        def times_tiles(block: Expr) -> None:
            tile = tile_of(block, many, 1)
            with serial(tiles) as t:
                self._times(tile, rows_of(t * many, many), self._fetch_in_first_tile(t))

        with serial(T.min(T.int64(self.spans.width), self.blocks - first)) as n:
            block = bound(first + n)
            if self.unpacks:
                with either(tiles >= self.tiling.sharing) as (enough, others):
                    with enough:
                        self._times_unpacked(tile_of(block, many, 1), tiles, lambda t: rows_of(t * many, many))
                    with others:
                        times_tiles(block)
            else:
                times_tiles(block)
            for rows in range(2, many, 2):
                with when(rest == rows):
                    self._times(tile_of(block, rows, 1), rows_of(tiles * many, rows), self._fetch_in_first_tile(tiles))

    def times_candidates(self, candidates: Memory, count: int, num_rows: Expr) -> None:
        """Multiply one output of one row at a time; the next one's block is prefetched meanwhile."""
        with parallel(num_rows * count) as item:
            row = bound(item // count)
            output = bound(T.Cast("int64", candidates[item]))
            after = bound(T.Cast("int64", candidates[T.min(item + 1, num_rows * count - 1)]))
            tile = OneOutput(self.arithmetic, output, after)
            self._times(tile, ConsecutiveRows(row, row + 1), self._fetch_ahead)

    def _times(self, tile: Tile, rows: TileRows, fetch: Fetch) -> None:
        """Multiply a tile, with weights as they are stored; `fetch` prefetches weights that are needed later."""

        def add(g: Expr) -> None:
            fetch(tile, g)
            tile.add_group(g, rows, lambda n, chunk, piece: self._stored(tile.first_block + n, g, chunk, piece))

        tile.clear()
        if self.kind.is_nested:
            with serial(self.groups // SUPER_SPANS) as s:
                tile.clear_super()
                with serial(SUPER_SPANS) as j:
                    add(s * SUPER_SPANS + j)
                tile.add_super(s, rows)
        else:
            with serial(self.groups) as g:
                add(g)
        tile.finish(rows)

    def _times_unpacked(self, tile: Tile, num_tiles: Expr, rows_of: Callable[[Expr], TileRows]) -> None:
        """Multiply tiles of a block in panels of groups, whose unpacked weights stay in the L1 cache."""
        panel = SUPER_SPANS if self.kind.is_nested else min(PANEL, self.groups)
        num_panels = -(-self.groups // panel)
        unpacked = registers(panel * UNPACKED, "uint8")
        sums = registers(-(-SLAB_ROWS // tile.rows) * tile.size, "float32")

        def begin(p: Expr, t: Expr) -> None:
            with either(p == 0) as (first, later):
                with first:
                    tile.clear()
                with later:
                    tile.load(sums, t)

        with serial(num_panels) as p:
            count = bound(T.min(T.int64(panel), self.groups - p * panel))
            with serial(count) as g:
                self._unpack(unpacked, tile, p * panel + g, g)
            with serial(num_tiles) as t:
                rows = rows_of(t)
                if self.kind.is_nested:  # while groups are added, the sums use no registers
                    tile.clear_super()
                else:
                    begin(p, t)
                with serial(count) as g:
                    self._fetch_in_first_tile(t)(tile, p * panel + g)
                    tile.add_group(p * panel + g, rows, lambda n, *part: unpacked[self._loose(g, *part)])
                if self.kind.is_nested:
                    begin(p, t)
                    tile.add_super(p, rows)
                with either(p == num_panels - 1) as (last, earlier):
                    with last:
                        tile.finish(rows)
                    with earlier:
                        tile.store(sums, t)

    def _fetch_in_first_tile(self, before: Expr) -> Fetch:
        """Return a prefetch of the next weight blocks that only the first tile of rows emits.

        Args:
            before: number of tiles that have read the current blocks already.
        """

        def fetch(tile: Tile, g: Expr) -> None:
            with when(before == 0):
                self._fetch_ahead(tile, g)

        return fetch

    def _lead(self, tile: Tile, g: Expr) -> None:
        """Prefetch weights after each block's group `g`, as the target's CPUs read them fastest for one row.

        Zen 4 prefetches blocks at full speed by itself, except at the beginning of each page: one line of the next page
        is enough, and requests for all lines would displace its own. That is also done for CPUs that were not measured.
        With AVX2 and no AVX-512 (Zen 3) this line costs up to a third of the speed, and requests for all lines a little
        ahead are fastest.
        """
        for n in range(tile.width):
            group = (tile.first_block + n) * self.groups + g
            if self.requests_lines:
                self._fetch_groups(group + AHEAD, 1)
            else:
                prefetch(self.codes, group * self.format.group_bytes + LEAD, 1, 1)

    def _fetch_ahead(self, tile: Tile, g: Expr) -> None:
        """Prefetch as many groups of the next blocks as group `g` of this tile has."""
        self._fetch_groups(tile.next_block * self.groups + g * tile.width, tile.width)

    def _fetch_groups(self, first: Expr, count: int) -> None:
        """Prefetch the codes and scales of `count` groups, of all blocks in order, from `first` on."""
        prefetch(self.codes, first * self.format.group_bytes, count * self.format.group_bytes, 1)
        self.arithmetic.scales.fetch(first, count)

    def _stored(self, block: Expr, g: Expr, chunk: int, piece: int) -> Expr:
        start, size = (block * self.groups + g) * self.format.group_bytes, self.dot.piece_bytes
        return self.format.piece(self.codes, start, chunk, piece * size, size, self.lookups)

    def _loose(self, g: Expr, chunk: int, piece: int) -> Expr:
        """Return the index of a piece of an unpacked chunk."""
        size = self.dot.piece_bytes
        return lanes(g * UNPACKED + chunk * CHUNK + piece * size, size)

    def _unpack(self, unpacked: Memory, tile: Tile, g: Expr, at: Expr) -> None:
        """Unpack group `g` of a tile's block to group `at` of a panel."""
        for chunk, piece in product(range(CHUNKS), range(self.dot.num_pieces)):
            unpacked[self._loose(at, chunk, piece)] = self._stored(tile.first_block, g, chunk, piece)
