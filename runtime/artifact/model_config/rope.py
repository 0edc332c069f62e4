"""Rotary positions, and how their frequencies are stretched; `kind` says which way.

Knows no attention.
"""

from __future__ import annotations

from .ranges import ContextLength, Dimension, Factors, HeadDim, NotNegative, Positive, Strict


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
