"""Inverse frequencies of rotary position embedding, with the stretching that long contexts use."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from radixlm.runtime.manifest import ModelConfig, RopeScaling

INVERSE_FREQUENCIES = "rope.inverse_frequencies"  # the name of the computed tensor


def inverse_frequencies(config: ModelConfig) -> npt.NDArray[np.float32]:
    """float32 `[head_dim / 2]`: radians per position, rounded step by step as Transformers does."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    plain = (1.0 / np.float32(config.rope_theta) ** exponent).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.type == "factors":
        return (plain / np.asarray(scaling.factors, np.float32)).astype(np.float32)
    if scaling.type == "linear":
        return (plain / np.float32(scaling.factor)).astype(np.float32)
    return _llama3(plain, scaling)


def _llama3(plain: npt.NDArray[np.float32], scaling: RopeScaling) -> npt.NDArray[np.float32]:
    """Llama 3.1: keep short wavelengths, stretch long ones by `factor`, blend between."""
    original = scaling.original_max_position_embeddings
    longest, shortest = original / scaling.low_freq_factor, original / scaling.high_freq_factor
    wavelength = np.float32(2 * math.pi) / plain
    stretched = np.where(wavelength > longest, plain / np.float32(scaling.factor), plain)
    blend = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - blend) * stretched / scaling.factor + blend * stretched
    between = ~(wavelength < shortest) & ~(wavelength > longest)
    return np.where(between, blended, stretched).astype(np.float32)
