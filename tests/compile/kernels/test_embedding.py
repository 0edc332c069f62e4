"""Rows of the embedding, against the dequantized matrix: every bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.embedding import AddRowsSpec, add_rows, embedding
from radixlm.compile.weights.kinds import BF16, DTYPES, F16, F32, SUPER_GROUP, WeightKind
from radixlm.compile.weights.layout import round_up
from radixlm.compile.weights.packing import pack
from radixlm.compile.weights.quantization import Weight

from .harness import TARGETS_HERE, built, by_rows, every_target, runnable
from .pairwise import pairwise
from .random_weights import random_weight
from .test_integer_linear import COMMON, RARE

SPECS = pairwise(kind=(*COMMON, F32, F16, BF16), target=TARGETS_HERE, hidden_size=(96, 144), factor=(1.0, 12.0))


@by_rows(SPECS)
def test_rows_are_those_of_the_dequantized_matrix(row: dict[str, Any]) -> None:
    check_rows(row["target"], row["kind"], row["hidden_size"], row["factor"])


def check_rows(target: Target, kind: WeightKind, hidden_size: int, factor: float) -> None:
    if kind.is_quantized:
        hidden_size = round_up(hidden_size, SUPER_GROUP if kind.is_nested else kind.group)
    rng, stride = np.random.default_rng(hidden_size), hidden_size + 16
    if kind.is_quantized:
        weight = random_weight(kind, 50, hidden_size, rng)
    else:
        weight = Weight(kind, rng.standard_normal((50, hidden_size)).astype(DTYPES[kind.codes]))
    packed = pack(weight)
    kernel = built(target, embedding, kind, hidden_size, stride, factor)
    for token_ids in (np.array([49, 0, 17], np.int32), rng.integers(0, 50, 23).astype(np.int32)):
        y = np.full((len(token_ids), stride), np.nan, np.float32)
        kernel(token_ids, packed.codes, packed.scales, packed.offsets, y, len(token_ids))
        assert (y[:, :hidden_size] == weight.dequantize()[token_ids] * np.float32(factor)).all()
        assert (y[:, hidden_size:] == 0).all()


@pytest.mark.parametrize("kind", RARE, ids=lambda kind: kind.label)
def test_rare_kinds_are_read_too(kind: WeightKind) -> None:
    check_rows(runnable()[0], kind, 144, 12.0)


@every_target
@pytest.mark.parametrize("spec", [AddRowsSpec(172, 176, 2), AddRowsSpec(172, 176, has_indices=False)])
def test_rows_of_a_table_are_added(target: Target, spec: AddRowsSpec) -> None:
    rng = np.random.default_rng(0)
    x, table = rng.standard_normal((9, 176)).astype(np.float32), rng.standard_normal((20, 172)).astype(np.float32)
    indices = rng.integers(0, 18, 9).astype(np.int32)
    expected = x.copy()
    expected[:, :172] += table[spec.first + indices] if spec.has_indices else table[0]
    built(target, add_rows, spec)(x, table, indices, 9)
    assert (x == expected).all()
