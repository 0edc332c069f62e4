"""What of a model depends on the context length that it is compiled for. Never on a prompt's: the law of the row."""

from __future__ import annotations

from msgspec.structs import replace
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.artifact.model_config import (
    FactorsScaling,
    LatentAttention,
    LongRopeScaling,
    Mixer,
    ModelConfig,
    Recurrent,
    Rope,
)
from radixlm.runtime.errors import InvalidParameter


def context_length(config: ModelConfig, wanted: int | None) -> int:
    """The most tokens of a sequence: as wanted, or as many as the model was trained for.

    Raises:
        InvalidParameter: the model was not trained for so many.
    """
    trained = config.max_position_embeddings
    if wanted is None:
        return trained
    if not PAGE_SIZE <= wanted <= trained:
        raise InvalidParameter(
            f"context length {wanted} is not in {PAGE_SIZE}..{trained}, which is what the model was trained for"
        )
    return wanted


def resolved(config: ModelConfig, length: int) -> ModelConfig:
    """The same model for contexts of `length`: without windows that hold all of it, and with one set of factors."""
    layers = tuple(replace(layer, mixer=_resolved(layer.mixer, length)) for layer in config.layers)
    return replace(config, layers=layers)


def _resolved(attention: Mixer, length: int) -> Mixer:
    if isinstance(attention, Recurrent):
        return attention
    if isinstance(attention, LatentAttention):
        return replace(attention, rope=_chosen(attention.rope, length))
    window, chunk = (
        size if size is not None and size < length else None for size in (attention.window, attention.chunk)
    )
    rope = None if attention.rope is None else _chosen(attention.rope, length)
    return replace(attention, window=window, chunk=chunk, rope=rope)


def _chosen(rope: Rope, length: int) -> Rope:
    scaling = rope.scaling
    if not isinstance(scaling, LongRopeScaling):
        return rope
    is_long = length > scaling.original_max_position_embeddings
    factors = scaling.long_factors if is_long else scaling.short_factors
    return replace(rope, scaling=FactorsScaling(factors=factors, attention_factor=scaling.attention_factor))
