"""Inputs gathered in another order, against NumPy."""

from __future__ import annotations

import numpy as np
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.embedding import gather_columns

from .harness import built, every_target


@every_target
def test_columns_are_gathered_in_their_order(target: Target) -> None:
    rng = np.random.default_rng(0)
    for num_rows in (1, 3, 70):
        x, order = rng.standard_normal((num_rows, 80), np.float32), rng.permutation(64).astype(np.int32)
        y = np.full((num_rows, 96), 7, np.float32)
        built(target, gather_columns, 64, 80, 96)(x, order, y, num_rows)
        np.testing.assert_array_equal(y[:, :64], x[:, order])
        np.testing.assert_array_equal(y[:, 64:], 7)
