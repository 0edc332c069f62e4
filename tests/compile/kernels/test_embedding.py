"""Rows of the embedding, against the dequantized matrix: every bit."""

from __future__ import annotations

import numpy as np
import pytest
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.embedding import embedding
from radixlm.compile.weights.packing import pack
from radixlm.compile.weights.quantization import BF16, DTYPES, F16, F32, Weight, WeightKind

from .harness import built, every_target
from .test_integer_linear import KINDS, random_weight


@every_target
@pytest.mark.parametrize("kind", [*KINDS.values(), F32, F16, BF16], ids=lambda kind: kind.label)
@pytest.mark.parametrize("hidden_size", [96, 144])
def test_rows_are_those_of_the_dequantized_matrix(target: Target, kind: WeightKind, hidden_size: int) -> None:
    if kind.is_quantized and hidden_size % kind.group:
        hidden_size += 16
    rng, stride = np.random.default_rng(hidden_size), hidden_size + 16
    if kind.is_quantized:
        weight = random_weight(kind, 50, hidden_size, rng)
    else:
        weight = Weight(kind, rng.standard_normal((50, hidden_size)).astype(DTYPES[kind.name]))
    packed = pack(weight)
    kernel = built(target, embedding, kind, hidden_size, stride)
    for token_ids in (np.array([49, 0, 17], np.int32), rng.integers(0, 50, 23).astype(np.int32)):
        y = np.full((len(token_ids), stride), np.nan, np.float32)
        kernel(token_ids, packed.codes, packed.scales, packed.minima, y, len(token_ids))
        assert (y[:, :hidden_size] == weight.dequantize()[token_ids]).all()
        assert (y[:, hidden_size:] == 0).all()
