"""Choose a model's context length, the attributes that depend on it, and the KV format of each layer.

None of these depends on a prompt's length, as batch invariance requires. Knows models and targets, not kernels.
"""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace
from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVDType, KVLayer, KVLayout
from radixlm.runtime.artifact.model_config import (
    AnyAttention,
    FactorsScaling,
    LatentAttention,
    LongRopeScaling,
    Mixer,
    ModelConfig,
    Recurrent,
    Rope,
)
from radixlm.runtime.errors import InvalidParameter

from .codegen.targets import Target

USUAL_LENGTH_OF_STEP = 2048  # tokens of a text that is computed in one step, whose memory grows with them


def context_length(config: ModelConfig, wanted: int | None) -> int:
    """Return the maximum tokens of a sequence: as `wanted`, or the context length of the model's training.

    By default, an encoder has at most `USUAL_LENGTH_OF_STEP`, because it computes a sequence in one step.

    Raises:
        InvalidParameter: `wanted` is less than a page, or more than the model was trained for.
    """
    trained = config.max_position_embeddings
    if wanted is None:
        return min(trained, USUAL_LENGTH_OF_STEP) if config.is_bidirectional else trained
    if not PAGE_SIZE <= wanted <= trained:
        raise InvalidParameter(
            f"context length {wanted} is not in {PAGE_SIZE}..{trained}, which is what the model was trained for"
        )
    return wanted


def resolved(config: ModelConfig, length: int) -> ModelConfig:
    """Return the model for contexts of `length` tokens: without windows that long, and with one RoPE scaling."""
    layers = tuple(replace(layer, mixer=_resolve_mixer(layer.mixer, length)) for layer in config.layers)
    mtp = None if config.mtp is None else replace(config.mtp, mixer=_resolve_mixer(config.mtp.mixer, length))
    return replace(config, layers=layers, mtp=mtp)


def _resolve_mixer(attention: Mixer, length: int) -> Mixer:
    """Return a mixer for contexts of `length` tokens; see `resolved`."""
    if isinstance(attention, Recurrent):
        return attention
    if isinstance(attention, LatentAttention):
        return replace(attention, rope=_resolve_rope(attention.rope, length))
    window, chunk = (
        size if size is not None and size < length else None for size in (attention.window, attention.chunk)
    )
    rope = None if attention.rope is None else _resolve_rope(attention.rope, length)
    return replace(attention, window=window, chunk=chunk, rope=rope)


def _resolve_rope(rope: Rope, length: int) -> Rope:
    """Return rotary positions for contexts of `length` tokens, with one of LongRoPE's two tables."""
    scaling = rope.scaling
    if not isinstance(scaling, LongRopeScaling):
        return rope
    is_long = length > scaling.original_max_position_embeddings
    factors = scaling.long_factors if is_long else scaling.short_factors
    return replace(rope, scaling=FactorsScaling(factors=factors, attention_factor=scaling.attention_factor))


_MOST_OF_HEAD = 1024  # numbers, as `HeadDim` limits it

KVChoice = Literal["auto", "f16", "f32", "k12v8"]
"""A kind, or `auto`: the fastest kind that takes no more memory than f16."""


def kv_layout(config: ModelConfig, choice: KVChoice, target: Target) -> KVLayout:
    """Return the KV layout of a model's layers.

    `auto` is k12v8 if one instruction multiplies and adds its codes, and f16 otherwise, because integers were then at
    best as fast as floats.

    Raises:
        InvalidParameter: the model's KV cannot have this format.
    """
    why_not = why_no_codes(config)
    if choice == "k12v8" and why_not is not None:
        raise InvalidParameter(f"kv_dtype is 'k12v8', and {config.architecture} {why_not}; use f16")
    if choice != "auto":
        return _layout(config, choice)
    exact = _layout(config, "f16")
    if why_not is not None or target.integer_dot != "vnni512":
        return exact
    codes = _layout(config, "k12v8")
    # with small heads, scales take as much as the codes save
    return codes if codes.page_bytes <= exact.page_bytes else exact


def why_no_codes(config: ModelConfig) -> str | None:
    """Return the reason why a model's KV cannot be codes; None if it can.

    >>> why_no_codes(config)
    'keeps latent vectors, which are keys and values at once'
    """
    if any(isinstance(mixer, LatentAttention) for mixer in config.kv_attentions):
        return "keeps latent vectors, which are keys and values at once"
    if odd := [mixer.head_dim for mixer in config.kv_attentions if mixer.head_dim % 2]:
        return f"has heads of {odd[0]} numbers, which make no pairs"
    return None


def _layout(config: ModelConfig, dtype: KVDType) -> KVLayout:
    """Return the KV layout of a model, with KV stored as `dtype`."""

    def layer(mixer: AnyAttention) -> KVLayer:
        is_latent = isinstance(mixer, LatentAttention)
        value_dim = mixer.latent_dim if isinstance(mixer, LatentAttention) else mixer.head_dim
        return KVLayer(
            num_kv_heads=mixer.num_kv_heads, key_dim=mixer.head_dim, value_dim=value_dim, values_in_keys=is_latent
        )

    layers = tuple(layer(mixer) for mixer in config.kv_attentions)
    if config.mtp is not None:
        layers += (_hidden_rows(config.hidden_size),)
    return KVLayout(dtype=dtype, page_size=PAGE_SIZE, layers=layers)


def _hidden_rows(hidden_size: int) -> KVLayer:
    """Return the KV layer that stores an MTP head's hidden states, `hidden_size` numbers for each token.

    They are keys, split into the fewest heads that are narrow enough and of the same even width.
    """
    num_heads = next(n for n in range(-(-hidden_size // _MOST_OF_HEAD), hidden_size + 1) if hidden_size % (2 * n) == 0)
    size = hidden_size // num_heads
    return KVLayer(num_kv_heads=num_heads, key_dim=size, value_dim=size, values_in_keys=True)
