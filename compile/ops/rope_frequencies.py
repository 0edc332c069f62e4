"""Frequencies of rotary position embedding (Su et al., 2021), with the stretching that long contexts use."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from radixlm.runtime.artifact.manifest import ModelConfig, RopeScaling

ROPE_FREQUENCIES = "rope.frequencies"  # the name of the computed tensor

Float32Array = npt.NDArray[np.float32]


def rope_frequencies(config: ModelConfig) -> Float32Array:
    """Radians per position of each rotated pair, float32 `[head_dim / 2]`.

    Computed in float32 as `transformers` does: in float64 the angles at position 8,000 differ by up to 5e-4.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = np.float32(1.0) / np.power(np.float32(config.rope_theta), exponents, dtype=np.float32)
    return _stretch(frequencies, config.rope_scaling).astype(np.float32)


def _stretch(frequencies: Float32Array, scaling: RopeScaling | None) -> npt.NDArray[Any]:
    if scaling is None:
        return frequencies
    if scaling.type == "linear":
        return frequencies / np.float32(scaling.factor)
    if scaling.type == "factors":
        return frequencies / np.array(scaling.factors, dtype=np.float32)
    return _stretch_llama3(frequencies, scaling)


def _stretch_llama3(frequencies: Float32Array, scaling: RopeScaling) -> npt.NDArray[Any]:
    """Divide slow frequencies by `factor`, keep fast ones, blend between (`_compute_llama3_parameters`)."""
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = np.float32(2 * np.pi) / frequencies
    fast = np.clip((original / wavelengths - np.float32(low)) / np.float32(high - low), 0, 1)
    return (1 - fast) * (frequencies / np.float32(scaling.factor)) + fast * frequencies
