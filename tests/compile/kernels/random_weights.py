"""Random weights of every kind: any codes, and scales of which no output is lost in another."""

from __future__ import annotations

import numpy as np
from radixlm.compile.weights.kinds import SUPER_GROUP, TABLES, WeightKind
from radixlm.compile.weights.quantization import Weight


def num_codes(kind: WeightKind) -> int:
    """How many codes a quantized kind has."""
    return 16 if kind.codes in TABLES else 1 << int(kind.codes[1:])


def random_weight(kind: WeightKind, num_outputs: int, inputs: int, rng: np.random.Generator) -> Weight:
    """A matrix of a quantized kind."""
    assert kind.scales is not None
    codes = rng.integers(0, num_codes(kind), (num_outputs, inputs)).astype(np.uint8)
    shape, halves = (num_outputs, inputs // kind.group), (num_outputs, inputs // SUPER_GROUP)
    if kind.is_nested:
        minima = (rng.standard_normal(halves) * 0.05).astype(np.float16) if kind.has_minimum else None
        sub_minima = rng.integers(0, 64, shape).astype(np.int8) if kind.has_minimum else None
        sub_scales = rng.integers(-128, 128, shape).astype(np.int8)
        scales = (rng.random(halves) * 0.002).astype(np.float16)
        return Weight(kind, codes, scales, minima, sub_scales=sub_scales, sub_minima=sub_minima)
    scales = (rng.random(shape) * 0.1).astype(np.float16)
    if kind.scales.dtype != "f16":
        scales = rng.integers(*{"e8m0": (118, 127), "e4m3": (0, 56)}[kind.scales.dtype], shape).astype(np.uint8)
    return Weight(
        kind,
        codes,
        scales,
        rng.standard_normal(shape).astype(np.float16) if kind.has_minimum else None,
        rng.integers(0, num_codes(kind), shape).astype(np.uint8) if kind.has_zeros else None,
    )


def unit_weight(kind: WeightKind, codes: np.ndarray) -> Weight:
    """Scales of 1 and no minima."""
    assert kind.scales is not None
    groups = (len(codes), codes.shape[1] // kind.group)
    if kind.is_nested:
        ones = np.ones((len(codes), codes.shape[1] // SUPER_GROUP), np.float16)
        of_groups = np.ones(groups, np.int8)
        zeros = (0 * ones, 0 * of_groups) if kind.has_minimum else (None, None)
        return Weight(kind, codes, ones, zeros[0], sub_scales=of_groups, sub_minima=zeros[1])
    one = {"f16": np.float16(1), "e8m0": np.uint8(127), "e4m3": np.uint8(64)}[kind.scales.dtype]
    scales = np.full(groups, one)
    return Weight(kind, codes, scales, np.zeros(groups, np.float16) if kind.has_minimum else None)
