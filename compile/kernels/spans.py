"""A matrix cut into what one thread computes at once: spans of blocks of outputs, slabs of tiles of rows.

Knows how many there are and how an output ends, not how it is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .builder import Memory, either
from .layout import ROW_BLOCK, LinearSpec
from .vector import Expr, lanes


@dataclass(frozen=True)
class Spans:
    """`num_blocks` blocks in spans of `width`; the last one may be narrower."""

    num_blocks: int
    width: int

    @property
    def count(self) -> int:
        """How many spans."""
        return -(-self.num_blocks // self.width)

    def each_width(self, span: Expr, emit: Callable[[int], None]) -> None:
        """Emit a body for spans of whole width, and one for the last if it is narrower; `emit` takes the width."""
        rest = self.num_blocks % self.width
        if rest == 0:
            emit(self.width)
        elif self.num_blocks < self.width:
            emit(rest)
        else:
            with either(span < self.num_blocks // self.width) as (whole, last):
                with whole:
                    emit(self.width)
                with last:
                    emit(rest)


@dataclass(frozen=True)
class Slabs:
    """`num_tiles` tiles of rows in the fewest slabs of at most `most` tiles, as even as can be."""

    num_tiles: Expr
    most: int

    @property
    def count(self) -> Expr:
        """How many slabs."""
        return (self.num_tiles + (self.most - 1)) // self.most

    def first_tile(self, slab: Expr) -> Expr:
        """The tile that a slab begins with; a slab's tiles end where the next one's begin."""
        return slab * self.num_tiles // self.count

    def tiles(self, slab: Expr) -> Expr:
        """How many tiles a slab has."""
        return self.first_tile(slab + 1) - self.first_tile(slab)


def finish(spec: LinearSpec, value: Expr, bias: Memory, y: Memory, row: Expr, block: Expr) -> None:
    """Add what the spec adds, and store a block of outputs of a row."""
    where = lanes(row * spec.y_stride + spec.column + block * ROW_BLOCK)
    if spec.has_bias:
        value = value + bias[lanes(block * ROW_BLOCK)]
    if spec.add_to_output:
        value = value + y[where]
    y[where] = value
