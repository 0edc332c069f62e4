"""Attention, of heads or of a latent row, with all that families do to it, and its rotary positions; `kind` says which.

Knows no layer around it.
"""

from __future__ import annotations

from typing import Literal

from .ranges import ContextLength, Dimension, Factors, HeadDim, Heads, Index, NotNegative, Positive, Strict, Window


class _Scaling(Strict, frozen=True, kw_only=True, tag_field="kind"):
    pass


class LinearScaling(_Scaling, frozen=True, kw_only=True, tag="linear"):
    """All frequencies are divided by `factor`."""

    factor: Positive


class Llama3Scaling(_Scaling, frozen=True, kw_only=True, tag="llama3"):
    """Slow frequencies are divided by `factor`, fast ones are kept, those between are blended (Llama 3.1)."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: ContextLength


class YarnScaling(_Scaling, frozen=True, kw_only=True, tag="yarn"):
    """YaRN (Peng et al., 2023). Without `attention_factor` it follows from `factor`, or from both `mscale`s."""

    factor: Positive
    original_max_position_embeddings: ContextLength
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True
    attention_factor: Positive | None = None
    mscale: NotNegative = 0.0
    mscale_all_dim: NotNegative = 0.0


class FactorsScaling(_Scaling, frozen=True, kw_only=True, tag="factors"):
    """A divisor for each frequency, as GGUF stores them in `rope_freqs.weight`."""

    factors: Factors
    attention_factor: Positive = 1.0


class LongRopeScaling(_Scaling, frozen=True, kw_only=True, tag="longrope"):
    """Divisors for contexts up to the original length, and for longer ones (Phi-3). The compiled context length
    chooses, never a prompt's: a manifest holds the choice, as `factors`."""

    short_factors: Factors
    long_factors: Factors
    original_max_position_embeddings: ContextLength
    attention_factor: Positive


class ProportionalScaling(_Scaling, frozen=True, kw_only=True, tag="proportional"):
    """Only the first `num_pairs` pairs turn, at the frequencies that they have among all (Gemma 4)."""

    num_pairs: Dimension
    factor: Positive = 1.0


class DynamicScaling(_Scaling, frozen=True, kw_only=True, tag="dynamic"):
    """A larger base: `theta * alpha ** (d / (d - 2))` (Hunyuan)."""

    alpha: Positive


RopeScaling = (
    LinearScaling
    | Llama3Scaling
    | YarnScaling
    | FactorsScaling
    | LongRopeScaling
    | ProportionalScaling
    | DynamicScaling
)


class Rope(Strict, frozen=True, kw_only=True):
    """Rotary positions (Su et al., 2021) of the first `rotary_dim` numbers of a head; halves are rotated."""

    theta: Positive
    rotary_dim: HeadDim
    scaling: RopeScaling | None = None


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
        skips_first: the row of a sequence's first token is seen by no other.
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
    skips_first: bool = False


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
        skips_first: the row of a sequence's first token is seen by no other.
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
    skips_first: bool = False

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
