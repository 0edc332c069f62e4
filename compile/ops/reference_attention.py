"""Attention of one head in plain NumPy, the rotation of heads, and the roundings of kernels: the numbers of their
codes.

What enters a matrix is rounded to int8 in groups of 32. For attention in integers, keys are codes of 12 bits, queries
of 13 and values of 8, each row with a scale of its own. What weighs a value is rounded, too: within a span of 128
positions the weights of a row, each times its value's scale, are 0 to 255 parts of the largest. Sums of weights are not
rounded.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from radixlm.runtime.artifact.manifest import TOP_LOGITS
from radixlm.runtime.artifact.model_config import AnyAttention, Rope

from .functions import Array
from .rope_frequencies import attention_factor, rope_frequencies

ACTIVATION_GROUP = 32  # numbers that enter a matrix and share one int8 scale
SPAN = 128  # positions
_KEY_LIMIT, _QUERY_LIMIT, _VALUE_LIMIT, _WEIGHT_LIMIT = 2047, 4095, 127, 255


def query_limit(key_dim: int) -> int:
    """The largest code of a query: its product with any key fits in 32 bits."""
    return int(min(_QUERY_LIMIT, ((1 << 31) - 1) // (_KEY_LIMIT * key_dim)))


def rounded_keys(keys: Array) -> Array:
    """Keys `[..., n]` as their codes tell them."""
    return _rounded(keys, _KEY_LIMIT)


def rounded_values(values: Array) -> Array:
    """Values `[..., n]` as their codes tell them."""
    return _rounded(values, _VALUE_LIMIT)


def rounded_queries(queries: Array) -> Array:
    """Queries `[..., n]` as their codes tell them."""
    return _rounded(queries, query_limit(queries.shape[-1]))


def rounded_weights(weights: Array, values: Array) -> Array:
    """Weights `[tokens, rows]` as their codes tell them; `values` `[rows, n]` are rounded already."""
    scales = _largest(values)[:, 0] / _VALUE_LIMIT
    scaled = weights * scales
    for first in range(0, scaled.shape[-1], SPAN):
        span = scaled[:, first : first + SPAN]
        step = _largest(span) / _WEIGHT_LIMIT
        span[...] = np.rint(span / step) * step
    rounded: Array = (scaled / scales).astype(weights.dtype)
    return rounded


def refine(logits: Array, exact: Array) -> None:
    """Replace the largest logits of each row, as many as sampling looks at, by exact ones."""
    count = min(TOP_LOGITS, logits.shape[-1])
    largest = np.argpartition(logits, -count, axis=-1)[:, -count:]
    np.put_along_axis(logits, largest, np.take_along_axis(exact, largest, axis=-1), axis=-1)


def round_to_int8(x: Array, group: int = ACTIVATION_GROUP) -> Array:
    """What is left of numbers `[..., K]` after int8 rounding in groups, of activations 32.

    Codes are `x * (127 / max|x|)` rounded half to even, the scale is `max|x| / 127`. A last group of fewer
    numbers stands alone; a group of zeros stays zeros.
    """
    padding = -x.shape[-1] % group
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
    groups = padded.reshape(*x.shape[:-1], -1, group)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    codes = np.rint(groups * (127 / np.where(largest == 0, 1, largest)))
    rounded: Array = (codes * (largest / 127)).astype(x.dtype).reshape(padded.shape)
    return rounded[..., : x.shape[-1]]


def _rounded(x: Array, limit: int) -> Array:
    largest = _largest(x)
    rounded: Array = (np.rint(x * (limit / largest)) * (largest / limit)).astype(x.dtype)
    return rounded


def _largest(x: Array) -> Array:
    """Each row's largest magnitude, of zeros 1."""
    largest: Array = np.abs(x).max(axis=-1, keepdims=True)
    return np.where(largest == 0, largest.dtype.type(1), largest)


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
