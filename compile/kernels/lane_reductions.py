"""One number from each of several vectors: their lanes are added, or compared, together.

Reducing a vector by itself is shuffles, each waiting for the one before it. Two vectors are folded into one that holds
half of each, and so on, so that every instruction works on lanes of many vectors. Knows no types and no operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm

from .builder import bound
from .vector import LANES, Expr

_SHUFFLED = 4  # lanes that every x86 shuffles among themselves in one instruction


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
    lanes = len(labels[0])
    step = max(run, min(_SHUFFLED, lanes))
    first = [
        v * lanes + start + i
        for chunk in _chunks(len(vectors), lanes, step)
        for v, start in chunk
        for i in range(step)
        if i % run < run // 2
    ]
    flat = [label for of_one in labels for label in of_one]
    halves = [tvm.tirx.Shuffle(vectors, [i + offset for i in first]) for offset in (0, run // 2)]
    return bound(combine(*halves)), [flat[i] for i in first]


def _chunks(num_vectors: int, lanes: int, step: int) -> list[list[tuple[int, int]]]:
    """In which order parts of `step` lanes are taken: long ones vector by vector, short ones from both in turn."""
    if step > _SHUFFLED:
        return [[(v, start)] for v in range(num_vectors) for start in range(0, lanes, step)]
    return [[(v, start) for v in range(num_vectors)] for start in range(0, lanes, step)]
