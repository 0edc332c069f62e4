"""Make random weights in the block types of GGUF files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

_PART = 1 << 18  # blocks that are generated at once


def random_blocks(type: Type, num_bytes: int, deviation: float, random: np.random.Generator) -> np.ndarray:
    """Return `num_bytes` of random blocks of a type, made in parts: their numbers take several times that memory."""
    _, size = gguf.GGML_QUANT_SIZES[type]
    made = np.empty((num_bytes // size, size), np.uint8)
    for start in range(0, len(made), _PART):
        part = made[start : start + _PART]
        part[:] = BLOCKS[type](random, len(part), deviation)
    return made.reshape(-1)


def _random_q4_k(random: np.random.Generator, count: int, deviation: float) -> np.ndarray:
    """Return `count` random blocks of Q4_K: 4-bit codes, 6-bit scales near their maximum, minima for a mean of zero."""
    scales = random.integers(36, 64, (count, 8), dtype=np.uint8)
    low, high = scales[:, :4], scales[:, 4:]  # scales and minima alike
    packed = np.concatenate([low | (high >> 4 << 6), low | (high >> 4 << 6), (high & 15) * np.uint8(17)], axis=1)
    scale = np.full((count, 1), deviation / (50 * 4.61), np.float16)
    codes = random.integers(0, 256, (count, 128), dtype=np.uint8)
    return np.concatenate([scale.view(np.uint8), (scale * np.float16(7.5)).view(np.uint8), packed, codes], axis=1)


def _random_q6_k(random: np.random.Generator, count: int, deviation: float) -> np.ndarray:
    """Return `count` random blocks of Q6_K whose weights have about this standard deviation, uint8 `[count, 210]`."""
    codes = random.integers(0, 256, (count, 192), dtype=np.uint8)
    scales = random.integers(50, 80, (count, 16), dtype=np.uint8)
    scale = np.full((count, 1), deviation / (64 * 18.5), np.float16)
    return np.concatenate([codes, scales, scale.view(np.uint8)], axis=1)


def _random_q8_0(random: np.random.Generator, count: int, deviation: float) -> np.ndarray:
    """Return `count` random blocks of Q8_0 whose weights have this standard deviation, uint8 `[count, 34]`."""
    codes = np.clip(np.round(random.standard_normal((count, 32), dtype=np.float32) * 40), -127, 127).astype(np.int8)
    return np.concatenate(
        [np.full((count, 1), deviation / 40, np.float16).view(np.uint8), codes.view(np.uint8)], axis=1
    )


def _random_mxfp4(random: np.random.Generator, count: int, deviation: float) -> np.ndarray:
    """Return `count` random blocks of MXFP4 whose weights have about this standard deviation, uint8 `[count, 17]`."""
    exponents = np.full((count, 1), round(127 + math.log2(deviation / 2.9)), np.uint8)
    return np.concatenate([exponents, random.integers(0, 256, (count, 16), dtype=np.uint8)], axis=1)


def _random_f32(random: np.random.Generator, count: int, deviation: float) -> np.ndarray:
    """Return `count` random numbers of this standard deviation, or ones if it is 0, as uint8 `[count, 4]`."""
    values = random.standard_normal((count, 1), dtype=np.float32) * np.float32(deviation)
    return (values if deviation else np.ones_like(values)).view(np.uint8)


BLOCKS: Mapping[Type, Callable[[np.random.Generator, int, float], np.ndarray]] = {
    Type.Q4_K: _random_q4_k,
    Type.Q6_K: _random_q6_k,
    Type.Q8_0: _random_q8_0,
    Type.MXFP4: _random_mxfp4,
    Type.F32: _random_f32,
}
"""Makes random blocks of each type from a generator, a count and a deviation; a row of bytes each."""
