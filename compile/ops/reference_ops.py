"""Implement `Operations` in plain NumPy: a slow and obvious reference for compiled kernels.

It computes the formulas of `transformers`, in its order if rounding shows, with the int8 rounding of activations and
the rounding of KV. Knows no kernels, layouts, pages or files. Computes one sequence, with positions from 0. Weights are
requested by name, one at a time, and never kept, so that a 7B model needs memory for its largest tensor only. If a
weight can be read by rows, only some rows are requested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
from radixlm.runtime.artifact.cpu import default_num_threads
from radixlm.runtime.artifact.manifest import KVDType
from radixlm.runtime.artifact.model_config import Function, Rope

from .functions import FUNCTIONS, GATED_FUNCTIONS, Array, changes_experts, expert_weights, normalized, sigmoid
from .layers import Embedding, ExpertLinear, Linear, Norm, Vector
from .operations import AttentionSpec, ConvolutionSpec, DeltaSpec, ExpertsSpec, LatentSpec, MambaSpec, ScoreSpec
from .reference_mixers import (
    attend,
    gated_delta,
    mamba2,
    prepared,
    refine,
    rope_table,
    rotated,
    round_to_int8,
    rounded_keys,
    rounded_queries,
    rounded_values,
    short_convolution,
)

GetWeight = Callable[[str], npt.NDArray[Any]]
GetRows = Callable[[str, slice], npt.NDArray[Any]]
JoinedOutputs = tuple[Array, ...]  # outputs of each joined matrix, `[tokens, width]`

STRIP = 1 << 22  # numbers of a matrix that are read at a time
_MOST_THREADS = 16  # each reads one strip
NEAR_TIE = 0.02  # fraction of the deviation of a router's logits, within which rounding can change the choice


def nothing_quantized(name: str) -> bool:
    """Return False: a model whose weights are all floats quantizes no activations."""
    return False


class ReferenceOps:
    """The reference operations, for the tokens of one sequence.

    Args:
        weight: returns a dequantized tensor by its checkpoint name, matrices as `[out, in]`.
        rows: returns some rows of a matrix or an embedding, so that large ones are not held whole. Matrices of experts
            are concatenated.
        quantized: returns whether the activations that enter a matrix are rounded to int8, as kernels do.
        kv_dtype: format to which keys (after RoPE) and values are rounded; k12v8 also rounds queries and attention
            weights.
        dtype: precision of everything else. float64 shows how much of a difference is float32's own error.
        vocabulary: runs of tokens whose logits are computed; all if None. Some logits are never refined.

    Attributes:
        near_ties: for each token, whether a router was within `NEAR_TIE` of other experts.
        score_deviation: for each token of a reranker, the deviation of scores that random weights would make.
    """

    def __init__(
        self,
        weight: GetWeight,
        token_ids: Sequence[int] | npt.NDArray[np.integer[Any]],
        *,
        rows: GetRows | None = None,
        quantized: Callable[[str], bool] = nothing_quantized,
        kv_dtype: KVDType = "f32",
        dtype: npt.DTypeLike = np.float32,
        vocabulary: Sequence[slice] | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._weight, self._rows, self._quantized, self._kv_dtype = weight, rows, quantized, kv_dtype
        self._token_ids, self._dtype = np.asarray(token_ids, dtype=np.int64), np.dtype(dtype)
        self._number: Any = self._dtype.type
        self.near_ties = np.zeros(len(self._token_ids), np.bool_)
        self.score_deviation: Array | None = None
        self._kv: dict[int, tuple[Array, Array]] = {}  # by KV layer
        self._hidden: Array = np.zeros((0, 0), self._dtype)  # the rows that `keep_hidden` kept last

    def embed(self, embedding: Embedding, *, factor: float = 1.0) -> JoinedOutputs:
        """Return the embedding rows of the sequence's tokens."""
        ids, of_token = np.unique(self._token_ids, return_inverse=True)
        if self._rows is None:
            found = self._weight(embedding.name)[ids]
        else:
            found = np.concatenate([self._rows(embedding.name, slice(i, i + 1)) for i in ids.tolist()])
        x = found[of_token].astype(self._dtype, copy=False)
        return (x if factor == 1.0 else x * self._number(factor),)

    def normalize(self, x: JoinedOutputs, norm: Norm) -> JoinedOutputs:
        """Return `x` normalized."""
        return (self._norm(x[0], norm),)

    def norm(self, x: JoinedOutputs, norm: Norm) -> Array:
        """Return `x` normalized."""
        return self._norm(x[0], norm)

    def plain(self, x: JoinedOutputs, width: int) -> Array:
        """Return `x` unchanged, with rows of `width`."""
        return x[0]

    def linear(self, x: Array, *layers: Linear) -> JoinedOutputs:
        """Return the outputs of all layers."""
        return tuple(self._multiply(x, layer) for layer in layers)

    def attention(self, qkv: JoinedOutputs, spec: AttentionSpec) -> Array:
        """Return causal attention over the whole sequence."""
        attention = spec.attention
        parts = list(qkv)
        query = self.heads(parts.pop(0), attention.head_dim)
        if attention.shared_kv is None:
            key = self.heads(parts.pop(0), attention.head_dim)
            value = key if attention.keys_are_values else self.heads(parts.pop(0), attention.head_dim)
            if spec.value_norm is not None:
                value = self._norm(value, spec.value_norm)
            key = self._rotated(key, spec.k_norm, spec)
            rounded_value = rounded_values(value) if self._in_codes else self._round_kv(value)
            self._kv[spec.kv_layer] = self._round_kv(key), rounded_value
        key, value = self._kv[spec.kv_layer]
        query = prepared(self._rotated(query, spec.q_norm, spec), attention, self.positions())
        query = rounded_queries(query) if self._in_codes else query
        sinks = None if spec.sinks is None else self._read(spec.sinks.name)
        group = attention.num_heads // attention.num_kv_heads
        mixed = [
            self.attend(query[head], key[head // group], value[head // group], spec, head, sinks)
            for head in range(attention.num_heads)
        ]
        gathered = np.stack(mixed)
        if attention.gate is not None:
            gathered = gathered * self._gate(parts.pop(0), spec)
        return gathered.swapaxes(0, 1).reshape(len(self._token_ids), -1)

    def latent_attention(self, queries: JoinedOutputs, latent: JoinedOutputs, spec: LatentSpec) -> Array:
        """Return causal attention over the one latent row that each token has for all heads."""
        attention, (kept,) = spec.attention, latent[-1:]
        table = self._rope_table(attention.rope)
        plain, turning = np.split(self.heads(queries[0], attention.query_size), [attention.plain_dim], axis=-1)
        vectors, key = np.split(kept, [attention.latent_dim], axis=-1)
        rows = np.concatenate([self._norm(vectors, spec.latent_norm), rotated(key[None], *table)[0]], axis=-1)
        rows = self._round_kv(rows)
        absorbed = plain @ self._read(spec.keys.name).swapaxes(1, 2)
        query = np.concatenate([absorbed, rotated(turning, *table)], axis=-1)
        query = prepared(query, attention, self.positions())
        seen = rows[:, : attention.latent_dim]
        gathered = np.stack([self.attend(head, rows, seen, spec, i, None) for i, head in enumerate(query)])
        outputs: Array = gathered @ self._read(spec.values.name).swapaxes(1, 2)
        return outputs.swapaxes(0, 1).reshape(len(kept), -1)

    def keep(self, qkv: JoinedOutputs, spec: AttentionSpec) -> None:
        """Do nothing, because attention is over the whole sequence."""

    def keep_latent(self, queries: JoinedOutputs, latent: JoinedOutputs, spec: LatentSpec) -> None:
        """Do nothing, because attention is over the whole sequence."""

    def keep_hidden(self, x: JoinedOutputs, kv_layer: int) -> None:
        """Keep the rows, rounded as keys are."""
        self._hidden = self._round_kv(x[0])

    def concat_previous(self, x: JoinedOutputs, width: int, kv_layer: int) -> Array:
        """Concatenate `x` with the row that was kept for the token before."""
        return np.concatenate([x[0], np.concatenate([np.zeros_like(x[0][:1]), self._hidden[:-1]])], axis=-1)

    def short_convolution(self, gates: JoinedOutputs, spec: ConvolutionSpec) -> Array:
        """Return the gated convolution, token by token from a state of zeros."""
        return short_convolution(gates[0], spec, self._read)

    def gated_delta(self, joined: JoinedOutputs, spec: DeltaSpec) -> Array:
        """Return the gated delta rule, token by token from a state of zeros."""
        return gated_delta(joined, spec, self._read, self._norm)

    def mamba2(self, joined: JoinedOutputs, spec: MambaSpec) -> Array:
        """Return Mamba-2, token by token from a state of zeros."""
        return mamba2(joined, spec, self._read, self._norm)

    def activate(
        self, x: JoinedOutputs, function: Function, width: int, *, by: JoinedOutputs | None = None, column: int = 0
    ) -> Array:
        """Return a function of rows, or of pairs of gate and factor, then times `width` numbers of `by`."""
        y = GATED_FUNCTIONS[function](x[0], x[1]) if function in GATED_FUNCTIONS else FUNCTIONS[function](x[0])
        return y if by is None else y * by[0][:, column : column + width]

    def experts(self, x: Array, unnormed: JoinedOutputs, spec: ExpertsSpec) -> JoinedOutputs:
        """Return the weighted sum of the experts to which each row is routed, in order of rank."""
        routed = x
        if spec.router_norm is not None:
            routed = self._norm(unnormed[0], spec.router_norm)
            if spec.router_scale is not None:
                routed = routed * self._read(spec.router_scale.name) * self._number(x.shape[-1] ** -0.5)
        bias = None if spec.selection_bias is None else self._read(spec.selection_bias.name)
        scale = None if spec.expert_scale is None else self._read(spec.expert_scale.name)
        logits = self._multiply(routed, spec.router)
        self.near_ties |= changes_experts(logits, spec.experts, bias, NEAR_TIE)
        chosen, weights = expert_weights(logits, spec.experts, bias, scale)
        outputs = np.zeros((*chosen.shape, x.shape[-1]), self._dtype)
        parts = [part for part in (spec.gate, spec.up, spec.down) if part is not None]
        stacks = {part.name: self._weight(part.name) for part in parts} if self._rows is None else {}
        for expert in range(spec.experts.num_experts):
            rows, ranks = np.nonzero(chosen == expert)
            if len(rows):
                given = x[rows] * weights[rows, ranks, None] if spec.experts.input_scaled else x[rows]
                tensors = {part.name: self._matrix_of(expert, part, stacks) for part in parts}
                outputs[rows, ranks] = self._expert(given, spec, expert, tensors)
        if not spec.experts.input_scaled:
            outputs = outputs * weights[..., None]
        total = np.zeros_like(x)
        for rank in range(spec.experts.num_active):
            total = total + outputs[:, rank]
        return (total,)

    def add_linear(self, x: JoinedOutputs, y: Array, layer: Linear, *, factor: float = 1.0) -> JoinedOutputs:
        """Return `x + factor * W y`."""
        return self.add(x, self.linear(y, layer), factor=factor)

    def add(self, x: JoinedOutputs, y: JoinedOutputs, *, factor: float = 1.0) -> JoinedOutputs:
        """Return `x + factor * y`."""
        return (x[0] + (y[0] if factor == 1.0 else y[0] * self._number(factor)),)

    def add_gated(self, x: JoinedOutputs, y: Array, layer: Linear, gate: Linear, of: Array) -> JoinedOutputs:
        """Return `x + sigmoid(gate of) * W y`."""
        return (x[0] + self._multiply(y, layer) * sigmoid(self._multiply(of, gate)),)

    def add_norm(
        self, x: JoinedOutputs, y: JoinedOutputs, norm: Norm, *, factor: float = 1.0, parts: int = 1
    ) -> JoinedOutputs:
        """Return `x + factor * normalized y`, each of the `parts` of a row normalized by itself."""
        normed = self._norm(y[0].reshape(-1, parts, norm.size), norm)
        return self.add(x, (normed.reshape(y[0].shape),), factor=factor)

    def add_vector(self, x: JoinedOutputs, y: Vector) -> JoinedOutputs:
        """Return `x` plus the same numbers in each row."""
        return (x[0] + self._read(y.name),)

    def add_positions(self, x: JoinedOutputs, positions: Vector, width: int, *, first: int) -> JoinedOutputs:
        """Return `x` plus a row for each token's position."""
        return (x[0] + self._read(positions.name).reshape(-1, width)[first + self.positions()],)

    def add_token_types(self, x: JoinedOutputs, types: Vector, width: int, *, separator_id: int) -> JoinedOutputs:
        """Return `x` plus the first row of `types` up to the first separator, then the second."""
        is_after = np.cumsum(self._token_ids == separator_id) - (self._token_ids == separator_id) > 0
        return (x[0] + self._read(types.name).reshape(-1, width)[is_after.astype(np.int64)],)

    def scale(self, x: JoinedOutputs, by: Vector) -> JoinedOutputs:
        """Return `x` times a stored number."""
        return (x[0] * self._read(by.name)[0],)

    def logits(
        self, x: JoinedOutputs, norm: Norm, head: Linear, *, factor: float = 1.0, soft_cap: float | None = None
    ) -> JoinedOutputs:
        """Return the logits of all rows."""
        normed = self._norm(x[0], norm)
        logits = self._multiply(normed, head, outputs=self._vocabulary)
        if self._quantized(head.name) and self._vocabulary is None:
            refine(logits, self._multiply(normed, head, rounded=False))
        logits = logits if factor == 1.0 else logits * self._number(factor)
        if soft_cap is not None:
            logits = np.tanh(logits / self._number(soft_cap)) * self._number(soft_cap)
        return (logits,)

    def hidden(self, x: JoinedOutputs, norm: Norm | None, *dense: Linear) -> JoinedOutputs:
        """Return all rows, normalized and then multiplied."""
        y = x[0] if norm is None else self._norm(x[0], norm)
        for layer in dense:
            y = self._multiply(y, layer)
        return (y,)

    def score(self, x: JoinedOutputs, spec: ScoreSpec) -> JoinedOutputs:
        """Return a score of each row: of itself, or of the mean of all rows from it on."""
        y = x[0] if spec.last_norm is None else self._norm(x[0], spec.last_norm)
        if spec.pooling == "mean":
            y = np.cumsum(y[::-1], axis=0)[::-1] / np.arange(len(y), 0, -1, dtype=self._dtype)[:, None]
        y = FUNCTIONS[spec.function](self._multiply(y, spec.dense))
        y = y if spec.norm is None else self._norm(y, spec.norm)
        self.score_deviation = y.std(axis=-1) * np.linalg.norm(self._read(spec.out.name))
        return (self._multiply(y, spec.out),)

    # Tests override the two methods below: the positions of tokens, and the attention of a head.

    def positions(self) -> npt.NDArray[np.int64]:
        """Return the position of each token."""
        return np.arange(len(self._token_ids))

    def attend(
        self, query: Array, key: Array, value: Array, spec: AttentionSpec | LatentSpec, head: int, sinks: Array | None
    ) -> Array:
        """Return the attention output of one query head; all are `[tokens, head_dim]`, or the values' own size."""
        sink = None if sinks is None else sinks[head]
        return attend(query, key, value, spec.attention, sink, in_codes=self._in_codes)

    @staticmethod
    def heads(x: Array, head_dim: int) -> Array:
        """Return rows as `[heads, tokens, head_dim]`."""
        return x.reshape(len(x), -1, head_dim).swapaxes(0, 1)

    def _rotated(self, x: Array, norm: Norm | None, spec: AttentionSpec) -> Array:
        """Return heads normalized and rotated, in the layer's order."""
        qk_norm, rope = spec.attention.qk_norm, spec.attention.rope
        if norm is not None and qk_norm is not None and not qk_norm.after_rope:
            x = self._norm_heads(x, norm)
        x = x if rope is None else rotated(x, *self._rope_table(rope))
        if norm is not None and qk_norm is not None and qk_norm.after_rope:
            x = self._norm_heads(x, norm)
        return x

    def _rope_table(self, rope: Rope) -> tuple[Array, Array]:
        """Return cosines and sines of the sequence's positions."""
        return rope_table(rope, self.positions())

    def _norm_heads(self, x: Array, norm: Norm) -> Array:
        """Return each head normalized, or all of them together, `[heads, tokens, head_dim]`."""
        if norm.size == x.shape[-1]:
            return self._norm(x, norm)
        rows = x.swapaxes(0, 1).reshape(x.shape[1], -1)
        return self.heads(self._norm(rows, norm), x.shape[-1])

    def _gate(self, gate: Array, spec: AttentionSpec) -> Array:
        """Return the gates as `[heads, tokens, head_dim or 1]`."""
        assert spec.attention.gate is not None
        function = sigmoid if spec.attention.gate.function == "sigmoid" else FUNCTIONS["softplus"]
        return function(self.heads(gate, gate.shape[-1] // spec.attention.num_heads))

    def _matrix_of(self, expert: int, part: ExpertLinear, stacks: dict[str, Array]) -> Array:
        """Return an expert's matrix, from the stack or, if rows can be read, alone."""
        if self._rows is None:
            matrix: Array = stacks[part.name][expert].astype(self._dtype, copy=False)
            return matrix
        rows = slice(expert * part.num_outputs, (expert + 1) * part.num_outputs)
        return self._rows(part.name, rows).astype(self._dtype, copy=False)

    def _expert(self, x: Array, spec: ExpertsSpec, expert: int, tensors: dict[str, Array]) -> Array:
        """Return the output of one expert."""

        def multiply(rows: Array, layer: ExpertLinear) -> Array:
            rows = round_to_int8(rows) if self._quantized(layer.name) else rows
            product = _product(rows, tensors[layer.name])
            return product + self._read(layer.bias_name)[expert] if layer.has_bias else product

        parts = [multiply(x, layer) for layer in (spec.gate, spec.up) if layer is not None]
        return multiply(self.activate(tuple(parts), spec.experts.function, 0), spec.down)

    def _multiply(
        self, x: Array, layer: Linear, *, rounded: bool = True, outputs: Sequence[slice] | None = None
    ) -> Array:
        """Return `factor * (W x + b)`, with inputs rounded if the kernels do so."""
        x = round_to_int8(x) if rounded and self._quantized(layer.name) else x
        product = np.concatenate(self._products(x, layer, outputs), axis=-1)
        if layer.has_bias:
            bias = self._read(layer.bias_name)
            product = product + (bias if outputs is None else np.concatenate([bias[rows] for rows in outputs]))
        return product if layer.factor == 1.0 else product * self._number(layer.factor)

    def _products(self, x: Array, layer: Linear, outputs: Sequence[slice] | None) -> list[Array]:
        """Return products with parts of a matrix, or with some outputs, in their order."""
        read = self._rows
        if read is None:
            matrix = self._read(layer.name)
            return [_product(x, matrix if outputs is None else np.concatenate([matrix[rows] for rows in outputs]))]
        size = max(1, STRIP // layer.num_inputs)
        strips = [
            slice(start, min(start + size, run.stop))
            for run in outputs or [slice(0, layer.num_outputs)]
            for start in range(run.start, run.stop, size)
        ]
        with ThreadPoolExecutor(min(default_num_threads(), _MOST_THREADS)) as pool:  # reading takes longest
            return [*pool.map(lambda rows: _product(x, read(layer.name, rows).astype(self._dtype, copy=False)), strips)]

    def _norm(self, x: Array, norm: Norm) -> Array:
        """Return rows normalized, with gain and bias."""
        groups = x if norm.group is None else x.reshape(*x.shape[:-1], -1, norm.group)
        normed = normalized(groups, norm.eps, norm.kind).reshape(x.shape)
        normed = normed * self._read(norm.name) if norm.has_gain else normed
        return normed + self._read(norm.bias_name) if norm.has_bias else normed

    @property
    def _in_codes(self) -> bool:
        """True if queries and attention weights are rounded, too."""
        return self._kv_dtype == "k12v8"

    def _round_kv(self, x: Array) -> Array:
        """Return keys or values rounded to the KV format."""
        if self._in_codes:
            return rounded_keys(x)
        return x.astype(np.float16).astype(x.dtype) if self._kv_dtype == "f16" else x

    def _read(self, name: str) -> Array:
        """Return a weight in the reference's precision."""
        return self._weight(name).astype(self._dtype, copy=False)


def _product(x: Array, matrix: Array) -> Array:
    """Return `x W^T`.

    With the many rows of the matrix first, a BLAS on several cores is 10 times as fast.
    """
    product: Array = (matrix @ x.T).T
    return product
