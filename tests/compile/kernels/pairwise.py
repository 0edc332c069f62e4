"""Tables of kernel specs in which every pair of values occurs, so that few builds meet every two features together.

Each spec is a build by LLVM of up to a second. Tests take specs from such a table and let Hypothesis vary what costs no
build: numbers, rows, lengths of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(**dimensions: Sequence[Any]) -> list[dict[str, Any]]:
    """Return rows in which every pair of values of two dimensions occurs at least once.

    The search is greedy and the same in every run. Each row begins with the first pair that has not occurred. It takes
    of each other dimension the value that adds the most new pairs; on ties the least used one. There are about as many
    rows as the two largest dimensions have pairs.
    """
    names = list(dimensions)
    missing = {
        ((one, a), (other, b)): None  # a dict keeps the order, a set would not
        for one, other in combinations(names, 2)
        for a, b in product(range(len(dimensions[one])), range(len(dimensions[other])))
    }
    uses = {(name, index): 0 for name in names for index in range(len(dimensions[name]))}
    rows = []
    while missing:
        chosen = dict(next(iter(missing)))
        for name in names:
            if name not in chosen:
                ranks = []
                for index in range(len(dimensions[name])):
                    new = [pair for pair in _pairs(names, {**chosen, name: index}) if pair in missing]
                    ranks.append((-len(new), uses[name, index], index))
                chosen[name] = min(ranks)[-1]
        for value in chosen.items():
            uses[value] += 1
        for pair in _pairs(names, chosen):
            missing.pop(pair, None)
        rows.append({name: dimensions[name][chosen[name]] for name in names})
    return rows


def _pairs(names: list[str], chosen: dict[str, int]) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """All pairs of values that are chosen, in the order of the dimensions."""
    return list(combinations([(name, chosen[name]) for name in names if name in chosen], 2))
