"""Recurrent layers in plain NumPy: one token after the other, each from the state that the one before it leaves."""

from __future__ import annotations

import numpy as np

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
