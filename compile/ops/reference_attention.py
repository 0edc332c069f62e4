"""Attention of one head in plain NumPy, and the rotation of heads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from radixlm.runtime.artifact.model_config import AnyAttention, Rope

from .functions import Array
from .reference_codes import rounded_weights
from .rope_frequencies import attention_factor, rope_frequencies

Positions = npt.NDArray[np.int64]


def rope_table(rope: Rope, positions: Positions) -> tuple[Array, Array]:
    """Cosines and sines of positions, each float32 `[tokens, rotary_dim / 2]`."""
    angles = positions.astype(np.float32)[:, None] * rope_frequencies(rope)[None, :]
    factor = np.float32(attention_factor(rope))
    return np.cos(angles) * factor, np.sin(angles) * factor


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    """RoPE on `[heads, tokens, head_dim]`; the halves of what rotates are the pairs (Hugging Face's order)."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return turned.astype(x.dtype, copy=False)


def prepared(query: Array, attention: AnyAttention, positions: Positions) -> Array:
    """Queries at the temperature of their positions, `[heads, tokens, head_dim]`."""
    if attention.temperature is None:
        return query
    temperature = attention.temperature
    turns = np.floor((positions + temperature.shift) / temperature.original_length)
    factors = 1 + temperature.beta * np.log1p(turns)
    return query * factors.astype(query.dtype)[:, None]


def visible(attention: AnyAttention, num_tokens: int) -> npt.NDArray[np.bool_]:
    """Which tokens (columns) each token (rows) sees."""
    row, column = np.arange(num_tokens)[:, None], np.arange(num_tokens)[None, :]
    seen = column <= row
    if attention.window is not None:
        seen &= column > row - attention.window
    if attention.chunk is not None:
        seen &= column // attention.chunk == row // attention.chunk
    return seen


def attend(
    query: Array, key: Array, value: Array, attention: AnyAttention, sink: Array | None, *, in_codes: bool = False
) -> Array:
    """Softmax attention of one head, all `[tokens, numbers of a head]`; `sink` is a logit without a value.

    With `in_codes` weights are rounded as attention in integers rounds them; values are so already.
    """
    scores = query @ key.T * query.dtype.type(attention.scale)
    if attention.soft_cap is not None:
        cap = query.dtype.type(attention.soft_cap)
        scores = cap * np.tanh(scores / cap)
    scores = np.where(visible(attention, len(query)), scores, -np.inf)
    largest = scores.max(axis=-1, keepdims=True)
    if sink is not None:
        largest = np.maximum(largest, sink)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - largest)
    mixed: Array = (rounded_weights(weights, value) if in_codes else weights) / total @ value
    return mixed
