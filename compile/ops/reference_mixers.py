"""Attention of one head and recurrent layers in plain NumPy, with RoPE and the rounding of kernels.

A recurrent layer computes one token after the other, each from the state of the one before.

Inputs of a matrix are rounded to int8 in groups of 32. For attention in integers, keys are codes of 12 bits, queries of
13 and values of 8, each row with a scale of its own. Attention weights are rounded, too. Within a span of 128
positions, a row's weights, each times its value's scale, become 0 to 255 parts of the largest. Sums of weights are not
rounded.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from radixlm.runtime.artifact.manifest import TOP_LOGITS
from radixlm.runtime.artifact.model_config import AnyAttention, GatedDelta, Mamba2, Rope

from .functions import FUNCTIONS, Array, sigmoid
from .layers import Norm
from .operations import ConvolutionSpec, DeltaSpec, MambaSpec
from .rope_frequencies import attention_factor, rope_frequencies

ACTIVATION_GROUP = 32  # inputs of a matrix that share one int8 scale
SPAN = 128  # positions
_KEY_LIMIT, _QUERY_LIMIT, _VALUE_LIMIT, _WEIGHT_LIMIT = 2047, 4095, 127, 255


def query_limit(key_dim: int) -> int:
    """Return the largest code of a query, so that its product with any key fits in 32 bits."""
    return int(min(_QUERY_LIMIT, ((1 << 31) - 1) // (_KEY_LIMIT * key_dim)))


def rounded_keys(keys: Array) -> Array:
    """Return keys `[..., n]` after rounding to codes."""
    return _rounded(keys, _KEY_LIMIT)


def rounded_values(values: Array) -> Array:
    """Return values `[..., n]` after rounding to codes."""
    return _rounded(values, _VALUE_LIMIT)


def rounded_queries(queries: Array) -> Array:
    """Return queries `[..., n]` after rounding to codes."""
    return _rounded(queries, query_limit(queries.shape[-1]))


def rounded_weights(weights: Array, values: Array) -> Array:
    """Return weights `[tokens, rows]` after rounding to codes; `values` `[rows, n]` are already rounded."""
    scales = _largest(values)[:, 0] / _VALUE_LIMIT
    scaled = weights * scales
    for first in range(0, scaled.shape[-1], SPAN):
        span = scaled[:, first : first + SPAN]
        step = _largest(span) / _WEIGHT_LIMIT
        span[...] = np.rint(span / step) * step
    rounded: Array = (scaled / scales).astype(weights.dtype)
    return rounded


def refine(logits: Array, exact: Array) -> None:
    """Replace the largest logits of each row, as many as sampling reads, by exact ones."""
    count = min(TOP_LOGITS, logits.shape[-1])
    largest = np.argpartition(logits, -count, axis=-1)[:, -count:]
    np.put_along_axis(logits, largest, np.take_along_axis(exact, largest, axis=-1), axis=-1)


def round_to_int8(x: Array, group: int = ACTIVATION_GROUP) -> Array:
    """Return numbers `[..., K]` after int8 rounding in groups, by default the groups of activations.

    Codes are `x * (127 / max|x|)` rounded half to even, and the scale is `max|x| / 127`. A last group may be smaller. A
    group of zeros stays zeros.
    """
    padding = -x.shape[-1] % group
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
    groups = padded.reshape(*x.shape[:-1], -1, group)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    codes = np.rint(groups * (127 / np.where(largest == 0, 1, largest)))
    rounded: Array = (codes * (largest / 127)).astype(x.dtype).reshape(padded.shape)
    return rounded[..., : x.shape[-1]]


def _rounded(x: Array, limit: int) -> Array:
    """Return `x` with each row rounded to multiples of a scale: codes in `[-limit, limit]`, multiplied by it again."""
    largest = _largest(x)
    rounded: Array = (np.rint(x * (limit / largest)) * (largest / limit)).astype(x.dtype)
    return rounded


def _largest(x: Array) -> Array:
    """Return each row's largest magnitude, or 1 for zeros."""
    largest: Array = np.abs(x).max(axis=-1, keepdims=True)
    return np.where(largest == 0, largest.dtype.type(1), largest)


