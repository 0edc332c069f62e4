"""What the kernels of all matrices share: their spec, how the work is cut for threads, and how an output ends.

A thread takes a span of blocks of outputs, and of many rows a slab of tiles. Knows nothing of how
products are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..codegen.builder import Memory, either
from ..codegen.vector import Expr, const, lanes
from ..weights.kinds import WeightKind
from ..weights.layout import ROW_BLOCK


@dataclass(frozen=True)
class LinearSpec:
    """All that a linear kernel is specialized to. Sizes are padded; `column` and `y_stride` place the output.

    `wide` tells an integer kernel that activations come in 16 bits (see `quantized_rows.py`). `factor` multiplies an
    output with its bias, before what is there is added.
    """

    kind: WeightKind
    num_outputs: int
    num_inputs: int
    y_stride: int
    column: int = 0
    has_bias: bool = False
    add_to_output: bool = False
    wide: bool = False
    factor: float = 1.0


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
    """`num_tiles` tiles of rows in the fewest slabs of at most `most` tiles, all of about the same size."""

    num_tiles: Expr
    most: int

    @property
    def count(self) -> Expr:
        """How many slabs."""
        return (self.num_tiles + (self.most - 1)) // self.most

    def first_tile(self, slab: Expr) -> Expr:
        """The first tile of a slab; its tiles end where those of the next slab begin."""
        return slab * self.num_tiles // self.count

    def tiles(self, slab: Expr) -> Expr:
        """How many tiles a slab has."""
        return self.first_tile(slab + 1) - self.first_tile(slab)


class TileRows(Protocol):
    """The rows of a tile: where the m-th one lies in what is read and in what is written, and whether to write it."""

    def x(self, m: int) -> Expr:
        """Its row of activations."""
        ...

    def y(self, m: int) -> Expr:
        """Its row of outputs."""
        ...

    def is_wanted(self, m: int) -> Expr:
        """Whether it is a row of its own, and no filling of the last tile."""
        ...


@dataclass(frozen=True)
class Neighbours:
    """Rows from `first` on, as far as there are any before `stop`."""

    first: Expr
    stop: Expr

    def x(self, m: int) -> Expr:
        """See `TileRows`."""
        return self.first + m

    def y(self, m: int) -> Expr:
        """See `TileRows`."""
        return self.first + m

    def is_wanted(self, m: int) -> Expr:
        """See `TileRows`."""
        return self.first + m < self.stop


def finish(spec: LinearSpec, value: Expr, bias: Memory, y: Memory, row: Expr, block: Expr, stored_block: Expr) -> None:
    """Store a block of outputs of a row, with the bias, the factor and what is in `y` as the spec says.

    `stored_block` is the block's number among those of all experts; without experts it is `block`.
    """
    where = lanes(row * spec.y_stride + spec.column + block * ROW_BLOCK)
    if spec.has_bias:
        value = value + bias[lanes(stored_block * ROW_BLOCK)]
    if spec.factor != 1:
        value = value * const(spec.factor)
    if spec.add_to_output:
        value = value + y[where]
    y[where] = value
