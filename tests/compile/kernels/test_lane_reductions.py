"""Vectors reduced together: every sum is that of its own vector, wherever it ends up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from radixlm.compile.codegen.builder import Kernel, registers
from radixlm.compile.codegen.lane_reductions import reduce_each
from radixlm.compile.codegen.targets import Target
from radixlm.compile.codegen.vector import LANES, lanes

from .harness import built, every_target


def sums_of(count: int) -> Any:
    """A PrimFunc `(x, y) -> 0`: `y[i]` is the sum of the i-th vector of `x`."""
    with Kernel() as k:
        x, y = k.arguments(x="float32", y="float32")
        sums = reduce_each([x[lanes(i * LANES)] for i in range(count)], lambda a, b: a + b)
        scratch = registers(sums.num_lanes, "float32")
        scratch[lanes(0, sums.num_lanes)] = sums.vector
        for i, lane in enumerate(sums.lane_of):
            y[i] = scratch[lane]
    return k.function


@every_target
@pytest.mark.parametrize("count", [1, 2, 3, 8, 13, 16])
def test_each_vector_has_its_own_sum_in_the_same_order_whatever_is_beside_it(target: Target, count: int) -> None:
    x = np.random.default_rng(count).standard_normal((count, LANES)).astype(np.float32)
    y = np.zeros(count, np.float32)
    built(target, sums_of, count)(x, y)
    parts = x
    while parts.shape[1] > 1:  # halves: lane i with i + 8, then with i + 4
        half = parts.shape[1] // 2
        parts = parts[:, :half] + parts[:, half:]
    assert (y == parts[:, 0]).all()