Positions = npt.NDArray[np.int64]


def rope_table(rope: Rope, positions: Positions) -> tuple[Array, Array]:
    """Return cosines and sines of positions, each float32 `[tokens, rotary_dim / 2]`."""
    angles = positions.astype(np.float32)[:, None] * rope_frequencies(rope)[None, :]
    factor = np.float32(attention_factor(rope))
    return np.cos(angles) * factor, np.sin(angles) * factor


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    """Apply RoPE to `[heads, tokens, head_dim]`; pairs are halves of the rotated elements (Hugging Face's order)."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return turned.astype(x.dtype, copy=False)


def prepared(query: Array, attention: AnyAttention, positions: Positions) -> Array:
    """Return queries multiplied by the temperature of their positions, `[heads, tokens, head_dim]`."""
    if attention.temperature is None:
        return query
    temperature = attention.temperature
    turns = np.floor((positions + temperature.shift) / temperature.original_length)
    factors = 1 + temperature.beta * np.log1p(turns)
    return query * factors.astype(query.dtype)[:, None]


def visible(attention: AnyAttention, num_tokens: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the tokens (columns) that each token (rows) sees."""
    row, column = np.arange(num_tokens)[:, None], np.arange(num_tokens)[None, :]
    seen = column <= row + (num_tokens if attention.bidirectional else 0)
    if attention.window is not None:
        seen &= column > row - attention.window
        seen &= column < row + attention.window
    if attention.chunk is not None:
        seen &= column // attention.chunk == row // attention.chunk
    if attention.skips_first:
        seen &= (column > 0) | (row == 0)
    return seen


