"""Recurrent layers in plain NumPy: one token after the other, each from the state that the one before it leaves."""

from __future__ import annotations

import numpy as np
from radixlm.runtime.artifact.model_config import GatedDelta

from .functions import Array


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
    state = np.zeros((delta.num_value_heads, delta.key_dim, delta.value_dim), qkv.dtype)
    out = np.empty_like(value)
    for token in range(len(qkv)):
        state = state * fading[token][:, None, None]
        off = value[token] - np.einsum("hkv,hk->hv", state, key[token])
        state = state + key[token][:, :, None] * (learns[token][:, None] * off)[:, None, :]
        out[token] = np.einsum("hkv,hk->hv", state, query[token])
    return out


def _of_length_one(x: Array) -> Array:
    length: Array = np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + x.dtype.type(1e-6))
    return x / length
