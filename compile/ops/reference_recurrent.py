"""Recurrent layers in plain NumPy: one token after the other, each from the state that the one before it leaves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from radixlm.runtime.artifact.model_config import GatedDelta, Mamba2

from .functions import FUNCTIONS, Array, sigmoid
from .layers import Norm
from .operations import ConvolutionSpec, DeltaSpec, MambaSpec

Read = Callable[[str], Array]  # a tensor by its name
Normalize = Callable[[Array, Norm], Array]


def short_convolution(gates: Array, spec: ConvolutionSpec, read: Read) -> Array:
    """`c * convolution(b * x)`, of b, c and x side by side."""
    b, c, x = np.split(gates, 3, axis=-1)
    mixed = convolved(b * x, read(spec.taps.name).reshape(spec.width, -1))
    gated: Array = c * (mixed if spec.bias is None else mixed + read(spec.bias.name))
    return gated


def gated_delta(joined: tuple[Array, ...], spec: DeltaSpec, read: Read, normalize: Normalize) -> Array:
    """What value heads give, normalized, then gated; of queries, keys and values, gates, b and a."""
    qkv, gates, b, a = joined
    qkv = FUNCTIONS["silu"](convolved(qkv, read(spec.taps.name).reshape(qkv.shape[1], -1)))
    fading = np.exp(read(spec.rate.name) * FUNCTIONS["softplus"](a + read(spec.dt_bias.name)))
    given = normalize(delta_rule(qkv, fading, sigmoid(b), spec.delta), spec.norm)
    return given.reshape(gates.shape) * FUNCTIONS["silu"](gates)


def mamba2(joined: tuple[Array, ...], spec: MambaSpec, read: Read, normalize: Normalize) -> Array:
    """What heads give, gated, then perhaps normalized; of values, keys and queries, gates, and dt."""
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
    """`sum(taps[:, i] * x[t - kernel_size + 1 + i])` of each column, rows before the first being zeros.

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
    """What each value head gives, `[tokens, value heads, value_dim]`.

    `qkv` has queries and keys of all key heads, and values; `fading` and `learns` are `[tokens, value heads]`.
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
    """What each head gives, without what it skips, `[tokens, heads, head_dim]`.

    `rows` has values of all heads, keys and queries of all groups; `fading` and `steps` are `[tokens, heads]`.
    """
    value, key, query = split_rows(rows, mamba)
    groups = np.arange(mamba.num_heads) // (mamba.num_heads // mamba.num_groups)
    return _recurrence(query[:, groups], key[:, groups], value, fading, steps, corrects=False)


def split_rows(rows: Array, mamba: Mamba2) -> tuple[Array, Array, Array]:
    """Values `[tokens, heads, head_dim]`, keys and queries, each `[tokens, groups, state_dim]`."""
    width, keys = mamba.values_width, mamba.keys_width
    value, key, query = np.split(rows, [width, width + keys], axis=-1)
    shape = (len(rows), mamba.num_groups, mamba.state_dim)
    return value.reshape(len(rows), mamba.num_heads, -1), key.reshape(shape), query.reshape(shape)


def _recurrence(query: Array, key: Array, value: Array, fading: Array, learns: Array, *, corrects: bool) -> Array:
    """All by value heads, `[tokens, heads, ...]`."""
    state = np.zeros((value.shape[1], key.shape[2], value.shape[2]), value.dtype)
    out = np.empty_like(value)
    for token in range(len(value)):
        state = state * fading[token][:, None, None]
        lacks = value[token] - np.einsum("hkv,hk->hv", state, key[token]) if corrects else value[token]
        state = state + key[token][:, :, None] * (learns[token][:, None] * lacks)[:, None, :]
        out[token] = np.einsum("hkv,hk->hv", state, query[token])
    return out


def _of_length_one(x: Array) -> Array:
    length: Array = np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + x.dtype.type(1e-6))
    return x / length