def attend(
    query: Array, key: Array, value: Array, attention: AnyAttention, sink: Array | None, *, in_codes: bool = False
) -> Array:
    """Return softmax attention of one head; all are `[tokens, head size]`, and `sink` is a logit without a value.

    With `in_codes`, weights are rounded as attention in integers does; values are already rounded.
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


Read = Callable[[str], Array]  # returns a tensor by its name
Normalize = Callable[[Array, Norm], Array]


def short_convolution(gates: Array, spec: ConvolutionSpec, read: Read) -> Array:
    """Return `c * convolution(b * x)`, given b, c and x side by side."""
    b, c, x = np.split(gates, 3, axis=-1)
    mixed = convolved(b * x, read(spec.taps.name).reshape(spec.width, -1))
    gated: Array = c * (mixed if spec.bias is None else mixed + read(spec.bias.name))
    return gated


def gated_delta(joined: tuple[Array, ...], spec: DeltaSpec, read: Read, normalize: Normalize) -> Array:
    """Return the output of value heads, normalized, then gated.

    `joined` has queries, keys and values, gates, b and a.
    """
    qkv, gates, b, a = joined
    qkv = FUNCTIONS["silu"](convolved(qkv, read(spec.taps.name).reshape(qkv.shape[1], -1)))
    fading = np.exp(read(spec.rate.name) * FUNCTIONS["softplus"](a + read(spec.dt_bias.name)))
    given = normalize(delta_rule(qkv, fading, sigmoid(b), spec.delta), spec.norm)
    return given.reshape(gates.shape) * FUNCTIONS["silu"](gates)


def mamba2(joined: tuple[Array, ...], spec: MambaSpec, read: Read, normalize: Normalize) -> Array:
    """Return the output of heads, gated, then perhaps normalized.

    `joined` has values, keys and queries, gates, and dt.
    """
    *parts, gates, dt = joined
    rows = np.concatenate(parts, axis=-1)
    rows = convolved(rows, read(spec.taps.name).reshape(rows.shape[1], -1))
    rows = FUNCTIONS["silu"](rows if spec.bias is None else rows + read(spec.bias.name))
    steps = FUNCTIONS["softplus"](dt + read(spec.dt_bias.name))
    given = mamba_scan(rows, np.exp(read(spec.rate.name) * steps), steps, spec.mamba)
    given = given + rows[:, : gates.shape[1]].reshape(given.shape) * read(spec.skip.name)[:, None]
    gated: Array = given.reshape(gates.shape) * FUNCTIONS["silu"](gates)
    return gated if spec.norm is None else normalize(gated, spec.norm)


def convolved(x: Array, taps: Array) -> Array:
    """Return `sum(taps[:, i] * x[t - kernel_size + 1 + i])` of each column, with zeros before the first row.

    `x` is `[tokens, width]`, `taps` `[width, kernel_size]`.
    """
    state = np.zeros((taps.shape[1] - 1, x.shape[1]), x.dtype)
    out = np.empty_like(x)
    for token, row in enumerate(x):
        seen = np.concatenate([state, row[None]])
        out[token] = (seen * taps.T).sum(axis=0)
        state = seen[1:]
    return out


def delta_rule(qkv: Array, fading: Array, learns: Array, delta: GatedDelta) -> Array:
    """Return the output of each value head, `[tokens, value heads, value_dim]`.

    `qkv` has queries and keys of all key heads, and values. `fading` (the decay) and `learns` (the learning rate) are
    `[tokens, value heads]`.
    """
    parts = np.split(qkv, [delta.keys_width, 2 * delta.keys_width], axis=-1)
    query, key = (_of_length_one(part.reshape(len(part), delta.num_key_heads, -1)) for part in parts[:2])
    value = parts[2].reshape(len(qkv), delta.num_value_heads, -1)
    heads = np.arange(delta.num_value_heads)
    shared = delta.num_value_heads // delta.num_key_heads
    key_heads = heads % delta.num_key_heads if delta.tiled else heads // shared
    query, key = query[:, key_heads] * qkv.dtype.type(delta.key_dim**-0.5), key[:, key_heads]
    return _recurrence(query, key, value, fading, learns, corrects=True)


def mamba_scan(rows: Array, fading: Array, steps: Array, mamba: Mamba2) -> Array:
    """Return the output of each head without its skip term, `[tokens, heads, head_dim]`.

    `rows` has values of all heads, keys and queries of all groups. `fading` (the decay) and `steps` are `[tokens,
    heads]`.
    """
    value, key, query = split_rows(rows, mamba)
    groups = np.arange(mamba.num_heads) // (mamba.num_heads // mamba.num_groups)
    return _recurrence(query[:, groups], key[:, groups], value, fading, steps, corrects=False)


def split_rows(rows: Array, mamba: Mamba2) -> tuple[Array, Array, Array]:
    """Return values `[tokens, heads, head_dim]`, and keys and queries, each `[tokens, groups, state_dim]`."""
    width, keys = mamba.values_width, mamba.keys_width
    value, key, query = np.split(rows, [width, width + keys], axis=-1)
    shape = (len(rows), mamba.num_groups, mamba.state_dim)
    return value.reshape(len(rows), mamba.num_heads, -1), key.reshape(shape), query.reshape(shape)


def _recurrence(query: Array, key: Array, value: Array, fading: Array, learns: Array, *, corrects: bool) -> Array:
    """Return the output of all tokens; arguments and result are by value head, `[tokens, heads, ...]`."""
    state = np.zeros((value.shape[1], key.shape[2], value.shape[2]), value.dtype)
    out = np.empty_like(value)
    for token in range(len(value)):
        state = state * fading[token][:, None, None]
        lacks = value[token] - np.einsum("hkv,hk->hv", state, key[token]) if corrects else value[token]
        state = state + key[token][:, :, None] * (learns[token][:, None] * lacks)[:, None, :]
        out[token] = np.einsum("hkv,hk->hv", state, query[token])
    return out


def _of_length_one(x: Array) -> Array:
    """Return vectors divided by their length."""
    length: Array = np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + x.dtype.type(1e-6))
    return x / length
