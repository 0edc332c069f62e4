"""Float matrices times float rows, against float64 arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from radixlm.compile.kernels.float_linear import float_linear
from radixlm.compile.kernels.linear import LinearSpec
from radixlm.compile.weights.kinds import BF16, DTYPES, F16, F32
from radixlm.compile.weights.layout import ROW_BLOCK, round_up
from radixlm.compile.weights.packing import pack, packed_shape
from radixlm.compile.weights.quantization import Weight

from .harness import TARGETS_HERE, built, by_rows, examples
from .pairwise import pairwise

NUM_ROWS = 131


SPECS = pairwise(
    kind=(F32, F16, BF16),
    target=TARGETS_HERE,
    shape=((40, 172), (112, 33), (16, 1)),  # outputs, inputs
    column=(0, 32),
    has_bias=(True, False),
    add_to_output=(True, False),
    factor=(0.22, 1.0),
)


@by_rows(SPECS)
def test_products_are_those_of_the_matrix_and_rows_do_not_depend_on_others(row: dict[str, Any]) -> None:
    @examples(3)
    @given(st.integers(0, 1 << 30))
    def check(seed: int) -> None:
        kind, target, (num_outputs, inputs) = row["kind"], row["target"], row["shape"]
        column, bias, add, factor = row["column"], row["has_bias"], row["add_to_output"], row["factor"]
        stacked, x_stride = round_up(num_outputs, ROW_BLOCK), round_up(inputs, ROW_BLOCK)
        spec = LinearSpec(kind, stacked, inputs, column + stacked + 16, column, bias, add, factor=factor)
        rng = np.random.default_rng(seed)
        weight = Weight(kind, rng.standard_normal((num_outputs, inputs)).astype(DTYPES[kind.codes]))
        packed = pack(weight).codes
        assert packed.nbytes == packed_shape(kind, num_outputs, inputs).codes
        biases = rng.standard_normal(stacked).astype(np.float32)
        x = np.full((NUM_ROWS, x_stride), np.nan, np.float32)  # padding is not read
        x[:, :inputs] = rng.standard_normal((NUM_ROWS, inputs))
        before = rng.standard_normal((NUM_ROWS, spec.y_stride)).astype(np.float32)

        def run(rows: np.ndarray | slice) -> np.ndarray:
            y = before[rows].copy()
            kernel = built(target, float_linear, spec, target, x_stride)
            kernel(packed, biases if bias else None, x[rows], y, len(y))
            return y

        together, given = run(slice(None)), slice(column, column + num_outputs)
        wide_x, wide_weight = x[:, :inputs].astype(np.float64), weight.dequantize().astype(np.float64)
        added = factor * bias * biases[:num_outputs].astype(np.float64) + add * before[:, given]
        error = np.abs(together[:, given] - (factor * wide_x @ wide_weight.T + added))
        assert (error <= 2e-6 * (np.abs(wide_x) @ np.abs(wide_weight).T + np.abs(added))).all()
        assert (together[:, :column] == before[:, :column]).all()
        assert (together[:, -16:] == before[:, -16:]).all()
        for count in (*range(1, 10), 13, 65, 67):  # every height of a tile, tiles that overlap, slabs
            rows = rng.permutation(NUM_ROWS)[:count]
            assert (run(rows)[:, given] == together[rows][:, given]).all()

    check()
