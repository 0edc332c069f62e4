"""The kernel of LoRA adapters, on every target: `y += factor * B (A x)` for rows with an adapter, and no others."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.adapters import AdapterPart, AdapterSpec, adapt_rows
from radixlm.runtime.artifact.lora import LoraDType

from .harness import built, every_target

NUM_INPUTS, MAX_RANK, NUM_ADAPTERS = 75, 32, 3  # no multiple of the inputs that are computed together
SIZES = (48, 96)  # of two matrices, the second of which has a gap before it
COLUMNS, Y_STRIDE, X_STRIDE = (16, 80), 192, 80
RANKS = np.array([[1, 2], [0, 1], [2, 0]], np.int32)  # in blocks; 0: the adapter does not change the matrix
DTYPES: dict[LoraDType, np.dtype] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}


def spec_of(dtype: LoraDType) -> AdapterSpec:
    parts, at = [], 0
    for size, column, factor in zip(SIZES, COLUMNS, (1.0, 0.5), strict=True):
        parts.append(AdapterPart(at, at + MAX_RANK * NUM_INPUTS, size, column, factor))
        at += MAX_RANK * (NUM_INPUTS + size)
    return AdapterSpec(dtype, NUM_INPUTS, MAX_RANK, X_STRIDE, Y_STRIDE, at, len(SIZES), tuple(parts))


@every_target
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 9])
def test_rows_get_the_part_of_their_adapter(num_rows: int, dtype: LoraDType, target: Target) -> None:
    spec, draw = spec_of(dtype), np.random.default_rng(num_rows)
    adapters = draw.standard_normal((NUM_ADAPTERS, spec.stride)).astype(DTYPES[dtype])
    adapter_of_row = np.resize(np.array([2, -1, 0, 1, 0], np.int32), num_rows)
    x = draw.standard_normal((num_rows, X_STRIDE)).astype(np.float32)
    before = draw.standard_normal((num_rows, Y_STRIDE)).astype(np.float32)
    y = before.copy()
    stored = adapters.view(np.uint16) if dtype == "bf16" else adapters
    built(target, adapt_rows, spec, target)(RANKS, stored, adapter_of_row, x, y, num_rows)
    expected = before.astype(np.float64)
    for row, adapter in enumerate(adapter_of_row):
        for number, part in enumerate(spec.parts):
            rank = 16 * RANKS[adapter, number]
            if adapter < 0 or not rank:
                continue
            numbers = adapters[adapter].astype(np.float64)
            a = numbers[part.a_at : part.b_at].reshape(-1, NUM_INPUTS, 16).swapaxes(1, 2).reshape(-1, NUM_INPUTS)
            b = numbers[part.b_at : part.b_at + part.num_outputs * MAX_RANK]
            b = b.reshape(-1, MAX_RANK, 16).swapaxes(1, 2).reshape(-1, MAX_RANK)
            added = b[:, :rank] @ (a[:rank] @ x[row, :NUM_INPUTS].astype(np.float64))
            expected[row, part.column : part.column + part.num_outputs] += part.factor * added
    assert np.abs(y - expected).max() < 1e-5 * np.abs(expected).max()
    untouched = adapter_of_row < 0
    assert np.array_equal(y[untouched], before[untouched])
