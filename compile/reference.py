"""Evaluate a decoder in plain NumPy, so that compiled kernels have something slow and obvious to agree with.

Knows the arithmetic of Llama and Qwen2 (the formulas of `transformers`, in its order where rounding shows),
the int8 rounding of activations and the rounding of KV; not kernels, layouts, pages or files. Weights are
asked for by their Hugging Face names, one at a time and never kept, so that a 7B model needs memory for its
largest tensor only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from radixlm.runtime.artifact.manifest import KVDType, ModelConfig

from .ops.rope_frequencies import rope_frequencies

Array = npt.NDArray[np.floating[Any]]
Float32Array = npt.NDArray[np.float32]
GetWeight = Callable[[str], npt.NDArray[Any]]

ACTIVATION_GROUP = 32  # activations that share one int8 scale


def nothing_quantized(name: str) -> bool:
    """The `quantized` of a model whose weights are all floats."""
    return False


def reference_logits(
    config: ModelConfig,
    weight: GetWeight,
    token_ids: Sequence[int] | npt.NDArray[np.integer[Any]],
    *,
    quantized: Callable[[str], bool] = nothing_quantized,
    kv_dtype: KVDType = "f32",
    dtype: npt.DTypeLike = np.float32,
) -> Array:
    """Logits after each token of one sequence, `[len(token_ids), vocab_size]`, positions counted from 0.

    `weight(name)` gives a dequantized tensor under its Hugging Face name, matrices as `[out, in]`. Where
    `quantized(name)` is true, the activations that enter that matrix are rounded to int8 first, as the
    kernels do; keys (after RoPE) and values are rounded as `kv_dtype` says, to int8 with a scale for each
    token and head. `dtype` is the precision of all else: float64 shows how much of a difference is float32's own.

    >>> weight = lambda name: source.read(name).dequantize()  # doctest: +SKIP
    >>> logits = reference_logits(source.config, weight, [1, 15043])  # doctest: +SKIP
    """
    model = _Model(config, weight, quantized, kv_dtype, np.dtype(dtype))
    hidden = model.embed(np.asarray(token_ids, dtype=np.int64))
    cos, sin = rope_table(config, num_positions=len(hidden))
    for layer in range(config.num_hidden_layers):
        hidden = model.layer(layer, hidden, cos, sin)
    return model.logits(hidden)


def rope_table(config: ModelConfig, num_positions: int) -> tuple[Float32Array, Float32Array]:
    """Cosines and sines of positions `[0, num_positions)`, each float32 `[num_positions, head_dim / 2]`."""
    positions = np.arange(num_positions, dtype=np.float32)
    angles = positions[:, None] * rope_frequencies(config)[None, :]
    return np.cos(angles), np.sin(angles)


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


@dataclass(frozen=True)
class _Model:
    """The blocks of the decoder; each takes and returns `[tokens, width]`."""

    config: ModelConfig
    weight: GetWeight
    quantized: Callable[[str], bool]
    kv_dtype: KVDType
    dtype: np.dtype[Any]

    def embed(self, token_ids: npt.NDArray[np.int64]) -> Array:
        return self._read("model.embed_tokens.weight", token_ids)

    def layer(self, index: int, hidden: Array, cos: Array, sin: Array) -> Array:
        prefix = f"model.layers.{index}."
        normed = self._rms_norm(prefix + "input_layernorm.weight", hidden)
        hidden = hidden + self._attention(prefix + "self_attn.", normed, cos, sin)
        normed = self._rms_norm(prefix + "post_attention_layernorm.weight", hidden)
        return hidden + self._mlp(prefix + "mlp.", normed)

    def logits(self, hidden: Array) -> Array:
        name = "model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"
        return self._linear(name, self._rms_norm("model.norm.weight", hidden))

    def _attention(self, prefix: str, normed: Array, cos: Array, sin: Array) -> Array:
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        query = _rotate(self._heads(prefix + "q_proj", normed, heads), cos, sin)
        key = self._round_kv(_rotate(self._heads(prefix + "k_proj", normed, kv_heads), cos, sin))
        value = self._round_kv(self._heads(prefix + "v_proj", normed, kv_heads))
        group = heads // kv_heads
        mixed = [attend(query[head], key[head // group], value[head // group]) for head in range(heads)]
        return self._linear(prefix + "o_proj.weight", np.concatenate(mixed, axis=-1))

    def _mlp(self, prefix: str, normed: Array) -> Array:
        gate = self._linear(prefix + "gate_proj.weight", normed)
        up = self._linear(prefix + "up_proj.weight", normed)
        return self._linear(prefix + "down_proj.weight", _silu(gate) * up)

    def _heads(self, prefix: str, normed: Array, num_heads: int) -> Array:
        """Project to `[num_heads, tokens, head_dim]`."""
        projected = self._linear(prefix + ".weight", normed)
        if self.config.attention_bias:
            projected = projected + self._read(prefix + ".bias")
        return projected.reshape(len(normed), num_heads, self.config.head_dim).swapaxes(0, 1)

    def _linear(self, name: str, x: Array) -> Array:
        product: Array = (round_to_int8(x) if self.quantized(name) else x) @ self._read(name).T
        return product

    def _rms_norm(self, name: str, x: Array) -> Array:
        mean_square = np.mean(x * x, axis=-1, keepdims=True) + self.dtype.type(self.config.rms_norm_eps)
        normed: Array = x / np.sqrt(mean_square) * self._read(name)
        return normed

    def _round_kv(self, x: Array) -> Array:
        if self.kv_dtype == "int8":
            return round_to_int8(x, group=x.shape[-1])
        return x.astype(np.float16).astype(x.dtype) if self.kv_dtype == "f16" else x

    def _read(self, name: str, rows: npt.NDArray[np.int64] | None = None) -> Array:
        tensor = self.weight(name)
        return (tensor if rows is None else tensor[rows]).astype(self.dtype, copy=False)


def attend(query: Array, key: Array, value: Array) -> Array:
    """Causal softmax attention of one head, all `[tokens, head_dim]`."""
    scores = query @ key.T * query.dtype.type(query.shape[-1] ** -0.5)
    scores = np.where(np.tri(len(query), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed: Array = weights / weights.sum(axis=-1, keepdims=True) @ value
    return mixed


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """RoPE on `[heads, tokens, head_dim]`; a head's halves are the pairs (Hugging Face's order)."""
    first, second = np.split(x, 2, axis=-1)
    rotated = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype, copy=False)


def _silu(x: Array) -> Array:
    with np.errstate(over="ignore"):  # exp(-x) may become inf, and x / inf is the right 0
        activated: Array = x / (1 + np.exp(-x))
    return activated
