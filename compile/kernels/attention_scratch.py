"""What attention keeps of rows (query heads of a token each) while it walks the spans, in one piece of memory.

One piece, because each that TVM's pool gives takes as long as a hundred multiplications.
"""

from __future__ import annotations

from dataclasses import dataclass

from .builder import Memory
from .kv_span import SPAN
from .vector import LANES, Expr


@dataclass(frozen=True)
class RowState:
    """What rows have seen so far, from `memory[base]` on: `[rows, head_dim]` outputs that are not yet divided,
    `[rows, 16]` sums of weights, lane by lane, and `[micro-tiles, 16]` maxima."""

    head_dim: int
    num_rows: int
    num_micros: int
    memory: Memory
    base: Expr = 0

    def output(self, row: Expr) -> Expr:
        """Index of a row's output."""
        return self.base + row * self.head_dim

    def sums(self, row: Expr) -> Expr:
        """Index of a row's 16 sums."""
        return self.base + self.num_rows * self.head_dim + row * LANES

    def maxima(self, micro: Expr) -> Expr:
        """Index of the maxima of up to 16 rows of a micro-tile."""
        return self.base + self.num_rows * (self.head_dim + LANES) + micro * LANES

    @property
    def floats(self) -> int:
        """float32 that it takes."""
        return self.num_rows * (self.head_dim + LANES) + self.num_micros * LANES


@dataclass(frozen=True)
class RowScratch:
    """The state first, then what is needed within a span: `[rows, head_dim]` queries, `[rows, SPAN]` weights (first
    scores), `[rows, 16]` sums and `[micro-tiles, 16]` maxima of the span."""

    state: RowState

    @property
    def memory(self) -> Memory:
        return self.state.memory

    def query(self, row: Expr) -> Expr:
        """Index of a row's query."""
        return self.state.floats + row * self.state.head_dim

    def weights(self, row: Expr) -> Expr:
        """Index of a row's weights."""
        return self.state.floats + self.state.num_rows * self.state.head_dim + row * SPAN

    def span_sums(self, row: Expr) -> Expr:
        """Index of the 16 sums of a row's weights."""
        return self.weights(self.state.num_rows) + row * LANES

    def span_maxima(self, micro: Expr) -> Expr:
        """Index of the maxima of up to 16 rows of a micro-tile."""
        return self.span_sums(self.state.num_rows) + micro * LANES

    @property
    def floats(self) -> int:
        """float32 that it takes."""
        return int(self.span_maxima(self.state.num_micros))
