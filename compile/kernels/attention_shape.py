"""Shape of attention: the formula of its scores, and how many rows and vectors fit the registers at once.

A row is one query head of one token. Knows nothing of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from radixlm.runtime.artifact.manifest import LayerLayout

from ..codegen.builder import serial
from ..codegen.targets import IntegerDot, Target
from ..codegen.vector import LANES, Expr

_MOST_VECTORS = 4  # of keys or values, in registers at once
_MOST_ROWS = 8


@dataclass(frozen=True)
class ScoreSpec:
    """The formula of a score, the rows that have one, and additional terms of the weighted sum.

    `scale` multiplies the product of query and key; None means `key_dim ** -0.5`. `soft_cap` replaces the result by
    `soft_cap * tanh(score / soft_cap)` (Gemma 2, 2024). `has_sinks`: each query head has a learned score that counts as
    one more row, without a value (gpt-oss, 2025). `has_starts`: a token sees its sequence from some row on, not from
    the first.
    """

    scale: float | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    has_starts: bool = False


@dataclass(frozen=True)
class AttentionShape:
    """The heads, the formula of their scores, and how many rows and vectors the target's registers hold at once."""

    layout: LayerLayout
    num_heads: int
    num_registers: int  # number of vectors of 16 float32
    has_fma: bool
    converts_fast: bool  # true if the pool's numbers convert quickly to float32
    integer_dot: IntegerDot | None  # the product of codes read directly from the pool; None if they are not codes
    scores: ScoreSpec

    @classmethod
    def of(cls, layout: LayerLayout, num_heads: int, target: Target, scores: ScoreSpec | None = None) -> AttentionShape:
        """Return the shape for a target."""
        converts_fast = layout.dtype != "f16" or target.has_f16c
        dot = target.integer_dot if layout.has_codes else None
        return cls(layout, num_heads, target.num_registers, target.has_fma, converts_fast, dot, scores or ScoreSpec())

    @property
    def query_factor(self) -> float:
        """Factor of queries on loading: it makes scores exponents of two, or arguments of the soft cap."""
        scale = self.layout.key_dim**-0.5 if self.scores.scale is None else self.scores.scale
        return scale / (math.log(2) if self.scores.soft_cap is None else self.scores.soft_cap)

    @property
    def group(self) -> int:
        """Number of query heads that share a KV head."""
        return self.num_heads // self.layout.num_kv_heads

    @property
    def n(self) -> int:
        """Number of lanes of a vector along a key or a value: the largest that divides both."""
        layout = self.layout
        return next(n for n in (LANES, 8, 4, 2, 1) if layout.key_dim % n == layout.value_dim % n == 0)

    @property
    def reads_in_place(self) -> bool:
        """True if single tokens read the pool itself. Values that are a part of the keys are transposed, so copied."""
        return self.converts_fast and not self.layout.values_in_keys

    @property
    def heads(self) -> Partition:
        """The group's heads, divided into parts that fit the registers."""
        return Partition.of(self.group, min(_MOST_ROWS, max(1, self.num_registers - 2)))

    @property
    def tokens(self) -> int:
        """Number of tokens of a micro-tile."""
        rows = 6 if self.num_registers > 4 else 2
        return max(1, rows // self.heads.width)

    def chunks(self, num_rows: int, num_vectors: int) -> Partition:
        """Return the vectors, in parts whose `num_rows` sums fit the registers with the vectors and one factor."""
        return Partition.of(num_vectors, max(1, min(_MOST_VECTORS, (self.num_registers - 1) // (num_rows + 1))))


@dataclass(frozen=True)
class Partition:
    """A division of `total` items into parts of `width`; the last part may be smaller."""

    total: int
    width: int

    @classmethod
    def of(cls, total: int, most: int) -> Partition:
        """Return the fewest parts of at most `most` items, all of about the same size."""
        return cls(total, -(-total // -(-total // most)))

    @property
    def number(self) -> int:
        """Number of parts."""
        return -(-self.total // self.width)

    def each(self, emit: Callable[[Expr, Expr, int], None]) -> None:
        """Call `emit(index, start, size)` for every part; parts of the same size share the code."""
        whole, rest = divmod(self.total, self.width)
        with serial(whole) as i:
            emit(i, i * self.width, self.width)
        if rest:
            emit(whole, whole * self.width, rest)
