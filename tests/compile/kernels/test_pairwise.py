"""The table of specs has every pair, and no more rows than it needs."""

from __future__ import annotations

from itertools import combinations, product

from .pairwise import pairwise


def test_every_pair_of_values_occurs_in_few_rows() -> None:
    dimensions = {
        "kind": range(8),
        "target": "abcdef",
        "wide": (False, True),
        "sizes": (3, 2, 1),
        "bias": (False, True),
    }
    rows = pairwise(**dimensions)
    for one, other in combinations(dimensions, 2):
        assert {(row[one], row[other]) for row in rows} == set(product(dimensions[one], dimensions[other]))
    assert len(rows) == 48
    assert rows == pairwise(**dimensions)


def test_one_dimension_alone_is_one_row_for_each_value() -> None:
    assert pairwise(kind="ab", target="x") == [{"kind": "a", "target": "x"}, {"kind": "b", "target": "x"}]
