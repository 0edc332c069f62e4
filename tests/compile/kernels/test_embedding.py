"""Rows of the embedding, against the dequantized matrix: every bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.embedding import embedding
from radixlm.compile.weights.kinds import BF16, DTYPES, F16, F32, SUPER_GROUP, WeightKind
from radixlm.compile.weights.layout import round_up
from radixlm.compile.weights.packing import pack
from radixlm.compile.weights.quantization import Weight

from .harness import TARGETS_HERE, built, by_rows, runnable
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
