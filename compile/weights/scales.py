"""Read the scales, minima and zeros of a matrix in a kernel, from the layout of `layout.py`."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from ..codegen.builder import Memory, prefetch
from ..codegen.vector import LANES, Expr, lanes, splat, to_f32, vector_type
from .kinds import HALF_E4M3, SUPER_GROUP, WeightKind
from .layout import GROUP, ROW_BLOCK

_SUPER_BYTES = 2 * ROW_BLOCK  # float16


def scale_dtypes(kind: WeightKind) -> dict[str, str]:
    """Return the element types of a kernel's buffers of scales and offsets."""
    is_f16 = kind.scales is None or (kind.scales.dtype == "f16" and not kind.is_nested)
    return {
        "scales": "float16" if is_f16 else "uint8",
        "offsets": "uint8" if kind.is_nested or kind.has_zeros else "float16",
    }


@dataclass(frozen=True)
class WeightScales:
    """Scales of a matrix of blocks with `num_inputs` inputs.

    Groups are counted within a block, by their kind's size. Results are for `n` outputs of a block from `lane` on: all,
    or one.
    """

    kind: WeightKind
    scales: Memory
    offsets: Memory
    num_inputs: int
    has_f16c: bool = True

    @property
    def num_groups(self) -> int:
        """Number of groups of a row."""
        return -(-self.num_inputs // self.kind.group)

    def scale(self, block: Expr, group: Expr, lane: Expr = 0, n: int = LANES) -> Expr:
        """Return scales as float32; nested ones without the factor of their super-group."""
        assert self.kind.scales is not None
        if self.kind.is_nested:
            return self._sub(self.scales, block, group, lane, n)
        stored = self.scales[self._at(block, group, lane, n)]
        if self.kind.scales.dtype == "f16":
            return self._f32(stored, n)
        if self.kind.scales.dtype == "e8m0":
            bits = T.shift_left(T.Cast(vector_type("uint32", n), stored), splat(T.uint32(23), n))
            return T.reinterpret(vector_type("float32", n), bits)
        half = T.shift_left(T.Cast(vector_type("uint16", n), stored), splat(T.uint16(7), n))
        half = T.reinterpret(vector_type("float16", n), half)
        return self._f32(half, n) * splat(T.float32(HALF_E4M3), n)

    def minimum(self, block: Expr, group: Expr, lane: Expr = 0, n: int = LANES) -> Expr:
        """Return minima as float32; nested ones without the factor of their super-group."""
        if self.kind.is_nested:
            return self._sub(self.offsets, block, group, lane, n)
        return self._f32(self.offsets[self._at(block, group, lane, n)], n)

    def zero(self, block: Expr, group: Expr, lane: Expr = 0, n: int = LANES) -> Expr:
        """Return the integers that represent 0.0, as float32."""
        return T.Cast(vector_type("float32", n), self.offsets[self._at(block, group, lane, n)])

    def super_scale(self, block: Expr, group: Expr, lane: Expr = 0, n: int = LANES) -> Expr:
        """Return the factor of the nested scales of a super-group."""
        return self._super(self.scales, block, group, lane, n)

    def super_minimum(self, block: Expr, group: Expr, lane: Expr = 0, n: int = LANES) -> Expr:
        """Return the factor of the nested minima of a super-group."""
        return self._super(self.offsets, block, group, lane, n)

    def fetch(self, span: Expr, num_spans: int) -> None:
        """Prefetch the scales of `num_spans` spans of `GROUP` inputs from `span` on, counted over all blocks."""
        dtypes = scale_dtypes(self.kind)
        self._fetch(self.scales, dtypes["scales"], span, num_spans)
        if self.kind.has_minimum or self.kind.has_zeros:
            self._fetch(self.offsets, dtypes["offsets"], span, num_spans)

    def _fetch(self, memory: Memory, dtype: str, span: Expr, num_spans: int) -> None:
        """Prefetch the bytes of one array for some spans."""
        per_span = ROW_BLOCK * GROUP // self.kind.group
        if self.kind.is_nested:
            per_span += _SUPER_BYTES * GROUP // SUPER_GROUP
        itemsize = 2 if dtype == "float16" else 1
        prefetch(memory, span * per_span, num_spans * per_span * itemsize, itemsize)

    def _at(self, block: Expr, group: Expr, lane: Expr, n: int) -> Expr:
        """Return the index of a group's numbers."""
        return lanes((block * self.num_groups + group) * ROW_BLOCK + lane, n)

    def _f32(self, stored: Expr, n: int) -> Expr:
        """Return stored float16 as float32."""
        return to_f32(stored, "float16", n, has_f16c=self.has_f16c)

    @property
    def _groups_of_super(self) -> int:
        """Number of groups of a super-group."""
        return SUPER_GROUP // self.kind.group

    def _record(self, block: Expr, group: Expr) -> Expr:
        """Return the index of the record of a group's super-group."""
        size = _SUPER_BYTES + self._groups_of_super * ROW_BLOCK
        return (block * (self.num_inputs // SUPER_GROUP) + group // self._groups_of_super) * size

    def _sub(self, memory: Memory, block: Expr, group: Expr, lane: Expr, n: int) -> Expr:
        """Return the nested scales or minima of a group, as float32."""
        at = self._record(block, group) + _SUPER_BYTES + group % self._groups_of_super * ROW_BLOCK + lane
        return T.Cast(vector_type("float32", n), T.reinterpret(vector_type("int8", n), memory[lanes(at, n)]))

    def _super(self, memory: Memory, block: Expr, group: Expr, lane: Expr, n: int) -> Expr:
        """Return the scales or minima of a group's super-group, as float32."""
        stored = memory[lanes(self._record(block, group) + lane * 2, 2 * n)]
        return self._f32(T.reinterpret(vector_type("float16", n), stored), n)
