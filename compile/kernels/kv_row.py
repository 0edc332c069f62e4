"""A token's key or value of one KV head, on its way into the pool: float32 as it is, or rounded to float16, or to int8
with a scale.

Knows how numbers are stored, not where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from radixlm.runtime.artifact.manifest import PAGE_SIZE, SCALE_BYTES
from tvm.script.ir_builder import tirx as T

from .builder import Memory, bound, registers, serial
from .lane_reductions import max_of_lanes
from .layout import round_up
from .pages import KV_DTYPES, PagedPool
from .vector import LANES, Expr, const, lanes, splat, vector_type

LIMIT = 127  # codes are in -LIMIT..LIMIT
LEAST = 1e-30  # the largest magnitude of a row counts as this at least, so that its inverse is finite
_ROUNDING = 1.5 * 2**23  # a float32 plus this has the nearest integer (of ties the even one) in its low bits


@dataclass(frozen=True)
class KVRow:
    """The row of `token` among the keys or values of a head in a page, which begin at index `start`."""

    paged: PagedPool
    start: Expr
    token: Expr
    transposed: bool
    floats: Memory | None

    @classmethod
    def of_key(cls, paged: PagedPool, start: Expr, token: Expr) -> Self:
        """A row of the keys that begin at index `start`."""
        return cls(paged, start, token, True, _scratch(paged))

    @classmethod
    def of_value(cls, paged: PagedPool, start: Expr, token: Expr) -> Self:
        """A row of the values that begin at index `start`."""
        return cls(paged, start, token, False, _scratch(paged))

    def put(self, i: int, value: Expr, n: int) -> None:
        """Elements `[i, i + n)`, float32."""
        if self.floats is not None:
            self.floats[lanes(i, n)] = value
            return
        dtype = KV_DTYPES[self.paged.layout.dtype]
        stored = value if dtype == "float32" else T.Cast(vector_type(dtype, n), value)
        where, step = self._at(i), PAGE_SIZE if self.transposed else 1
        self.paged.pool[T.ramp(where, step, n) if n > 1 else where] = stored

    def finish(self) -> None:
        """All elements were put.

        The scale of int8 is the largest magnitude over 127. A row that holds a NaN or an infinity gets such a
        scale, so that whoever sees the row gets NaN.
        """
        if self.floats is None:
            return
        pool, head_dim = self.paged.pool, self.paged.layout.head_dim
        largest = bound(_largest_magnitude(self.floats, head_dim))
        inverse = bound(T.float32(LIMIT) / largest)
        scale = T.reinterpret(vector_type("int8", SCALE_BYTES), largest * T.float32(1 / LIMIT))
        pool[lanes(self.paged.scale(self.start, self.token), SCALE_BYTES)] = scale
        codes = registers(round_up(head_dim, LANES), "int8")
        for i in range(0, head_dim, LANES):
            rounded = T.reinterpret("int32x16", self.floats[lanes(i)] * splat(inverse) + const(_ROUNDING))
            codes[lanes(i)] = T.Cast("int8x16", rounded)
        with serial(head_dim) as j:
            pool[self._at(j)] = codes[j]

    def _at(self, i: Expr) -> Expr:
        if self.transposed:
            return self.start + i * PAGE_SIZE + self.token
        return self.start + self.token * self.paged.layout.head_dim + i


def _scratch(paged: PagedPool) -> Memory | None:
    """Where a row waits until its largest magnitude is known; zeros behind it."""
    if not paged.layout.has_scales:
        return None
    size = round_up(paged.layout.head_dim, LANES)
    floats = registers(size, "float32")
    floats[lanes(size - LANES)] = const(0)
    return floats


def _largest_magnitude(floats: Memory, head_dim: int) -> Expr:
    """Of all elements. Compared as integers, in whose order infinity and NaN come last."""
    largest = registers(LANES, "int32")
    largest[lanes(0)] = splat(T.reinterpret("int32", T.float32(LEAST)))
    for i in range(0, head_dim, LANES):
        magnitude = T.bitwise_and(T.reinterpret("int32x16", floats[lanes(i)]), splat(T.int32(0x7FFFFFFF)))
        largest[lanes(0)] = T.max(largest[lanes(0)], magnitude)
    return T.reinterpret("float32", max_of_lanes(largest[lanes(0)], "int32"))
