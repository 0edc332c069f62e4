"""Reduce the lanes of one vector to a number, or those of several vectors at once; always halves first.

A vector reduced alone is a chain of shuffles, each waiting for the one before. Several vectors are folded in pairs into
one that holds half of each, so that every instruction works on lanes of many vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
from tvm.script import tirx as T

from .builder import bound, registers
from .vector import LANES, Expr, lanes

_SHUFFLED = 4  # number of lanes that every x86 shuffles in one instruction


def max_of_lanes(value: Expr, dtype: str = "float32") -> Expr:
    """Return the largest of 16 lanes. LLVM's own reduction handles NaNs, which doubles the instructions."""
    return _halved(value, T.max, dtype)


def sum_of_lanes(value: Expr) -> Expr:
    """Return the sum of 16 float32 lanes: lanes i and i + 8, then i and i + 4, and so on, on every target."""
    return _halved(value, lambda a, b: a + b, "float32")


def _halved(value: Expr, join: Callable[[Expr, Expr], Expr], dtype: str) -> Expr:
    """Join the lower with the upper half of 16 lanes, and so on, down to one lane."""
    parts, n = registers(LANES, dtype), LANES
    parts[lanes(0)] = value
    while n > 1:
        n //= 2
        parts[lanes(0, n)] = join(parts[lanes(0, n)], parts[lanes(n, n)])
    return parts[0]


@dataclass(frozen=True)
class Reduction:
    """A vector with one lane for each source; source i is in lane `lane_of[i]`, an order that is cheap to compute."""

    vector: Expr
    num_lanes: int
    lane_of: tuple[int, ...]


def reduce_each(vectors: Sequence[Expr], combine: Callable[[Expr, Expr], Expr]) -> Reduction:
    """Reduce each vector of 16 lanes by a commutative operation, always in the same order.

    Args:
        vectors: 1 to 16 vectors. From 2 on, the last one is repeated up to the next power of two.
        combine: the operation, of two vectors.
    """
    count = 1 << max(1, (len(vectors) - 1).bit_length())
    sources = [min(i, len(vectors) - 1) for i in range(count)]
    parts = [(bound(vectors[i]), [i] * LANES) for i in sources]
    run = LANES  # number of neighbouring lanes that belong to one source
    while run > 1:
        pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
        parts = [_folded([v for v, _ in pair], [labels for _, labels in pair], run, combine) for pair in pairs]
        run //= 2
    [(vector, labels)] = parts
    return Reduction(vector, count, tuple(labels.index(i) for i in range(len(vectors))))


def _folded(
    vectors: list[Expr], labels: list[list[int]], run: int, combine: Callable[[Expr, Expr], Expr]
) -> tuple[Expr, list[int]]:
    """Combine the first halves of all runs with their second halves. Returns one vector and its lanes' labels."""
    num_lanes = len(labels[0])
    step = max(run, min(_SHUFFLED, num_lanes))
    first = [
        v * num_lanes + start + i
        for chunk in _chunks(len(vectors), num_lanes, step)
        for v, start in chunk
        for i in range(step)
        if i % run < run // 2
    ]
    flat = [label for of_one in labels for label in of_one]
    halves = [tvm.tirx.Shuffle(vectors, [i + offset for i in first]) for offset in (0, run // 2)]
    return bound(combine(*halves)), [flat[i] for i in first]


def _chunks(num_vectors: int, num_lanes: int, step: int) -> list[list[tuple[int, int]]]:
    """Return the order in which parts of `step` lanes are taken: long ones by vector, short ones alternating."""
    if step > _SHUFFLED:
        return [[(v, start)] for v in range(num_vectors) for start in range(0, num_lanes, step)]
    return [[(v, start) for v in range(num_vectors)] for start in range(0, num_lanes, step)]
