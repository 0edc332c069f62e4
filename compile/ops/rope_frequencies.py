"""Frequencies of rotary position embedding (Su et al., 2021), with the scaling for long contexts."""

from __future__ import annotations

import math
from decimal import Context, Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
from radixlm.runtime.artifact.model_config import (
    DynamicScaling,
    FactorsScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)

ROPE_FREQUENCIES = "rope.frequencies"  # the name of the computed tensor; a second `Rope` has the suffix ".1"
MAGNITUDE = 0.1  # of YaRN: factor of the logarithm of its scaling factor

Float32Array = npt.NDArray[np.float32]


def rope_frequencies(rope: Rope) -> Float32Array:
    """Return radians per position of each rotated pair, float32 `[rotary_dim / 2]`.

    Computed in float32 as `transformers` does. In float64 the angles at position 8,000 differ by up to 5e-4.
    """
    theta, dim = rope.theta, rope.rotary_dim
    if isinstance(rope.scaling, DynamicScaling):
        theta *= rope.scaling.alpha ** (dim / (dim - 2))
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    frequencies = np.float32(1.0) / _powers(np.float32(theta), exponents)
    return _stretch(frequencies, rope).astype(np.float32)


def _powers(base: np.float32, exponents: Float32Array) -> Float32Array:
    """Return `base` to each of the powers, rounded to float32 once: NumPy's power differs between CPUs."""
    exact = Context(prec=40)
    return np.array([float(exact.power(Decimal(float(base)), Decimal(float(each)))) for each in exponents], np.float32)


def attention_factor(rope: Rope) -> float:
    """Return the factor of cosines and sines."""
    match rope.scaling:
        case FactorsScaling(attention_factor=factor) | LongRopeScaling(attention_factor=factor):
            return factor
        case YarnScaling() as yarn:
            return _yarn_factor(yarn)
    return 1.0


def _stretch(frequencies: Float32Array, rope: Rope) -> npt.NDArray[Any]:
    """Return frequencies after scaling."""
    match rope.scaling:
        case LinearScaling(factor=factor):
            return frequencies / np.float32(factor)
        case FactorsScaling(factors=factors):
            return frequencies / np.array(factors, dtype=np.float32)
        case Llama3Scaling() as llama3:
            return _stretch_llama3(frequencies, llama3)
        case YarnScaling() as yarn:
            return _stretch_yarn(frequencies, rope, yarn)
        case ProportionalScaling(num_pairs=num_pairs, factor=factor):
            turns = np.arange(len(frequencies)) < num_pairs
            return np.where(turns, frequencies / np.float32(factor), np.float32(0))
        case LongRopeScaling():
            raise AssertionError("the compiled context length has not chosen between longrope's factors")
    return frequencies


def _stretch_llama3(frequencies: Float32Array, scaling: Llama3Scaling) -> npt.NDArray[Any]:
    """Divide slow frequencies by `factor`, keep fast ones, blend between (`_compute_llama3_parameters`).

    If both limits are equal, no frequencies are blended (Llama 4 Scout).
    """
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = np.float32(2 * np.pi) / frequencies
    beyond = original / wavelengths - np.float32(low)
    fast = np.clip(beyond / np.float32(high - low), 0, 1) if high > low else (beyond >= 0).astype(np.float32)
    return (1 - fast) * (frequencies / np.float32(scaling.factor)) + fast * frequencies


def _stretch_yarn(frequencies: Float32Array, rope: Rope, yarn: YarnScaling) -> npt.NDArray[Any]:
    """Scale frequencies by how often a pair turns within the original context (`_compute_yarn_parameters`)."""

    def pair(num_turns: float) -> float:
        turns = yarn.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair(yarn.beta_fast), pair(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    high += 0.001 if low == high else 0
    slow = np.clip((np.arange(len(frequencies), dtype=np.float32) - low) / (high - low), 0, 1).astype(np.float32)
    stretched: npt.NDArray[Any] = frequencies / np.float32(yarn.factor) * slow + frequencies * (1 - slow)
    return stretched


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return the sharpening of attention for a context that is `factor` times as long."""
    return MAGNITUDE * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_factor(yarn: YarnScaling) -> float:
    """Return YaRN's factor of attention: as declared, or from its scaling factor."""
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn_magnitude(yarn.factor, yarn.mscale) / yarn_magnitude(yarn.factor, yarn.mscale_all_dim)
    return yarn_magnitude(yarn.factor)
