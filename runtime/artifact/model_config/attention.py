"""Attention, of heads or of a latent row, with all that families do to it; `kind` says which.

Knows no layer around it.
"""

from __future__ import annotations

from typing import Literal

from .ranges import ContextLength, Dimension, HeadDim, Heads, Index, Positive, Strict, Window
from .rope import Rope


class QKNorm(Strict, frozen=True, kw_only=True):
    """Norm of queries and keys: of each head, with gains of all heads or of its own, or of all heads together."""

    over: Literal["head", "each_head", "width"] = "head"
    kind: Literal["rms", "layer"] = "rms"
    has_gain: bool = True
    after_rope: bool = False


class Gate(Strict, frozen=True, kw_only=True):
    """What attention gathers is multiplied by a function of the layer's input: number by number, or head by head."""

    over: Literal["element", "head"] = "element"
    function: Literal["sigmoid", "softplus"] = "sigmoid"
    bias: bool = False


class Temperature(Strict, frozen=True, kw_only=True):
    """Queries are multiplied by `1 + beta * ln(1 + floor((position + shift) / original_length))`."""

    beta: Positive
    original_length: ContextLength
    shift: Literal[0, 1] = 0


class Attention(Strict, frozen=True, kw_only=True, tag_field="kind", tag="attention"):
    """Softmax attention of grouped query heads.

    Attributes:
        scale: what scores are multiplied with.
        bias: queries, keys and values have one; `output_bias`: so has the output.
        value_norm: values get an RMS norm of each head, without gain.
        window: a token sees itself and `window - 1` before it; `chunk`: only its own chunk of so many positions.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
        sinks: each head has a logit that takes part in the softmax, and has no value.
        keys_are_values: values are what `k_proj` gives, before norm and rotation.
        shared_kv: the layer whose keys and values are read; this one then has none of its own.
    """

    num_heads: Heads
    num_kv_heads: Heads
    head_dim: HeadDim
    scale: Positive
    rope: Rope | None = None
    bias: bool = False
    output_bias: bool = False
    qk_norm: QKNorm | None = None
    value_norm: bool = False
    window: Window | None = None
    chunk: Window | None = None
    soft_cap: Positive | None = None
    sinks: bool = False
    gate: Gate | None = None
    temperature: Temperature | None = None
    keys_are_values: bool = False
    shared_kv: Index | None = None


class LatentAttention(Strict, frozen=True, kw_only=True, tag_field="kind", tag="latent_attention"):
    """Multi-head latent attention (DeepSeek-V2, 2024): a token keeps one row for all heads.

    The row is a latent vector of `latent_dim` numbers, normalized, and behind it a rotated key. A head's query is
    multiplied by its own matrix before it meets the rows, and what it gathers of the latent vectors by another.

    Attributes:
        scale: what scores are multiplied with.
        rope: of the rotated key, and of as many numbers at the end of each query; `neighbours`: of a checkpoint's rows
            for these, neighbours rotate against each other.
        plain_dim: the numbers of a query before those; `value_dim`: of what a head hands to the output matrix.
        query_dim: queries are made of a normalized vector of so many numbers; None of the layer's input itself.
        bias: what makes the latent vectors has one; `output_bias`: so has the output.
    """

    num_heads: Heads
    latent_dim: HeadDim
    plain_dim: HeadDim
    value_dim: HeadDim
    scale: Positive
    rope: Rope
    query_dim: Dimension | None = None
    neighbours: bool = True
    bias: bool = False
    output_bias: bool = False
    temperature: Temperature | None = None

    @property
    def num_kv_heads(self) -> int:
        """All heads read the same row."""
        return 1

    @property
    def head_dim(self) -> int:
        """Numbers of the row that a token keeps; of these the first `latent_dim` are what heads gather."""
        return self.latent_dim + self.rope.rotary_dim

    @property
    def query_size(self) -> int:
        """Numbers of a head's query before its matrix."""
        return self.plain_dim + self.rope.rotary_dim

    # What only `Attention` may have.

    @property
    def window(self) -> None:
        """A token sees all before it."""

    @property
    def chunk(self) -> None:
        """As `window`."""

    @property
    def soft_cap(self) -> None:
        """Scores are not bent."""

    @property
    def sinks(self) -> bool:
        """There are none."""
        return False

    @property
    def shared_kv(self) -> None:
        """Each layer keeps rows of its own."""


AnyAttention = Attention | LatentAttention
