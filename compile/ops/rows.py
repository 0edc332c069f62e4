"""What a model file hands from one operation to the next: rows of numbers, and functions of rows that run later.

Knows places in memory and sizes, not kernels.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from ..kernels.activation import Function, Gate
from ..weights.layout import ROW_BLOCK, round_up
from .program import Argument, Place, Program, Size


@dataclass(frozen=True)
class Limits:
    """The most that one forward takes."""

    num_tokens: int
    num_logits: int
    context_length: int


@dataclass(frozen=True)
class Rows:
    """float32 `[rows, stride]` in the workspace (or the logits); `columns` are where joined outputs begin."""

    memory: Argument
    stride: int
    columns: tuple[int, ...]
    num_rows: Size
    max_rows: int

    @classmethod
    def of_tokens(
        cls, program: Program, limits: Limits, role: Hashable, width: int, columns: tuple[int, ...] = (0,)
    ) -> Rows:
        """A row for each token of the step, in the workspace's place for `role` and width."""
        stride, most = round_up(width, ROW_BLOCK), limits.num_tokens
        return cls(program.place((role, stride), most * stride * 4), stride, columns, Size("num_tokens"), most)


@dataclass(frozen=True)
class Gates:
    """What multiplies an activation: a function of other rows, whose `column` on holds a gate for `width` elements."""

    function: Gate
    rows: Rows
    column: int = 0
    width: int = 1


@dataclass
class Activation:
    """A function of rows. It is computed when a linear needs it, as floats or as codes.

    `gain` is a norm's, 0 if it has none; with `has_bias`, the bias stands behind it.
    """

    function: Function
    rows: Rows
    width: int
    gain: Argument
    eps: float
    floats: Place | None = None
    codes: dict[bool, tuple[Place, Place, Place]] = field(default_factory=dict)  # by whether they are wide
    role: Hashable = ""  # activations of different roles have places of their own
    has_bias: bool = False
    gates: Gates | None = None

    @property
    def is_rows(self) -> bool:
        """Whether nothing is to be computed."""
        return self.function == "identity" and self.gates is None

    @property
    def float_stride(self) -> int:
        """Numbers from one row of the result to the next, where it is floats."""
        return self.rows.stride if self.is_rows else round_up(self.width, ROW_BLOCK)
