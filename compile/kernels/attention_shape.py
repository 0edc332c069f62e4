"""What attention computes of its scores, and how many rows and vectors fit the target's registers at once.

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

_MOST_VECTORS = 4  # of keys or values at once
_MOST_ROWS = 8


@dataclass(frozen=True)
class ScoreSpec:
    """What a score is, which rows have one, and what stands beside the weights in their sum.

    `scale` multiplies the product of query and key; without it that is `key_dim ** -0.5`. `soft_cap` makes
    `soft_cap * tanh(score / soft_cap)` of that (Gemma 2, 2024). `has_sinks`: each query head has a learned score that
    weighs as one more row, which has no value (gpt-oss, 2025). `has_starts`: a token sees its sequence from some row
    on, not from the first.
    """

    scale: float | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    has_starts: bool = False


@dataclass(frozen=True)
class AttentionShape:
    """The heads, what becomes of their scores, and how many rows and vectors the target's registers hold at once."""

    layout: LayerLayout
    num_heads: int
    num_registers: int  # of 16 lanes of float32
    has_fma: bool
    converts_fast: bool  # from what the pool stores to float32
    integer_dot: IntegerDot | None  # how codes are multiplied as they lie in the pool
    scores: ScoreSpec

    @classmethod
    def of(cls, layout: LayerLayout, num_heads: int, target: Target, scores: ScoreSpec | None = None) -> AttentionShape:
        """The shape for a target: AVX-512 has 32 registers, older CPUs 16, of half or a quarter of the size."""
        features = target.features
        num_registers = 32 if "avx512f" in features else 8 if "avx2" in features else 4
        converts_fast = layout.dtype != "f16" or "f16c" in features
        dot = target.integer_dot if layout.has_codes else None
        return cls(layout, num_heads, num_registers, target.has_fma, converts_fast, dot, scores or ScoreSpec())

    @property
    def query_factor(self) -> float:
        """What queries are multiplied by on loading: so that scores are powers of two, or what is capped."""
        scale = self.layout.key_dim**-0.5 if self.scores.scale is None else self.scores.scale
        return scale / (math.log(2) if self.scores.soft_cap is None else self.scores.soft_cap)

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.layout.num_kv_heads

    @property
    def n(self) -> int:
        """Lanes of a vector along a key or a value: the most that divide both."""
        layout = self.layout
        return next(n for n in (LANES, 8, 4, 2, 1) if layout.key_dim % n == layout.value_dim % n == 0)

    @property
    def reads_in_place(self) -> bool:
        """Whether single tokens read the pool itself: values that are a part of the keys lie across."""
        return self.converts_fast and not self.layout.values_in_keys

    @property
    def heads(self) -> Parts:
        """The group's heads, in parts that fit the registers."""
        return Parts.of(self.group, min(_MOST_ROWS, max(1, self.num_registers - 2)))

    @property
    def tokens(self) -> int:
        """Tokens of a micro-tile."""
        rows = 6 if self.num_registers > 4 else 2
        return max(1, rows // self.heads.width)

    def chunks(self, num_rows: int, num_vectors: int) -> Parts:
        """The vectors, in parts whose `num_rows` sums fit the registers beside the vectors and one factor."""
        return Parts.of(num_vectors, max(1, min(_MOST_VECTORS, (self.num_registers - 1) // (num_rows + 1))))


@dataclass(frozen=True)
class Parts:
    """`total` things in parts of `width`; the last part may be smaller."""

    total: int
    width: int

    @classmethod
    def of(cls, total: int, most: int) -> Parts:
        """The fewest parts of at most `most`, all of about the same size."""
        return cls(total, -(-total // -(-total // most)))

    @property
    def number(self) -> int:
        """How many parts."""
        return -(-self.total // self.width)

    def each(self, emit: Callable[[Expr, Expr, int], None]) -> None:
        """Call `emit(index, start, size)` for every part; parts of the same size share the code."""
        whole, rest = divmod(self.total, self.width)
        with serial(whole) as i:
            emit(i, i * self.width, self.width)
        if rest:
            emit(whole, whole * self.width, rest)
