"""Code that the kernels of all matrices share: their spec, the division of work, and the storing of outputs.

A thread takes a span of blocks of outputs and, with many rows, a slab of tiles. Knows nothing of how products are
computed.
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
    """The parameters of a linear kernel. Sizes are padded; `column` and `y_stride` locate the output.

    `wide` tells an integer kernel that activations have 16 bits (see `quantized_rows.py`). `factor` multiplies an
    output with its bias, before it is added to `y`.
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
    """A division of `num_blocks` blocks into spans of `width`; the last one may be narrower."""

    num_blocks: int
    width: int

    @property
    def count(self) -> int:
        """Number of spans."""
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
    """A division of `num_tiles` tiles of rows into the fewest slabs of at most `most` tiles, all about as large."""

    num_tiles: Expr
    most: int

    @property
    def count(self) -> Expr:
        """Number of slabs."""
        return (self.num_tiles + (self.most - 1)) // self.most

    def first_tile(self, slab: Expr) -> Expr:
        """Return the first tile of a slab; its tiles end at the first tile of the next slab."""
        return slab * self.num_tiles // self.count

    def tiles(self, slab: Expr) -> Expr:
        """Return the number of tiles of a slab."""
        return self.first_tile(slab + 1) - self.first_tile(slab)


class TileRows(Protocol):
    """The rows of a tile: their positions in the input and the output, and whether they are stored."""

    def x(self, m: int) -> Expr:
        """Return the input row of tile row `m`."""
        ...

    def y(self, m: int) -> Expr:
        """Return the output row of tile row `m`."""
        ...

    def is_wanted(self, m: int) -> Expr:
        """Return whether tile row `m` is stored, and not padding of the last tile."""
        ...


@dataclass(frozen=True)
class ConsecutiveRows:
    """Consecutive rows from `first` on; rows from `stop` on are padding."""

    first: Expr
    stop: Expr

    def x(self, m: int) -> Expr:
        """Return the input row of tile row `m`."""
        return self.first + m

    def y(self, m: int) -> Expr:
        """Return the output row of tile row `m`."""
        return self.first + m

    def is_wanted(self, m: int) -> Expr:
        """Return whether tile row `m` is stored."""
        return self.first + m < self.stop


def finish(spec: LinearSpec, value: Expr, bias: Memory, y: Memory, row: Expr, block: Expr, stored_block: Expr) -> None:
    """Store a block of outputs of a row, with the bias, the factor and the addition to `y` that the spec says.

    `stored_block` is the block's index among those of all experts; without experts it is `block`.
    """
    where = lanes(row * spec.y_stride + spec.column + block * ROW_BLOCK)
    if spec.has_bias:
        value = value + bias[lanes(stored_block * ROW_BLOCK)]
    if spec.factor != 1:
        value = value * const(spec.factor)
    if spec.add_to_output:
        value = value + y[where]
    y[where] = value
