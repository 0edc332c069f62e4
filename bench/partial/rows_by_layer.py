"""Evaluate a model on a query over rows of its prefix, with another number of them in each layer, in plain NumPy.

The compiled forward uses as many rows in each layer. Where layers fall back and are loaded whole, this measures the
loss, with the compiler's own evaluation of the model, and keys and values of the prefix that the forward has computed.
Activations are in float32, so that results are compared with this model's own over all rows, not with the forward's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from radixlm.compile.ops.functions import Array
from radixlm.compile.ops.operations import AttentionSpec, LatentSpec
from radixlm.compile.ops.reference_ops import ReferenceOps
from radixlm.compile.reference import evaluate
from radixlm.compile.sources import open_source
from radixlm.compile.stored_weights import StoredWeights
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.model.batch import Float32Array
from radixlm.runtime.model.kv_rows import KVRows

from .policies import Order

Choice = Sequence[Order]  # by layer, `[kv_heads, n]`


class RowsByLayer:
    """A model whose weights are those of an artifact, read from its source; it keeps them all in memory."""

    def __init__(self, artifact: Artifact, source: Path) -> None:
        self._artifact, weights = artifact, StoredWeights(open_source(source), "keep")
        self._weight = functools.cache(weights.float32)

    def logits(self, prefix: KVRows, choice: Choice | None, query: Sequence[int], num_logits: int) -> Float32Array:
        """Return the last `num_logits` rows of logits, `[num_logits, vocab]`, of a query after the selected rows of a
        prefix, or after all of them."""
        kv = self._artifact.manifest.kv
        op = _AfterPrefix(self._weight, query, kv_dtype=kv.dtype)
        op.start, op.choice, op.group = prefix.num_tokens, choice, self._artifact.manifest.model.num_attention_heads
        op.group //= kv.num_kv_heads
        scales = prefix.scales if prefix.scales is not None else np.ones((), np.float32)
        op.keys, op.values = prefix.items.astype(np.float32) * (scales[..., None] if scales.ndim else scales)
        return np.asarray(evaluate(self._artifact.manifest.model, op)[len(query) - num_logits :], np.float32)


class _AfterPrefix(ReferenceOps):
    """Evaluates tokens that come after the existing rows of a prefix."""

    start: int
    choice: Choice | None
    group: int
    keys: Float32Array  # [layers, kv_heads, tokens, head_dim]
    values: Float32Array

    def positions(self) -> npt.NDArray[np.int64]:
        """Return the positions of the tokens, which begin after the prefix."""
        return self.start + super().positions()

    def attend(
        self, query: Array, key: Array, value: Array, spec: AttentionSpec | LatentSpec, head: int, sinks: Array | None
    ) -> Array:
        """Return the attention of one head to the chosen rows of the prefix, and to the tokens themselves."""
        assert isinstance(spec, AttentionSpec) and sinks is None and spec.attention.window is None
        layer, kv_head, count = spec.kv_layer, head // self.group, len(query)
        keys, values = self.keys[layer, kv_head], self.values[layer, kv_head]
        if self.choice is not None:
            rows = self.choice[layer][kv_head]
            keys, values = keys[rows], values[rows]
        scores = query @ np.concatenate([keys, key]).T * np.float32(spec.attention.scale)
        scores[:, len(keys) :][np.triu_indices(count, 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.asarray(weights @ np.concatenate([values, value]))
