"""The rows of a step whose outputs are requested: copies of them, and where outputs go.

Knows no weights.
"""

from __future__ import annotations

from collections.abc import Hashable

from ..kernels.activation import gather_rows
from ..weights.layout import ROW_BLOCK, round_up
from .program import Argument, Input, Limits, Program, RowBuffer, Size


class WantedRows:
    """Appends to `program` the kernels that pick rows, and allocates rows of as many."""

    def __init__(self, program: Program, limits: Limits) -> None:
        self._program, self._limits = program, limits

    def rows(self, role: Hashable, width: int, memory: Argument | None = None) -> RowBuffer:
        """Return rows in `memory`, or in the workspace's memory for the role."""
        stride, most = round_up(width, ROW_BLOCK), self._limits.num_logits
        if memory is None:
            memory = self._program.scratch(role, most * stride * 4)
        return RowBuffer(memory, stride, (0,), Size("num_logits"), most)

    def outputs(self, width: int) -> RowBuffer:
        """Return rows in the place of logits."""
        return self.rows("logits", width, Input("logits"))

    def picked(self, x: RowBuffer, memory: Argument | None = None) -> RowBuffer:
        """Return copies of the wanted rows of `x`."""
        picked = self.rows("picked", x.stride, memory)
        self._program.call(
            ("gather_rows", x.stride),
            lambda: gather_rows(x.stride),
            x.memory,
            Input("logit_rows"),
            picked.memory,
            picked.num_rows,
        )
        return picked
