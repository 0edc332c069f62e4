"""Read `rope_scaling` of a source into a configuration. Knows the keys of each kind, and their defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from radixlm.runtime.artifact.model_config import (
    DynamicScaling,
    FactorsScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeScaling,
    YarnScaling,
)
from radixlm.runtime.errors import CorruptSource, UnsupportedArchitecture

_KINDS = "linear, llama3, yarn, longrope, proportional and dynamic"


def rope_scaling(
    label: str,
    rope: Mapping[str, Any],
    factors: Mapping[str, tuple[float, ...]],
    *,
    rotary_dim: int,
    max_position_embeddings: int,
    original: int | None,
) -> RopeScaling | None:
    """Return the scaling of RoPE frequencies, or None.

    Args:
        rope: `rope_scaling` or `rope_parameters`.
        factors: divisors that a GGUF file stores: `rope_freqs`, or `rope_factors_short` and `rope_factors_long`.
        original: the context length of the original training, if it is stored outside of `rope`.

    Raises:
        UnsupportedArchitecture: the kind is unknown.
    """
    if "rope_freqs" in factors:
        return FactorsScaling(factors=factors["rope_freqs"])
    kind = rope.get("rope_type", rope.get("type", "default"))
    original = rope.get("original_max_position_embeddings") or original or max_position_embeddings
    if "rope_factors_long" in factors:
        kind = "longrope"
        names = (("short_factor", "rope_factors_short"), ("long_factor", "rope_factors_long"))
        rope = {**rope, **{key: factors[name] for key, name in names}}
    try:
        return _scaling(kind, rope, original, max_position_embeddings, rotary_dim)
    except _UnknownKind:
        raise UnsupportedArchitecture(f"{label}: RoPE scaling {kind!r} is not supported, only {_KINDS}") from None
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CorruptSource(f"{label}: RoPE scaling {kind!r} lacks or has a wrong {error}") from None


class _UnknownKind(Exception):
    """The kind of `rope_scaling` is unknown."""


def _scaling(
    kind: object, rope: Mapping[str, Any], original: int, max_positions: int, rotary_dim: int
) -> RopeScaling | None:
    """Return the scaling of a kind. Raises _UnknownKind."""
    match kind:
        case "default" | "none" | "mrope":
            return None
        case "linear":
            return None if rope["factor"] == 1.0 else LinearScaling(factor=rope["factor"])
        case "llama3":
            keys = ("factor", "low_freq_factor", "high_freq_factor")
            return Llama3Scaling(original_max_position_embeddings=original, **{key: rope[key] for key in keys})
        case "yarn":
            more = ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")
            given = {key: rope[key] for key in more if rope.get(key) is not None}
            factor = max_positions / original if rope["factor"] is None else rope["factor"]
            return YarnScaling(factor=factor, original_max_position_embeddings=original, **given)
        case "longrope" | "su":
            factor = rope.get("factor") or max_positions / original
            attention = rope.get("attention_factor") or _longrope_factor(factor, original)
            return LongRopeScaling(
                short_factors=tuple(rope["short_factor"]),
                long_factors=tuple(rope["long_factor"]),
                original_max_position_embeddings=original,
                attention_factor=attention,
            )
        case "proportional":
            share = rope.get("partial_rotary_factor", 1.0)
            return ProportionalScaling(num_pairs=int(share * rotary_dim // 2), factor=rope.get("factor") or 1.0)
        case "dynamic":  # without alpha it begins beyond the original context length
            return DynamicScaling(alpha=rope["alpha"]) if rope.get("alpha") else None
    raise _UnknownKind


def _longrope_factor(factor: float, original: int) -> float:
    """Return LongRoPE's factor of attention for a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
