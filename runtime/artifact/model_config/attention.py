"""Configuration of attention, with KV heads or with latent rows, and its rotary positions; `kind` is the tag.

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
    """Divisors for contexts up to the original length, and for longer ones (Phi-3).

    The compiled context length chooses, never a prompt's: a manifest holds the choice, as `factors`.
    """

    short_factors: Factors
    long_factors: Factors
    original_max_position_embeddings: ContextLength
    attention_factor: Positive


class ProportionalScaling(_Scaling, frozen=True, kw_only=True, tag="proportional"):
    """Only the first `num_pairs` pairs are rotated, at the frequencies that they have among all pairs (Gemma 4)."""

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
    """Norm of queries and keys: of each head, with shared gains or its own, or of all heads together."""

    over: Literal["head", "each_head", "width"] = "head"
    kind: Literal["rms", "layer"] = "rms"
    has_gain: bool = True
    after_rope: bool = False


class Gate(Strict, frozen=True, kw_only=True):
    """A gate on attention's output: a function of the layer's input multiplies each number, or each head."""

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
        scale: multiplies scores.
        bias: queries, keys and values have one; `output_bias`: the output has one.
        value_norm: values get an RMS norm of each head, without gain.
        window: a token sees itself and `window - 1` before it; `chunk`: only its own chunk of this many positions.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
        sinks: each head has a logit that takes part in the softmax, and has no value.
        keys_are_values: values are the output of `k_proj`, before norm and rotation.
        shared_kv: the layer whose KV is read; this layer then has none of its own.
        skips_first: no other token sees the row of a sequence's first token.
        bidirectional: a token sees those after it, too, as far to that side as a window reaches to the other.
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
    bidirectional: bool = False


class LatentAttention(Strict, frozen=True, kw_only=True, tag_field="kind", tag="latent_attention"):
    """Multi-head latent attention (DeepSeek-V2, 2024): a token keeps one row for all heads.

    The row is a normalized latent vector of `latent_dim` numbers, followed by a rotated key. A head multiplies its
    query by its own matrix before the scores, and its weighted sum of latent vectors by another.

    Attributes:
        scale: multiplies scores.
        rope: of the rotated key, and of the last numbers of each query; `neighbours`: in a checkpoint's rows for these,
            adjacent numbers are rotated together.
        plain_dim: numbers of a query before the rotated ones; `value_dim`: numbers that a head passes to the output
            matrix.
        query_dim: queries are computed from a normalized vector of this size; None: from the layer's input.
        bias: the projections to latent vectors have one; `output_bias`: the output has one.
        skips_first: no other token sees the row of a sequence's first token.
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
        """Number of KV heads: 1, because all heads read the same row."""
        return 1

    @property
    def head_dim(self) -> int:
        """Numbers in the row of a token. Heads sum the first `latent_dim` of them."""
        return self.latent_dim + self.rope.rotary_dim

    @property
    def query_size(self) -> int:
        """Numbers in a head's query before its matrix."""
        return self.plain_dim + self.rope.rotary_dim

    # Options that only `Attention` has.

    @property
    def window(self) -> None:
        """None: a token sees all before it."""

    @property
    def chunk(self) -> None:
        """None: a token sees all before it."""

    @property
    def soft_cap(self) -> None:
        """None: scores are not capped."""

    @property
    def sinks(self) -> bool:
        """False: there are none."""
        return False

    @property
    def shared_kv(self) -> None:
        """None: each layer keeps rows of its own."""

    @property
    def bidirectional(self) -> bool:
        """A token sees none after it."""
        return False


AnyAttention = Attention | LatentAttention
