"""Frequencies of every kind of stretching are those of transformers 5.23, from the same settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from radixlm.compile.families.rope_scaling import rope_scaling
from radixlm.compile.ops.rope_frequencies import attention_factor, rope_frequencies
from radixlm.runtime.artifact.model_config import FactorsScaling, LongRopeScaling, Rope

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + i / 50 for i in range(24)],
    "long_factor": [1 + i * i / 20 for i in range(24)],
    "original_max_position_embeddings": 64,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
GPT_OSS = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
# Base, rotary dimension, the model's length, settings; some frequencies by their index, and the factor of cosines.
CASES: dict[str, tuple[float, int, int, dict[str, Any], dict[int, float], float]] = {
    "linear": (
        *(1e6, 64, 4096, {"rope_type": "linear", "factor": 8.0}),
        *({1: 0.0811727047, 8: 0.00395284733, 16: 0.000125000006, 31: 1.92490816e-07}, 1.0),
    ),
    "llama3": (
        *(5e5, 64, 512, {"rope_type": "llama3"} | LLAMA3),
        *({1: 0.663601279, 3: 0.205000967, 8: 0.00470075384, 31: 3.7673226e-07}, 1.0),
    ),
    "yarn": (
        *(1e4, 64, 256, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
        *({4: 0.210818514, 8: 0.0333333313, 15: 0.00333380373, 31: 3.33380376e-05}, 1.13862944),
    ),
    "yarn without whole pairs": (
        *(15e4, 64, 131072, {"rope_type": "yarn", "original_max_position_embeddings": 4096} | GPT_OSS),
        *({8: 0.0508132726, 10: 0.0193349998, 15: 0.00105260219, 31: 3.0235114e-07}, 1.34657359),
    ),
    "yarn of two scales": (
        1e4,
        32,
        163840,
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
        },
        {4: 0.100000001, 7: 0.0128290169, 10: 0.000959977158, 15: 4.44569832e-06},
        0.921042355,
    ),
    "yarn of a declared factor": (
        1e6,
        64,
        262144,
        {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, "attention_factor": 1.25},
        {8: 0.0316227786, 15: 0.000737881404, 18: 7.02827456e-05, 31: 9.62454081e-08},
        1.25,
    ),
    "proportional": (
        *(1e6, 64, 4096, {"rope_type": "proportional", "partial_rotary_factor": 0.25}),
        *({1: 0.649381638, 7: 0.0486967526, 8: 0.0, 31: 0.0}, 1.0),
    ),
    "longrope, short": (
        *(1e4, 48, 512, LONGROPE),
        *({1: 0.667933404, 6: 0.0892857164, 12: 0.00806451589, 23: 0.000100534213}, 1.22474487),
    ),
    "longrope, long": (
        *(1e4, 48, 512, LONGROPE),
        *({1: 0.648849607, 6: 0.0357142873, 12: 0.0012195122, 23: 5.34717492e-06}, 1.22474487),
    ),
    "dynamic": (
        *(1e4, 64, 4096, {"rope_type": "dynamic", "alpha": 1000.0}),
        *({1: 0.600103021, 8: 0.0168192424, 16: 0.000282886962, 31: 1.33352145e-07}, 1.0),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    theta, dim, length, settings, expected, factor = CASES[name]
    scaling = rope_scaling("x", settings, {}, rotary_dim=dim, max_position_embeddings=length, original=None)
    if isinstance(scaling, LongRopeScaling):
        factors = scaling.long_factors if name.endswith("long") else scaling.short_factors
        scaling = FactorsScaling(factors=factors, attention_factor=scaling.attention_factor)
    rope = Rope(theta=theta, rotary_dim=dim, scaling=scaling)
    found = rope_frequencies(rope)
    assert found.shape == (dim // 2,)
    np.testing.assert_allclose([found[i] for i in expected], list(expected.values()), rtol=2e-6)
    assert attention_factor(rope) == pytest.approx(factor, rel=1e-8)
