"""One number from the lanes of a vector, or from those of each of several vectors together; always halves first.

Reducing a vector by itself is shuffles, each waiting for the one before it. Two vectors are folded into one that holds
half of each, and so on, so that every instruction works on lanes of many vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
from tvm.script import tirx as T

from .builder import bound, registers
from .vector import LANES, Expr, lanes

_SHUFFLED = 4  # lanes that every x86 shuffles among themselves in one instruction


def max_of_lanes(value: Expr, dtype: str = "float32") -> Expr:
    """The largest of 16 lanes. LLVM's own reduction minds NaNs, which costs twice the instructions."""
    return _halved(value, T.max, dtype)


def sum_of_lanes(value: Expr) -> Expr:
    """The sum of 16 float32 lanes: lane i and i + 8, then i and i + 4, and so on, on every target."""
    return _halved(value, lambda a, b: a + b, "float32")


def _halved(value: Expr, join: Callable[[Expr, Expr], Expr], dtype: str) -> Expr:
    parts, n = registers(LANES, dtype), LANES
    parts[lanes(0)] = value
    while n > 1:
        n //= 2
        parts[lanes(0, n)] = join(parts[lanes(0, n)], parts[lanes(n, n)])
    return parts[0]


@dataclass(frozen=True)
class Reduced:
    """A vector with one lane for each of the sources, in an order that came cheap: source i is lane `lane_of[i]`."""

    vector: Expr
    num_lanes: int
    lane_of: tuple[int, ...]


def reduce_each(vectors: Sequence[Expr], combine: Callable[[Expr, Expr], Expr]) -> Reduced:
    """Reduce each vector of 16 lanes by a commutative operation, always in the same order.

    Args:
        vectors: 1 to 16 of them; up to the next power of two, from 2 on, the last one is repeated.
        combine: the operation, of two vectors.
    """
    count = 1 << max(1, (len(vectors) - 1).bit_length())
    sources = [min(i, len(vectors) - 1) for i in range(count)]
    parts = [(bound(vectors[i]), [i] * LANES) for i in sources]
    run = LANES  # neighbouring lanes of one source
    while run > 1:
        pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
        parts = [_folded([v for v, _ in pair], [labels for _, labels in pair], run, combine) for pair in pairs]
        run //= 2
    [(vector, labels)] = parts
    return Reduced(vector, count, tuple(labels.index(i) for i in range(len(vectors))))


def _folded(
    vectors: list[Expr], labels: list[list[int]], run: int, combine: Callable[[Expr, Expr], Expr]
) -> tuple[Expr, list[int]]:
    """One vector with the first halves of all runs combined with their second halves."""
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
    """In which order parts of `step` lanes are taken: long ones vector by vector, short ones from both in turn."""
    if step > _SHUFFLED:
        return [[(v, start)] for v in range(num_vectors) for start in range(0, num_lanes, step)]
    return [[(v, start) for v in range(num_vectors)] for start in range(0, num_lanes, step)]
