"""How attention is cut to fit a target's registers: heads, tokens and vectors that are worked on at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from radixlm.runtime.artifact.manifest import KVLayout

from ..targets import Target
from .builder import serial
from .vector import LANES, Expr

_MOST_VECTORS = 4  # of keys or values at once
_MOST_ROWS = 8


@dataclass(frozen=True)
class AttentionShape:
    """Heads and tokens of a micro-tile: the rows (a query head of a token each) whose sums are in registers at once."""

    layout: KVLayout
    num_heads: int
    num_registers: int  # of 16 lanes of float32
    has_fma: bool
    converts_fast: bool  # from what the pool stores to float32

    @classmethod
    def of(cls, layout: KVLayout, num_heads: int, target: Target) -> AttentionShape:
        """For a target: AVX-512 has 32 registers, older CPUs 16, of half and a quarter of the size."""
        features = target.features
        num_registers = 32 if "avx512f" in features else 8 if "avx2" in features else 4
        converts_fast = layout.dtype != "f16" or "f16c" in features
        return cls(layout, num_heads, num_registers, target.has_fma, converts_fast)

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.layout.num_kv_heads

    @property
    def n(self) -> int:
        """Lanes of a vector along a value: as many as divide it."""
        return next(n for n in (LANES, 8, 4, 2, 1) if self.layout.head_dim % n == 0)

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
        """The vectors in parts: of each `num_rows` sums are in registers, the vectors themselves and a factor too."""
        return Parts.of(num_vectors, max(1, min(_MOST_VECTORS, (self.num_registers - 1) // (num_rows + 1))))


@dataclass(frozen=True)
class Parts:
    """`total` things in parts of `width`; the last may be smaller."""

    total: int
    width: int

    @classmethod
    def of(cls, total: int, most: int) -> Parts:
        """In as few parts of at most `most` as it takes, of about the same size."""
        return cls(total, -(-total // -(-total // most)))

    @property
    def number(self) -> int:
        """How many parts."""
        return -(-self.total // self.width)

    def each(self, emit: Callable[[Expr, Expr, int], None]) -> None:
        """`emit(index, start, size)` for every part; those of the same size share the code."""
        whole, rest = divmod(self.total, self.width)
        with serial(whole) as i:
            emit(i, i * self.width, self.width)
        if rest:
            emit(whole, whole * self.width, rest)
